"""Where a rank measures: its device, the group that torch's own operations use there, and MPI if that started it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fusedring.bench.ranks import mpi_world


@dataclass(frozen=True, slots=True)
class Place:
    """This rank's. group: for torch's operations; None is the default group, which is always over gloo."""

    device: torch.device
    rank: int
    world: int
    group: dist.ProcessGroup | None = None
    mpi: Any = None


def take_place(device: str) -> Place:
    """On every rank (collective). device: 'cpu', or 'cuda': the GPU of this rank's number, and a group over NCCL."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    if device == "cpu":
        return Place(torch.device("cpu"), rank, world, None, mpi_world())
    gpu = torch.device("cuda", rank)
    torch.cuda.set_device(gpu)
    return Place(gpu, rank, world, dist.new_group(backend="nccl"))


def total(number: int) -> int:
    """The sum over all ranks (collective)."""
    sum_of_all = torch.tensor(number)
    dist.all_reduce(sum_of_all)
    return int(sum_of_all)
