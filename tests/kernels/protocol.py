"""The protocol of the kernels, small enough to try every interleaving of it (interleavings.py does).

A *program* is what one channel of one rank does in a few launches (epochs) that follow each other: no branches, only
these actions, in the order in which kernels/ring.py and kernels/direct.py have them:

    wait   for a signal to reach a number; possible only when it has
    read   a slot of its own, and find in it the chunk of this epoch that the plan says, with the right contributors
    join   the other channels of the rank: the next launch begins when all have finished this one
    store  a chunk into a peer's slot (put), or the epoch into a peer's signal (post)

Stores do not happen when they are issued: each *lands* at any later moment. A chunk may overtake everything of its
rank but a chunk for the same memory, even the signals before it; a post, being a release, lands after everything that
its program issued before, and after all that its rank stored in earlier launches. That allows more than the hardware
does. A signal holds what landed last, also if that is less.

Instead of numbers, slots hold where chunks come from: epoch, segment, chunk, contributors. Memory is modelled by
address, as the algorithms cut one set of slots into rows of different sizes: a slot of one overlaps several of another.
Every launch fills its rows.

Left out: time (a wait that expires, abort, NaN) and the wrap of epochs at 2^31.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from fusedring.config import Algorithm, Kind


@dataclass(frozen=True)
class Launch:
    """One launch. chunks: how many of the chunks of each part (see plan.py) hold anything."""

    algorithm: Algorithm
    chunks: tuple[int, ...]
    kind: Kind = "all_reduce"


@dataclass(frozen=True)
class Rules:
    """The rules of the protocol. Each can be broken, to see that it is needed.

    parity: epochs use two sets of slots in turn. release: a post lands after the chunks before it. compare_epochs: a
    wait is for this epoch, not for any. post_empty, await_empty: also where there is nothing to carry. separate_rows:
    ring and direct algorithms have their own rows of signals. stream_order: a rank's channels join between launches.
    no_wait: the wait that is left out: rank, and which.
    """

    parity: bool = True
    release: bool = True
    compare_epochs: bool = True
    post_empty: bool = True
    await_empty: bool = True
    separate_rows: bool = True
    stream_order: bool = True
    no_wait: tuple[int, int] | None = None


Signal = tuple[int, int, int]
"""Rank in whose memory it is, row, index in the row."""

Span = tuple[int, Fraction, Fraction]
"""Rank in whose memory it is, first address, last; a set of slots has length 1."""


@dataclass(frozen=True)
class Chunk:
    """A chunk on its trip, and the ranks whose contributions it has."""

    epoch: int
    segment: int
    chunk: int
    contributors: frozenset[int]

    def __str__(self) -> str:
        letters = "+".join("abcdefgh"[r] for r in sorted(self.contributors))
        return f"chunk {self.chunk} of segment {self.segment} ({letters}) of epoch {self.epoch}"


@dataclass(frozen=True)
class Wait:
    signal: Signal
    epoch: int


@dataclass(frozen=True)
class Read:
    span: Span
    expected: Chunk


@dataclass(frozen=True)
class Join:
    """All channels of the rank have finished the epochs before this one."""

    epoch: int


@dataclass(frozen=True)
class Put:
    span: Span
    chunk: Chunk


@dataclass(frozen=True)
class Post:
    signal: Signal
    epoch: int


@dataclass
class Program:
    """What one channel of one rank does.

    actions: its waits, reads and joins. stores: its puts and posts, each with the number of actions that come before.
    kept: for each epoch, contributors by part and chunk. waits: how many waits it has, with those left out.
    """

    rank: int
    world: int
    channel: int
    channels: int
    rules: Rules
    actions: list[Wait | Read | Join] = field(default_factory=list)
    stores: list[tuple[int, Put | Post]] = field(default_factory=list)
    kept: list[dict[tuple[int, int], frozenset[int]]] = field(default_factory=list)
    waits: int = 0

    @property
    def epoch(self) -> int:
        return len(self.kept)

    def add(self, launch: Launch) -> None:
        """Append the actions of the next epoch."""
        assert len(launch.chunks) == self.world > 1
        self.kept.append({})
        if self.channels > 1 and self.epoch > 1 and self.rules.stream_order:
            self.actions.append(Join(self.epoch))
        (self._ring if launch.algorithm == "ring" else self._direct)(launch)

    def _wait(self, row: int, index: int, empty: bool) -> None:
        if empty and not self.rules.await_empty:
            return
        if self.rules.no_wait != (self.rank, self.waits):
            self.actions.append(Wait((self.rank, row, index), self.epoch if self.rules.compare_epochs else 1))
        self.waits += 1

    def _post(self, rank: int, row: int, index: int, empty: bool) -> None:
        if not empty or self.rules.post_empty:
            self.stores.append((len(self.actions), Post((rank, row, index), self.epoch)))

    def _read(self, slot: tuple[Fraction, Fraction], expected: Chunk) -> None:
        self.actions.append(Read((self.rank, *self._in_parity(slot)), expected))

    def _put(self, rank: int, slot: tuple[Fraction, Fraction], chunk: Chunk) -> None:
        self.stores.append((len(self.actions), Put((rank, *self._in_parity(slot)), chunk)))

    def _in_parity(self, slot: tuple[Fraction, Fraction]) -> tuple[Fraction, Fraction]:
        base = self.epoch % 2 if self.rules.parity else 0
        return base + slot[0], base + slot[1]

    def _ring(self, launch: Launch) -> None:
        world, rank, hops = self.world, self.rank, self.world - 1
        scatter, gather = launch.kind != "all_gather", launch.kind != "reduce_scatter"
        chunks = max(1, *launch.chunks)

        def slot(row: int, chunk: int) -> tuple[Fraction, Fraction]:
            first = Fraction(row * chunks + chunk, 2 * hops * chunks)
            return first, first + Fraction(1, 2 * hops * chunks)

        def arriving(row: int, segment: int) -> frozenset[int]:
            """Contributors of what rank-1 sends in step `row`."""
            if row < hops:
                return frozenset((rank - 1 - hop) % world for hop in range(row + 1))
            return frozenset(range(world)) if scatter else frozenset([(segment - 1) % world])

        def step(segment: int, row_in: int | None, row_out: int | None, reduce: bool, copy: bool) -> None:
            part = (segment - 1) % world
            for chunk in range(self.channel, chunks, self.channels):
                empty = chunk >= launch.chunks[part]
                contributors: frozenset[int] = frozenset()
                if row_in is not None:
                    self._wait(row_in, chunk, empty)
                    contributors = arriving(row_in, segment)
                    if not empty:
                        self._read(slot(row_in, chunk), Chunk(self.epoch, segment, chunk, contributors))
                if reduce:
                    contributors |= {rank}
                following = (rank + 1) % world
                if row_out is not None and not empty:
                    self._put(following, slot(row_out, chunk), Chunk(self.epoch, segment, chunk, contributors))
                if copy and not empty:
                    self.kept[-1][part, chunk] = contributors
                if row_out is not None:
                    self._post(following, row_out, chunk, empty)

        complete = (rank + 1) % world
        if scatter:
            step(rank, None, 0, True, False)
            for hop in range(1, hops):
                step((rank - hop) % world, hop - 1, hop, True, False)
            step(complete, hops - 1, hops if gather else None, True, True)
        else:
            step(complete, None, hops, True, True)
        if gather:
            for hop in range(1, hops):
                step((complete - hop) % world, hops + hop - 1, hops + hop, False, True)
            step((rank + 2) % world, 2 * hops - 1, None, False, True)

    def _direct(self, launch: Launch) -> None:
        world, rank = self.world, self.rank
        scatter, gather = launch.kind != "all_gather", launch.kind != "reduce_scatter"
        everyone_sums = launch.algorithm == "one_shot" and scatter and gather
        one_sums = launch.algorithm == "master"
        chunks = max(1, *launch.chunks)
        rows = world if everyone_sums else world + 1 if one_sums else 2 * world
        places = world * chunks if everyone_sums or one_sums else chunks
        first_signals = 2 * world if self.rules.separate_rows else 0

        def slot(row: int, segment: int, chunk: int) -> tuple[Fraction, Fraction]:
            place = segment * chunks + chunk if everyone_sums or one_sums else chunk
            first = Fraction(row * places + place, rows * places)
            return first, first + Fraction(1, rows * places)

        def each_chunk(segment: int) -> Iterator[tuple[int, int, bool]]:
            for chunk in range(self.channel, chunks, self.channels):
                yield chunk, segment * chunks + chunk, chunk >= launch.chunks[segment]

        def hand_to(receivers: list[int], row: int, contributors: frozenset[int], segment: int, chunk: int) -> None:
            for receiver in receivers:
                self._put(receiver, slot(row, segment, chunk), Chunk(self.epoch, segment, chunk, contributors))

        def send(segment: int, receivers: list[int]) -> None:
            for chunk, index, empty in each_chunk(segment):
                if not empty:
                    hand_to(receivers, rank, frozenset([rank]), segment, chunk)
                for receiver in receivers:
                    self._post(receiver, first_signals + rank, index, empty)

        def add_up(segment: int, senders: list[int], receivers: list[int]) -> None:
            for chunk, index, empty in each_chunk(segment):
                for sender in senders:
                    if sender != rank:
                        self._wait(first_signals + sender, index, empty)
                if not empty:
                    for sender in senders:
                        if sender != rank:
                            expected = Chunk(self.epoch, segment, chunk, frozenset([sender]))
                            self._read(slot(sender, segment, chunk), expected)
                    hand_to(receivers, world + rank, frozenset(senders), segment, chunk)
                    self.kept[-1][segment, chunk] = frozenset(senders)
                for receiver in receivers:
                    self._post(receiver, first_signals + world + rank, index, empty)

        def receive(segment: int, reducer: int, contributors: frozenset[int]) -> None:
            for chunk, index, empty in each_chunk(segment):
                self._wait(first_signals + world + reducer, index, empty)
                if not empty:
                    expected = Chunk(self.epoch, segment, chunk, contributors)
                    self._read(slot(world + reducer, segment, chunk), expected)
                    self.kept[-1][segment, chunk] = contributors

        others = [r for r in range(world) if r != rank]
        from_next = [(rank + hop) % world for hop in range(1, world + 1)]
        for segment in from_next:
            reducer = 0 if one_sums else segment
            if everyone_sums:
                send(segment, others)
            elif reducer != rank and (scatter or segment == rank):
                send(segment, [reducer])
        for segment in range(world):
            senders = list(range(world)) if scatter else [segment]
            if everyone_sums:
                add_up(segment, senders, [])
            elif (0 if one_sums else segment) == rank:
                add_up(segment, senders, others if gather else [r for r in others if r == segment])
        if not everyone_sums:
            for segment in from_next:
                reducer = 0 if one_sums else segment
                if reducer != rank and (gather or segment == rank):
                    receive(segment, reducer, frozenset(range(world)) if scatter else frozenset([segment]))


def programs(launches: tuple[Launch, ...], rules: Rules, channels: int = 1) -> list[Program]:
    """The programs of every rank."""
    world = len(launches[0].chunks)
    result = [Program(rank, world, channel, channels, rules) for rank in range(world) for channel in range(channels)]
    for program in result:
        for launch in launches:
            program.add(launch)
    return result


def promised(launch: Launch, rank: int) -> dict[tuple[int, int], frozenset[int]]:
    """What a rank must have kept after a launch: contributors by part and chunk."""
    parts = range(len(launch.chunks)) if launch.kind != "reduce_scatter" else [rank]
    everybody = frozenset(range(len(launch.chunks)))
    return {
        (part, chunk): frozenset([part]) if launch.kind == "all_gather" else everybody
        for part in parts
        for chunk in range(launch.chunks[part])
    }
