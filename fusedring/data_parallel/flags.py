"""What ranks tell each other at the end of a step: which gradients came, and what the averages are like.

The *flags* of a wrapper with P entries in B buckets are a vector of float32, whatever the wire dtype of its buckets:

    late (P) | empty (P) | partial (P) | squares (B) | unbounded (B)

The first three are 1 where it is so on this rank. An entry is *late* if its gradient did not arrive in this backward,
*empty* if it is late and `.grad` is None, *partial* if more came after it was sent. Squares is the sum of squares of
those averages that this rank completed, unbounded how many of its channels met one that is inf or NaN. All ranks sum
these vectors by one small launch after those of the buckets. So each rank learns on how many ranks an entry was late,
exactly for any world size up to 2^24, and the norm of all averages without reading them again, with the same bits
everywhere.

In most steps no rank has anything to tell of the entries. Then their part is zero already, and stays so. Where ranks
meet before each launch, and nothing is learnt of values, they say there whether they have anything to tell; if none
has, the launch is not made (see `Scheduler.launch_flags`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from fusedring.data_parallel.buckets import Entry
from fusedring.data_parallel.step import Launched
from fusedring.plan.plan import ALIGNMENT
from fusedring.transport.gpu import Event, Gpu

ROWS = 3
"""Of the entries: late, empty, partial."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the flags of all ranks say.

    late, empty, partial: for each entry, on how many ranks it was so. squares: for each bucket, the sum of squares of
    its averages, in float32: inf where they overflow, too small where some of them lie below its smallest numbers.
    unbounded: for each, how many channels of all ranks met inf or NaN. Both are None if nobody knows.
    """

    late: Sequence[int]
    empty: Sequence[int]
    partial: Sequence[int]
    squares: Sequence[float] | None
    unbounded: Sequence[float] | None

    @property
    def grad_norm(self) -> float | None:
        """The 2-norm of all averages; None if nobody knows, inf if the squares of finite ones overflow float32."""
        return math.sqrt(math.fsum(self.squares)) if self.squares is not None else None

    @property
    def found_inf(self) -> bool | None:
        """Whether one of the averages is inf or NaN."""
        return any(self.unbounded) if self.unbounded is not None else None


class Flags:
    """Those of one wrapper on this rank.

    memory: float32, `elements_of(...)` of them. gpu: where it lies, if not in host memory. knows_norm: whether the
    buckets hold all gradients, so that what is learnt of their values may be told.
    """

    def __init__(
        self, memory: torch.Tensor, entries: Sequence[Entry], buckets: int, gpu: Gpu | None, *, knows_norm: bool
    ) -> None:
        self.vector = memory.zero_()
        self._entries, self._gpu, self._knows_norm = entries, gpu, knows_norm
        self._learnt = False
        count = ROWS * len(entries)
        self._of_entries = memory[:count].view(ROWS, len(entries))
        self._of_values = memory[count : count + 2 * buckets].view(2, buckets)
        self._used = memory[: count + 2 * buckets]
        self._clear = True

    @staticmethod
    def elements_of(entries: int, buckets: int) -> int:
        """How many elements the flags of so many entries and buckets have."""
        return -(-(ROWS * entries + 2 * buckets) // ALIGNMENT) * ALIGNMENT

    def write(self, late: Sequence[bool], partial: set[int]) -> None:
        """What this rank has to tell of the entries. late: for each, or none at all. partial: their ids."""
        if any(late) or partial:
            late = late or [False] * len(self._entries)
            empty = [is_late and e.parameter.grad is None for is_late, e in zip(late, self._entries, strict=True)]
            in_parts = [id(entry) in partial for entry in self._entries]
            self._of_entries.copy_(self._of_entries.new_tensor([late, empty, in_parts]))
        elif not self._clear:
            self._of_entries.zero_()
        self._clear = False  # until `read` sees what the other ranks have told

    def write_empty(self) -> None:
        """This rank has no gradients, and that decides nothing."""
        self._of_entries.zero_()
        self._of_entries[1].fill_(1)
        self._clear = False

    def learn(self, launched: Sequence[Launched] | None) -> None:
        """Take what the launches of all buckets have learnt; None: nothing."""
        self._learnt = False
        if launched is None or not self._knows_norm:
            return
        works = [each.work for each in sorted(launched, key=lambda each: each.launch.bucket)]
        with self._gpu.on(self._gpu.comm) if self._gpu is not None else nullcontext():  # behind the launches
            learnt = [work.learnt() for work in works]
            # A work that has learnt nothing has failed, and so will the launch of the flags.
            self._learnt = all(each is not None for each in learnt)
            if self._learnt:
                squares, unbounded = zip(*filter(None, learnt), strict=True)
                torch.stack(squares, out=self._of_values[0])
                torch.stack(unbounded, out=self._of_values[1])

    def read(self) -> Told:
        """What all ranks have told, after their launch. On a GPU the host waits for it."""
        told = self._tell(self._used if self._gpu is None else self._used.cpu(), learnt=self._learnt)
        self._clear = not (any(told.late) or any(told.empty) or any(told.partial))
        return told

    def nothing_told(self) -> Told:
        """What all ranks have told where none had anything to tell."""
        nobody = [0] * len(self._entries)
        return Told(nobody, nobody, nobody, None, None)

    def send_to_host(self, gpu: Gpu) -> FlagsOnTheWay:
        """What all ranks have told, as soon as it is there. gpu: where the flags lie."""
        return FlagsOnTheWay(gpu, self)

    def _tell(self, vector: torch.Tensor, *, learnt: bool) -> Told:
        count = ROWS * len(self._entries)
        entries, values = vector[:count].view(ROWS, -1), vector[count:].view(2, -1)
        squares, unbounded = values.tolist() if learnt else (None, None)
        if not entries.any():  # as in most steps
            nobody = [0] * len(self._entries)
            return Told(nobody, nobody, nobody, squares, unbounded)
        late, empty, partial = entries.int().tolist()
        return Told(late, empty, partial, squares, unbounded)


class FlagsOnTheWay:
    """A copy of the flags on its way to the host: most steps set none, and none waits to hear that."""

    def __init__(self, gpu: Gpu, flags: Flags) -> None:
        self._gpu, self._flags, self._learnt = gpu, flags, flags._learnt
        self._copy = gpu.pinned(flags._used.nbytes).view(torch.float32)
        gpu.copy(self._copy, flags._used)
        self._copied: Event = gpu.mark(gpu.current_stream())

    def read(self, *, wait: bool = False) -> Told | None:
        """What they say, if they have come. wait: until they have."""
        if wait:
            self._gpu.wait(self._copied)
        elif not self._gpu.has_passed(self._copied):
            return None
        return self._flags._tell(self._copy, learnt=self._learnt)
