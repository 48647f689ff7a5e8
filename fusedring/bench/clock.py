"""Times ways of doing the same thing: they take turns, and where there are several ranks the slowest one counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist


def seconds_of(act: Callable[[], object]) -> float:
    """How long `act` takes here. On several ranks all begin together: none is charged for waiting for one behind."""
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def in_turn(ways: Mapping[str, Callable[[], float]], turns: int, *, warm_up: int = 0) -> dict[str, list[float]]:
    """The seconds that each way returns in each turn. The first `warm_up` turns are extra and do not count.

    Every second turn takes the ways in reverse, so that none always follows the same other one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(warm_up + turns):
        for name in reversed(list(ways)) if turn % 2 else ways:
            took = ways[name]()
            if turn >= warm_up:
                seconds[name].append(took)
    return seconds


def slowest_rank(seconds: Sequence[float], device: torch.device | None = None) -> list[float]:
    """Each of these times as the slowest rank had it (collective). device: where the group reduces."""
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    values: list[float] = slowest.tolist()
    return values
