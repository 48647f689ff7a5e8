"""torch's own all-reduces over symmetric memory of GPUs: an alpha API, measured here, not used. Never run on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

OPERATIONS = ("one_shot_all_reduce", "two_shot_all_reduce_", "multimem_all_reduce_")


def symmetric_all_reduce(
    name: str, elements: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """A tensor of symmetric memory, and one of OPERATIONS on it, which returns where the sum is (collective)."""
    memory = _symmetric_memory.empty(elements, dtype=dtype, device=device)
    _symmetric_memory.rendezvous(memory, group)
    operation = getattr(torch.ops.symm_mem, name)

    def act() -> torch.Tensor:
        result: torch.Tensor = operation(memory, "sum", group.group_name)
        return result

    return memory, act
