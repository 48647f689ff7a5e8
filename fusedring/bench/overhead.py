"""What the wrapper costs the host in a step, beside the communication: for each parameter, and for each bucket."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fusedring.ddp import FusedRingDDP


@dataclass(frozen=True, slots=True)
class Overhead:
    """Microseconds of a step that the unwrapped module does not take. Medians of steps in turn."""

    parameters: int
    buckets: int
    per_parameter: float
    per_bucket: float


class Tiny(nn.Module):
    """So many parameters of one element each."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Their sum, times `x`."""
        return torch.cat(list(self.parts)).sum() * x


def overhead(*, parameters: int = 2500, buckets: int = 50, repeats: int = 40) -> Overhead:
    """Compare a module alone, wrapped with one bucket, and wrapped with about `buckets`, in a lone process."""
    module, x = Tiny(parameters), torch.ones(1)
    one = FusedRingDDP(Tiny(parameters))
    cap = parameters * 4 / buckets / (1 << 20)
    many = FusedRingDDP(Tiny(parameters), bucket_cap_mb=cap)
    plain_times, one_times, many_times = [], [], []
    for _ in range(repeats):
        plain_times.append(_microseconds(lambda: module(x).backward()))
        one_times.append(_microseconds(lambda: one(x).backward()))
        many_times.append(_microseconds(lambda: many(x).backward()))
    plain, with_one, with_many = (statistics.median(times[3:]) for times in (plain_times, one_times, many_times))
    report = many.report()
    assert report is not None
    number = len(report.buckets)
    return Overhead(parameters, number, (with_one - plain) / parameters, (with_many - with_one) / (number - 1))


def _microseconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return 1e6 * (time.perf_counter() - start)
