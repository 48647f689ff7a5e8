"""Whose turn it is: the order in which the wrappers of one group launch their buckets, the same on all ranks.

Several wrappers may take part in one backward, and their gradients may come in another order on another rank. So they
take turns. Backward visits modules in the reverse order of their forwards; so a wrapper holds its launches back until
every wrapper whose forward came later has launched all of its own. The end of backward launches what is left, of all
wrappers in that same order, before anybody waits. Two kinds have no turn of their own and launch at the end, after the
others: a wrapper in a backward that no forward announced (a second one through the same graph), and one whose forward
has last held others back in vain (a teacher that is never trained).

Within a turn, buckets are launched in the order that the turn names, each once all before it are.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

from fusedring.group.communicator import Communicator


class Turn:
    """One wrapper's.

    number: the wrapper's, in the order in which they were made. order: of its buckets, by index.
    expecting: whether a synced forward has run and not all buckets were launched since.
    run: which run of autograd's engine its step belongs to; None outside of a step.
    """

    def __init__(self, number: int, order: Sequence[int]) -> None:
        self.number, self.order = number, tuple(order)
        self.expecting = False
        self.run: int | None = None
        self._forward = 0
        self._held_in_vain = False
        self._early = False
        self._left: deque[int] = deque()

    def expect(self, *, late: bool) -> None:
        """A synced forward has begun, so its backward is expected.

        late: within a backward (reentrant checkpointing), so that its gradients come after those of earlier forwards.
        """
        forward = next(_forwards)
        self._forward, self.expecting = -forward if late else forward, True

    def begin(self, run: int, *, alone: bool) -> None:
        """A step begins. alone: no other wrapper has to be thought of."""
        self.run, self._left = run, deque(self.order)
        self._early = alone or (self.expecting and not self._held_in_vain)
        self._held_in_vain = False

    def end(self) -> None:
        """The step is over."""
        self.run, self.expecting = None, False

    @property
    def next(self) -> int | None:
        """The bucket that is launched next in the step; None once all were."""
        return self._left[0] if self._left else None

    @property
    def is_last(self) -> bool:
        """Whether no bucket comes after the next one."""
        return len(self._left) == 1

    def launched(self) -> None:
        """The next bucket was launched."""
        self._left.popleft()

    def holds_back(self, other: Turn) -> bool:
        """Whether `other` has to wait until this wrapper has launched all its buckets."""
        return self.expecting and not self._held_in_vain and self._forward > other._forward

    def note_vain(self, other: Turn) -> None:
        """`other` has ended a step in which this wrapper, though expected, took no part."""
        if self.run is None and self.expecting and self._forward > other._forward:
            self._held_in_vain = True

    @property
    def place(self) -> tuple[bool, int, int]:
        """Turns of one run launch in the order of their places."""
        return (not self._early, -self._forward, self.number)

    @property
    def may_come_early(self) -> bool:
        """Whether its buckets may be launched before the end of backward."""
        return self._early


class Participant(Protocol):
    """What has a turn: drives the buckets of one wrapper."""

    turn: Turn

    def advance(self) -> None:
        """Launch the buckets that are ready, if it may."""

    def launch_rest(self) -> None:
        """At the end of backward: launch all buckets that are left."""

    def launch_flags(self) -> None:
        """Behind the buckets of all: launch the flags."""


class Turns:
    """The turns of all wrappers of one group."""

    def __init__(self) -> None:
        self._participants: WeakSet[Participant] = WeakSet()
        self._numbers = itertools.count()

    def number(self) -> int:
        """A number for one more wrapper; the same on all ranks if they make their wrappers in the same order."""
        return next(self._numbers)

    def join(self, participant: Participant) -> None:
        """Take part from now on, as long as it lives."""
        self._participants.add(participant)

    def begin(self, turn: Turn, run: int) -> None:
        """A step of `turn` begins, in run number `run` of autograd's engine."""
        turn.begin(run, alone=len(self._participants) == 1)

    def may_launch(self, turn: Turn) -> bool:
        """Whether it is this wrapper's turn, before the end of backward."""
        return turn.may_come_early and not any(other.turn.holds_back(turn) for other in self._participants)

    def pass_on(self, turn: Turn) -> None:
        """All buckets of `turn` are launched: those that it held back may go."""
        if turn.expecting:
            turn.expecting = False
            for participant in self._in_turn(turn.run):
                participant.advance()

    def launch_rest(self, turn: Turn) -> None:
        """At the end of the run that `turn` is in: everybody in it launches what is left, in turn, then the flags.

        So do wrappers of other groups, before anybody waits: on another rank, theirs may be the first to end.
        """
        partners = [participant for turns in list(_turns.values()) for participant in turns._in_turn(turn.run)]
        for participant in partners:
            participant.launch_rest()
        for participant in partners:
            participant.launch_flags()
        for participant in self._participants:
            participant.turn.note_vain(turn)

    def _in_turn(self, run: int | None) -> list[Participant]:
        partners = (other for other in self._participants if other.turn.run == run)
        return sorted(partners, key=lambda other: other.turn.place)


def turns_of(communicator: Communicator) -> Turns:
    """The turns of a communicator's group."""
    return _turns.setdefault(communicator, Turns())


_turns: WeakKeyDictionary[Communicator, Turns] = WeakKeyDictionary()
_forwards = itertools.count(1)
