"""Times ways of doing the same thing: they take turns, and where there are several ranks the slowest one counts."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

HEAD_START = 0.0005
"""Seconds from when the last rank came to when all begin: gloo tells a rank of the others after 0.2 to 0.5 ms."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of the same thing, in seconds, in the order in which they were taken."""

    seconds: tuple[float, ...]

    @property
    def repeats(self) -> int:
        """How many there are."""
        return len(self.seconds)

    @property
    def median(self) -> float:
        """Of the seconds."""
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        """The 99th percentile, by nearest rank: of fewer than 100 times the longest."""
        return sorted(self.seconds)[math.ceil(0.99 * self.repeats) - 1]

    def summary(self) -> dict[str, float]:
        """repeats, median and p99 by name."""
        return {"repeats": self.repeats, "median": self.median, "p99": self.p99}


def seconds_of(act: Callable[[], object], device: torch.device | None = None) -> float:
    """How long `act` takes here. On several ranks all begin together: none is charged for waiting for one behind.

    device: a GPU that is to be through with its work, before and after.
    """
    settle(device)
    begin_together()
    start = time.perf_counter()
    act()
    settle(device)
    return time.perf_counter() - start


def settle(device: torch.device | None) -> None:
    """Wait for the work of a GPU; nothing for other devices."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def begin_together() -> None:
    """Return on all ranks of the default group at once, and on none before all have come.

    A barrier alone lets ranks go up to half a millisecond apart, which is more than a small all-reduce takes. So they
    agree on a moment (Linux's clock is the same in all processes of a machine) and look at the clock until then. Where
    ranks share cores, who looks at the clock would keep others from coming: there it is a barrier alone.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if dist.get_backend() != "gloo":
        dist.barrier()
        return
    now = time.perf_counter()
    moment = torch.tensor(now, dtype=torch.float64)
    dist.all_reduce(moment, op=dist.ReduceOp.MAX)
    if dist.get_world_size() > len(os.sched_getaffinity(0)):
        return
    # A rank whose clock is another one's all the same does not wait for long.
    until = min(float(moment), time.perf_counter()) + HEAD_START
    while time.perf_counter() < until:
        pass


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
