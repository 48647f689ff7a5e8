"""Buffers of the wrapped module on their way from one rank to all, before or after a forward."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fusedring.torch_internals import broadcast_coalesced

BROADCAST_BYTES = 250 << 20
"""Bytes that are broadcast together; torch's number."""


class BufferSync:
    """What is under way. futures: of hooks that the user has registered, which the end of backward waits for."""

    def __init__(self) -> None:
        self.futures: list[torch.futures.Future[Any]] = []
        self._in_graph: Sequence[torch.Tensor] = ()

    def wait(self) -> None:
        """Wait for what hooks have begun."""
        while self.futures:
            self.futures.pop().wait()

    @contextmanager
    def in_graph(self, copies: Sequence[torch.Tensor]) -> Iterator[None]:
        """For what is done in a graph: it has copies of the buffers, which replace them when it is through."""
        self._in_graph = copies
        try:
            yield
            self.wait()  # the graph uses the copies next
        finally:
            self._in_graph = ()

    def of(self, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """What is to be sent and overwritten for the buffers `named`."""
        names = dict(named)
        return dict(zip(names, self._in_graph, strict=True)) if self._in_graph else names


def broadcast(group: dist.ProcessGroup | None, tensors: Sequence[Any], source: int = 0) -> None:
    """Rank `source`'s values to all. By way of `.data`: graphs that saved an earlier value stay usable."""
    if group is not None and dist.get_world_size(group) > 1 and tensors:
        broadcast_coalesced(group, [t.data for t in tensors], BROADCAST_BYTES, source)


def chosen_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether forwards send buffers, and whether they are sent at the start. Warns of the deprecated parameter."""
    if broadcast_buffers is not None:
        ignored = " and, beside forward_sync_buffers, ignored" if forward_sync_buffers is not None else ""
        warnings.warn(
            f"`broadcast_buffers` is deprecated{ignored}. Use `forward_sync_buffers` instead, which syncs "
            "buffers at the start in any case",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    syncs = broadcast_buffers is None or broadcast_buffers
    return syncs, syncs
