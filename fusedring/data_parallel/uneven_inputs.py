"""Training with uneven inputs: what a rank that has run out of inputs does while others still train.

Part of torch's Join context: such a rank shadows each iteration of the others, collective by collective, with gradients
of zero; at the end all take the model of a rank that trained to the last.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from fusedring.data_parallel.scheduler import Scheduler


class TrainingRanks:
    """Who still trains, as one wrapper sees it.

    by_initial_world_size: what gradients are divided by, or else by the number of ranks that still train. divisor: that
    number, where it is to be used.
    """

    def __init__(self) -> None:
        self.by_initial_world_size = True
        self.divisor: int | None = None

    def count(self, group: dist.ProcessGroup | None, device: torch.device, *, trains: bool) -> bool:
        """All ranks tell each other whether their next backward is synced (collective); ranks without inputs do not.

        Returns whether any is.
        """
        syncs = torch.tensor([float(trains)], device=device)
        dist.all_reduce(syncs, group=group)
        self.divisor = None if self.by_initial_world_size else max(1, int(syncs.item()))
        return bool(syncs.item())


class Shadowing(Protocol):
    """What is asked of a wrapper."""

    require_forward_param_sync: bool
    _training_ranks: TrainingRanks

    @property
    def _distributed_rank(self) -> int: ...
    def _count_training_ranks(self, *, trains: bool) -> bool: ...
    def will_sync_module_buffers(self) -> bool: ...
    def _sync_module_buffers(self, authoritative_rank: int) -> None: ...
    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int: ...
    def _scheduler_or_open(self) -> Scheduler: ...
    def _sync_final_model(self, is_last_joiner: bool) -> None: ...


class UnevenInputs(JoinHook):
    """The hook of one wrapper."""

    def __init__(self, wrapper: Shadowing) -> None:
        self._wrapper = wrapper

    def main_hook(self) -> None:
        """Shadow one iteration of the others: forward, then backward."""
        wrapper = self._wrapper
        syncs = wrapper._count_training_ranks(trains=False)
        if wrapper.will_sync_module_buffers():
            wrapper._sync_module_buffers(wrapper._find_common_rank(wrapper._distributed_rank, False))
        wrapper.require_forward_param_sync = syncs
        if syncs:
            scheduler = wrapper._scheduler_or_open()
            scheduler.divisor = wrapper._training_ranks.divisor
            scheduler.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the model of a rank that joined last."""
        self._wrapper._sync_final_model(is_last_joiner)
