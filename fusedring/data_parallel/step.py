"""One synced backward: which gradients have come, and what was launched."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import torch

from fusedring.data_parallel.buckets import Bucket, Entry
from fusedring.data_parallel.step_on_gpu import StepOnGpu
from fusedring.engines.work import Batch, Work
from fusedring.plan.launch import Launch

READ_IN_PLACE = 2048
"""Elements from which on a gradient is read by the kernels where autograd left it: the largest tile. Smaller ones are
packed into their bucket, since a tile that is not full still costs a whole pass."""


@dataclass(slots=True)
class Launched:
    """A launch of this step, and the work that ends with it."""

    launch: Launch
    work: Work


@dataclass(slots=True)
class Step:
    """The synced backward under way.

    number: the same on all ranks that lost none. count: of this wrapper's steps, from 0. started, ended: when backward
    began and was through, seconds of time.perf_counter(); ended is 0 until then.
    arrived[bucket][position]: whether the gradient of an entry is complete. waiting_for[bucket]: how many are not.
    sources[bucket]: gradients that are read where autograd left them, by their offset in the bucket.
    taken: ids of the entries whose gradient is in its bucket already. partial: whether one of them was not all of it.
    launched: the buckets' launches, in their order. flags: that of the flags, once it was made.
    """

    number: int
    count: int
    started: float
    waiting_for: list[int]
    arrived: list[list[bool]]
    sources: list[dict[int, torch.Tensor]]
    on_gpu: StepOnGpu | None
    ended: float = 0.0
    batch: Batch = field(default_factory=Batch)
    launched: list[Launched] = field(default_factory=list)
    flags: Work | None = None
    taken: set[int] = field(default_factory=set)
    partial: bool = False

    @classmethod
    def begin(
        cls, buckets: Sequence[Bucket], number: int, count: int, started: float, on_gpu: StepOnGpu | None
    ) -> Step:
        """A step in which nothing has come yet."""
        sizes = [len(bucket.entries) for bucket in buckets]
        return cls(number, count, started, sizes, [[False] * n for n in sizes], [{} for _ in sizes], on_gpu)

    @property
    def captured(self) -> bool:
        """Whether the step goes into a CUDA graph."""
        return self.on_gpu is not None and self.on_gpu.captured

    @property
    def works(self) -> list[Work]:
        """Of all launches so far."""
        return [each.work for each in self.launched] + ([self.flags] if self.flags is not None else [])

    def late(self) -> list[bool]:
        """For each entry of all buckets, whether its gradient has not come."""
        return [not arrived for bucket in self.arrived for arrived in bucket]

    def take(self, index: int, bucket: Bucket, shared: Container[Entry], *, reads_in_place: bool) -> None:
        """Bring a bucket's gradients into it, but those that autograd accumulated there or the engine reads elsewhere.

        shared: entries whose memory others may read now. None counts as zero. What autograd owns is read and never
        written: other gradients may share its memory.
        """
        if self.on_gpu is not None:
            self.on_gpu.gather()
        views, grads = [], []
        for entry in bucket.entries:
            grad = entry.parameter.grad
            if id(entry) in self.taken or grad is entry.view:
                continue
            if grad is None:
                entry.view.zero_()
                continue
            grad = entry.dense_grad()
            if reads_in_place and grad.numel() >= READ_IN_PLACE and entry not in shared:
                source = entry.in_place(grad)
                if source is not None:
                    self.sources[index][entry.offset] = source
                    continue
            views.append(entry.view)
            grads.append(grad)
        if views:
            with torch.no_grad():
                torch._foreach_copy_(views, grads)  # thousands of small ones at once
