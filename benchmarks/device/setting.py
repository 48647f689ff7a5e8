"""What is timed: all_reduce of one size, the bytes that it must move, and how long it takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.device.cases import Case
from benchmarks.device.exact_inputs import exact_inputs, wrong_numbers
from benchmarks.device.stream_marks import median_seconds, timed_run
from benchmarks.device.units import MB, name_of
from fusedring.kernels.layout import direct_rows, ring_rows
from fusedring.plan.plan import make_plan, split_evenly
from fusedring.testing import VirtualRanks

_UNCACHED_BYTES = 128 * MB
_MOST_SETS = 32


@dataclass(frozen=True, slots=True)
class Setting:
    """all_reduce of nbytes bytes at each of W ranks."""

    world: int
    nbytes: int
    algorithm: str
    dtype: torch.dtype
    wire: torch.dtype

    @property
    def elements(self) -> int:
        """Of one rank's tensor."""
        return self.nbytes // self.dtype.itemsize

    @property
    def least_bytes(self) -> int:
        """Bytes that all ranks together read and write in one memory, if nothing is read or written twice.

        Every rank reads its input and writes its result once, in the tensor's dtype; every element that is sent, as the
        plan counts them, is written once and read once, in the wire dtype. With N elements of d bytes, w on the wire,
        that is for each rank N·2d + 4(W-1)/W·N·w for ring and two_shot, and for master in the mean of the ranks, and
        N·2d + 2(W-1)·N·w for one_shot.
        """
        plan = make_plan("all_reduce", self.algorithm, self.world, self.elements)
        own = 2 * self.world * self.elements * self.dtype.itemsize
        return own + 2 * plan.elements_transferred * self.wire.itemsize

    @property
    def parity_bytes(self) -> int:
        """Slots, of one parity, into which the whole bucket goes at once."""
        rows = ring_rows(self.world) if self.algorithm == "ring" else direct_rows(self.algorithm, self.world)
        segment = max(stop - start for start, stop in split_evenly(self.elements, self.world))
        row = segment * (1 if self.algorithm in ("ring", "two_shot") else self.world)
        return rows * (-(-row * self.wire.itemsize // 256) * 256)

    def inputs(self, device: torch.device) -> list[list[torch.Tensor]]:
        """Sets of tensors of all ranks, to be used in turns.

        In all they take _UNCACHED_BYTES or more, and so do not stay in a GPU's L2 cache; but if a set is smaller than 4
        MB, there are only _MOST_SETS of them.
        """
        sets = min(_MOST_SETS, -(-_UNCACHED_BYTES // (self.world * self.nbytes)))
        return [exact_inputs(self.world, self.elements, self.dtype, device) for _ in range(sets)]

    def __str__(self) -> str:
        wire = "" if self.wire == self.dtype else f", wire {name_of(self.wire)}"
        return f"{self.algorithm} {name_of(self.dtype)}{wire}, W={self.world}, {self.nbytes // MB} MB"


def time_all_reduce(ranks: VirtualRanks, device: torch.device, setting: Setting) -> tuple[float, int]:
    """Seconds of one launch, and how many numbers were wrong before or after it was timed.

    `ranks` forget an earlier failure first.
    """
    ranks.reset()
    how = Case("all_reduce", setting.algorithm, setting.dtype, setting.wire).how
    sets = setting.inputs(device)
    collectives = [ranks.prepare("all_reduce", tensors, **how) for tensors in sets]
    runs = [timed_run(collective) for collective in collectives]
    for run in runs:
        run()
    collectives[-1].check()
    wrong = wrong_numbers(sets[0])
    seconds = median_seconds(runs, lead=setting.world)
    collectives[-1].check()
    return seconds, wrong + wrong_numbers(sets[-1])
