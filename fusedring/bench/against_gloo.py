"""Time all_reduce of a workspace tensor against torch.distributed's all_reduce and division over gloo, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from fusedring.bench.clock import in_turn, seconds_of, slowest_rank
from fusedring.config import ALGORITHMS
from fusedring.group.collectives import all_reduce, empty


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians of the slowest rank, seconds. copy: all ranks copy as many bytes. wrong: inexact elements, all ranks."""

    bytes: int
    copy: float
    gloo: float
    algorithms: dict[str, float]
    wrong: int


def compare(nbytes: int, repeats: int) -> Comparison:
    """All-reduce `nbytes` of float32 on the default group, `repeats` times each way; the first does not count."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shared, ordinary = empty(nbytes // 4), torch.empty(nbytes // 4)
    pattern = torch.arange(nbytes // 4) % 1024
    wrong = 0
    for algorithm in ALGORITHMS:
        shared.copy_(pattern + rank)
        all_reduce(shared, op="sum", algorithm=algorithm)
        wrong += int((shared != pattern * world + world * (world - 1) // 2).sum())
    target = torch.empty_like(ordinary)
    ordinary.fill_(1.0)

    def over_gloo() -> None:
        dist.all_reduce(ordinary)
        ordinary.div_(world)

    ways: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(ordinary), "gloo": over_gloo}
    for algorithm in ALGORITHMS:
        ways[algorithm] = partial(all_reduce, shared, algorithm=algorithm)
    times = in_turn({name: partial(seconds_of, way) for name, way in ways.items()}, repeats - 1, warm_up=1)
    medians = {name: statistics.median(slowest_rank(seconds)) for name, seconds in times.items()}
    total_wrong = torch.tensor(wrong)
    dist.all_reduce(total_wrong)
    return Comparison(nbytes, medians.pop("copy"), medians.pop("gloo"), medians, int(total_wrong))
