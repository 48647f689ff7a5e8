"""What FusedRingDDP costs the host in a step, for 2,500 parameters of one element each: in a lone process, or on ranks.

python benchmarks/wrapper_overhead.py
torchrun --nproc-per-node 2 benchmarks/wrapper_overhead.py

A bucket's cost has two parts. Its launch costs what any launch does that a program starts while something else keeps
the interpreter busy: it is handed to the communication thread, runs there, and takes the GIL from backward meanwhile.
The rest is the wrapper's own. So the same steps are also taken with launches that have ended as soon as they are
submitted: what a bucket costs there is the wrapper's, and what it costs more in real steps is the launch's.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fusedring
from fusedring import FusedRingDDP
from fusedring.bench.clock import in_turn, seconds_of
from fusedring.bench.models import Tiny
from fusedring.engines.engine import Engine
from fusedring.engines.work import Work
from fusedring.group.communicator import Communicator
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


def overhead(*, parameters: int = 2500, buckets: int = 50, repeats: int = 40) -> Overhead:
    """Compare a module alone, wrapped with one bucket, and wrapped with about `buckets` (collective)."""
    plain, one = Tiny(parameters), FusedRingDDP(Tiny(parameters))
    many = FusedRingDDP(Tiny(parameters), bucket_cap_mb=parameters * 4 / buckets / (1 << 20))
    for model in 3 * (plain, one, many):
        _step_seconds(model)
    report = many.report()
    assert report is not None
    further = len(report.buckets) - 1
    times = in_turn(
        {
            "plain": lambda: _step_seconds(plain),
            "one": lambda: _step_seconds(one),
            "many": lambda: _step_seconds(many),
            "one, without launches": lambda: _step_seconds_without_launches(one),
            "many, without launches": lambda: _step_seconds_without_launches(many),
        },
        repeats,
    )

    def microseconds(name: str, than: str) -> float:
        return 1e6 * statistics.median(a - b for a, b in zip(times[name], times[than], strict=True))

    per_bucket = microseconds("many, without launches", than="one, without launches") / further
    return Overhead(
        parameters=parameters,
        buckets=further + 1,
        per_parameter=microseconds("one", than="plain") / parameters,
        per_bucket=per_bucket,
        per_launch=microseconds("many", than="one") / further - per_bucket,
    )


def _step_seconds(model: nn.Module) -> float:
    x = torch.ones(1)
    return seconds_of(lambda: model(x).backward())


def _step_seconds_without_launches(model: nn.Module) -> float:
    """Of a step in which every launch has ended as soon as it is submitted."""
    real = Communicator.submit

    def submit(
        self: Communicator, engine: Engine, launch: Launch, tensor: torch.Tensor, *, result: torch.Tensor, **_: Any
    ) -> Work:
        work = Work(result, "")
        work._finish()
        return work

    Communicator.submit = submit  # type: ignore[method-assign]
    try:
        return _step_seconds(model)
    finally:
        Communicator.submit = real  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    ranks, first = (dist.get_world_size(), dist.get_rank() == 0) if dist.is_initialized() else (1, True)
    if first:
        print(f"torch {torch.__version__}, {ranks} rank(s); microseconds of a step, medians of steps in turn")
    for _ in range(3):
        cost = overhead()
        if first:
            print(
                f"{cost.per_parameter:.2f} for each of {cost.parameters} parameters; for each of {cost.buckets} "
                f"buckets {cost.per_bucket:.0f}, and {cost.per_launch:.0f} for its launch"
            )
    fusedring.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
