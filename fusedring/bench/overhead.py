"""What the wrapper costs the host in a step, beside the communication: for each parameter, and for each bucket.

A bucket's cost has two parts. Its launch costs what any launch does that a program starts while something else keeps
the interpreter busy: it is handed to the communication thread, runs there, and takes the GIL from backward meanwhile.
The rest is the wrapper's own. So the same steps are also taken with launches that have ended as soon as they are
submitted: what a bucket costs there is the wrapper's, and what it costs more in real steps is the launch's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fusedring.data_parallel.ddp import FusedRingDDP
from fusedring.group.communicator import Communicator
from fusedring.group.work import Work
from fusedring.plan.launch import Launch


@dataclass(frozen=True, slots=True)
class Overhead:
    """Microseconds of a step that the unwrapped module does not take: medians of differences between steps in turn.

    per_parameter: with one bucket, its launch included. per_bucket: of each further bucket, the wrapper's own part;
    per_launch: the rest.
    """

    parameters: int
    buckets: int
    per_parameter: float
    per_bucket: float
    per_launch: float


class Tiny(nn.Module):
    """So many parameters of one element each."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Their sum, times `x`."""
        return torch.cat(list(self.parts)).sum() * x


def overhead(*, parameters: int = 2500, buckets: int = 50, repeats: int = 40) -> Overhead:
    """Compare a module alone, wrapped with one bucket, and wrapped with about `buckets` (collective)."""
    module, x = Tiny(parameters), torch.ones(1)
    one = FusedRingDDP(Tiny(parameters))
    cap = parameters * 4 / buckets / (1 << 20)
    many = FusedRingDDP(Tiny(parameters), bucket_cap_mb=cap)
    for step_of in 3 * (module, one, many):
        _microseconds(step_of, x)
    report = many.report()
    assert report is not None
    further = len(report.buckets) - 1
    wrapping, alone, launched = [], [], []
    for _ in range(repeats):
        plain, with_one, with_many = (_microseconds(step_of, x) for step_of in (module, one, many))
        with _launches_that_end_at_once():
            one_alone, many_alone = (_microseconds(step_of, x) for step_of in (one, many))
        wrapping.append((with_one - plain) / parameters)
        alone.append((many_alone - one_alone) / further)
        launched.append((with_many - with_one) / further)
    per_parameter, per_bucket, with_launch = map(statistics.median, (wrapping, alone, launched))
    return Overhead(parameters, further + 1, per_parameter, per_bucket, with_launch - per_bucket)


@contextmanager
def _launches_that_end_at_once() -> Iterator[None]:
    real = Communicator.submit

    def submit(self: Communicator, launch: Launch, tensor: torch.Tensor, *, result: torch.Tensor, **_: Any) -> Work:
        work = Work(result, "")
        work._finish()
        return work

    Communicator.submit = submit  # type: ignore[method-assign]
    try:
        yield
    finally:
        Communicator.submit = real  # type: ignore[method-assign]


def _microseconds(step_of: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    if dist.is_initialized():
        dist.barrier()  # else a launch would be charged with waiting for a rank that is behind
    start = time.perf_counter()
    step_of(x).backward()  # type: ignore[no-untyped-call]
    return 1e6 * (time.perf_counter() - start)
