"""Writes of small values to a GPU, without waiting for it: through pinned buffers, each used again once it was copied.

What a CUDA graph copies, it copies again in every replay, from the same buffer; so that buffer is never used again. And
no pinned memory can be had while a graph is captured; so spare buffers are put aside before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch

from fusedring.errors import NotCapturedError
from fusedring.transport.gpu import Event, Gpu

_SMALLEST = 4096


class PinnedWrites:
    """Writes to the memory of one GPU, in the order of its communication stream."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._on_the_way: defaultdict[int, list[tuple[Event, torch.Tensor]]] = defaultdict(list)
        self._targets: defaultdict[int, set[int]] = defaultdict(set)
        self._spare: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._in_graphs: list[torch.Tensor] = []

    def write(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Give `target`, on the GPU, these values, before whatever the communication stream is given afterwards.

        While a graph is captured it needs a buffer that was put aside (see `check_spares`).
        """
        if not values.nbytes:
            return
        gpu, size = self._gpu, _size_for(values.nbytes)
        capturing = gpu.is_capturing()
        buffer = self._spare_buffer(size) if capturing else self._free_buffer(size)
        pinned = buffer[: values.nbytes].view(values.dtype).view(values.shape)
        pinned.copy_(values)
        gpu.copy(target, pinned)
        if capturing:
            self._in_graphs.append(buffer)
        else:
            self._on_the_way[size].append((gpu.mark(gpu.comm), buffer))
            self._targets[size].add(target.data_ptr())

    def check_spares(self, nbytes: Sequence[int]) -> None:
        """Raises NotCapturedError if a capture could not write values of these sizes."""
        wanted = Counter(_size_for(n) for n in nbytes if n)
        if any(len(self._spare[size]) < count for size, count in wanted.items()):
            raise NotCapturedError(
                "a CUDA graph captures a collective that has not run since the last capture: run the step once outside "
                "of a graph, with the same shapes, before each capture"
            )

    def put_aside(self) -> None:
        """Outside of a capture: have a spare buffer for each place that was written so far."""
        for size, targets in self._targets.items():
            while len(self._spare[size]) < len(targets):
                self._spare[size].append(self._gpu.pinned(size))

    def _free_buffer(self, size: int) -> torch.Tensor:
        on_the_way = self._on_the_way[size]
        # The GPU copies buffers in this order, so if the oldest is not through, none is.
        if on_the_way and self._gpu.has_passed(on_the_way[0][0]):
            return on_the_way.pop(0)[1]
        return self._gpu.pinned(size)

    def _spare_buffer(self, size: int) -> torch.Tensor:
        return self._spare[size].pop()


def _size_for(nbytes: int) -> int:
    return max(_SMALLEST, 1 << (nbytes - 1).bit_length())
