"""How a wrapper comes to its buckets: all ranks agree on what they wrapped, get memory for it, and learn the order in
which gradients come.

All of it is collective, and bounded by the wrapper's timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fusedring.config import RingConfig
from fusedring.data_parallel.buckets import bind, lay_out
from fusedring.data_parallel.checks import check_agreement
from fusedring.data_parallel.flags import Flags
from fusedring.data_parallel.parameters import TrainedParameters
from fusedring.data_parallel.scheduler import Scheduler
from fusedring.group.groups import communicator_of
from fusedring.log import logger


@dataclass(frozen=True, slots=True)
class Wrapped:
    """What is wrapped, and how, as far as memory depends on it.

    name: the wrapper's, for messages. device: of all parameters. caps: of buckets, in bytes (see `lay_out`).
    grad_is_view: whether `.grad` becomes a view into its bucket. whole: whether no trainable parameter is ignored.
    """

    name: str
    group: dist.ProcessGroup | None
    config: RingConfig
    device: torch.device
    caps: Sequence[int]
    grad_is_view: bool
    whole: bool


@dataclass(frozen=True, slots=True)
class Opened:
    """scheduler: what drives the buckets. places: for each trained parameter its bucket and position there."""

    scheduler: Scheduler
    places: Mapping[int, tuple[int, int]]


class BucketMemory:
    """The buckets of one wrapper, for the parameters that it trains now."""

    def __init__(self, trained: TrainedParameters) -> None:
        self._trained = trained
        self._order: Sequence[int] = ()
        self._members: list[tuple[int, ...]] = []

    def open(
        self,
        wrapped: Wrapped,
        statements: Sequence[str],
        *,
        before: Scheduler | None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Opened:
        """Agree with the other ranks and get memory.

        statements: what ranks have to agree on, in words. before: the scheduler so far. meanwhile: what is done when
        all ranks have agreed and have memory: a rank that gave up before would leave the others waiting in it.
        """
        trained, timeout = self._trained.named, wrapped.config.timeout
        layouts = lay_out(trained, wrapped.caps, self._order)
        self._members = [layout.members for layout in layouts]
        communicator = communicator_of(wrapped.group, timeout=timeout)
        check_agreement(communicator, statements, timeout=timeout, name=wrapped.name)
        offsets, end = [], 0
        for layout in layouts:
            offsets.append(end)
            end += _whole_lines(layout.elements * layout.dtype.itemsize)
        flags_bytes = Flags.elements_of(len(trained), len(layouts)) * torch.float32.itemsize
        memory = communicator.allocate(end + flags_bytes, wrapped.device, timeout=timeout)
        meanwhile()
        buckets = [
            bind(layout, trained, memory[at : at + layout.elements * layout.dtype.itemsize].view(layout.dtype))
            for at, layout in zip(offsets, layouts, strict=True)
        ]
        places = {
            index: (b, position) for b, layout in enumerate(layouts) for position, index in enumerate(layout.members)
        }
        scheduler = Scheduler(
            communicator,
            buckets,
            memory[end:].view(torch.float32),
            wrapped.config,
            grad_is_view=wrapped.grad_is_view,
            knows_norm=wrapped.whole,
            after=before,
        )
        logger.info("%d buckets, %d bytes, world size %d", len(buckets), end, communicator.world_size)
        return Opened(scheduler, places)

    def learn_order(self, wrapped: Wrapped, scheduler: Scheduler) -> bool:
        """Learn in which order rank 0's gradients came in the first backward.

        Returns whether that makes other buckets, which are to be opened then.
        """
        if len(self._members) == 1 or scheduler.is_captured():
            return False
        trained = self._trained.named
        scheduler.announce_new_buckets(len(trained))
        place = {name: index for index, (name, _) in enumerate(trained)}
        communicator = communicator_of(wrapped.group, timeout=wrapped.config.timeout)
        mine = [place[name] for name in scheduler.order] if communicator.rank == 0 else None
        order: list[int] = communicator.exchange(
            mine, timeout=wrapped.config.timeout, purpose="learn the order of gradients"
        )[0]
        layouts = lay_out(trained, wrapped.caps, order)
        if [set(layout.members) for layout in layouts] == list(map(set, self._members)):
            return False
        self._order = order
        logger.info("gradients come in another order than parameters were registered: making buckets anew")
        return True


def _whole_lines(nbytes: int) -> int:
    """`nbytes`, rounded up to whole cache lines."""
    return -(-nbytes // 64) * 64
