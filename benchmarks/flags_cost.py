"""What the launch of the flags costs a training step on the host engine: steps with and without it, in turn.

torchrun --nproc-per-node 2 benchmarks/flags_cost.py [--pairs 200]

For models from one small bucket to many: medians of the slowest rank. Without it goes a step in which no rank has
anything to tell, as most; with it one in which some rank has, though here the flags stay zero.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import fusedring
from fusedring.bench.clock import in_turn, seconds_of, slowest_rank
from fusedring.bench.gpt import GPT, GPTConfig, batch_at, corpus, loss_of
from fusedring.data_parallel.scheduler import Scheduler

WARM_UP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, torch {torch.__version__}, {pairs} pairs of steps")
        print(f"{'model':<20} {'wire':>6} {'buckets':>8} {'without':>10} {'with':>10} {'ratio':>7}")
    for name, make in MODELS.items():
        for wire in (None, "bf16"):
            torch.manual_seed(0)
            model, step = make(wire)
            times = in_turn(
                {"with": functools.partial(_with_flags, step), "without": functools.partial(seconds_of, step)},
                pairs if name != "gpt" else pairs // 4,
                warm_up=WARM_UP,
            )
            on, off = (statistics.median(slowest_rank(times[way])) for way in ("with", "without"))
            if dist.get_rank() == 0:
                report = model.report()
                buckets = len(report.buckets) if report is not None else 0
                print(f"{name:<20} {wire or '-':>6} {buckets:>8} {1e3 * off:8.3f}ms {1e3 * on:8.3f}ms {on / off:7.3f}")
    fusedring.close()
    dist.destroy_process_group()


def _with_flags(step: Callable[[], None]) -> float:
    real = Scheduler._somebody_has_more
    Scheduler._somebody_has_more = lambda self, step: True  # type: ignore[method-assign]
    try:
        return seconds_of(step)
    finally:
        Scheduler._somebody_has_more = real  # type: ignore[method-assign]


Made = tuple[fusedring.FusedRingDDP, Callable[[], None]]


def _mlp(wire: str | None) -> Made:
    layers = (nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
    return _trained(nn.Sequential(*layers), torch.randn(32, 32), wire)


def _linears(wire: str | None) -> Made:
    return _trained(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))), torch.randn(32, 1024), wire)


def _many(wire: str | None) -> Made:
    return _trained(nn.Sequential(*(nn.Linear(1, 1) for _ in range(500))), torch.randn(1, 1), wire)


def _trained(module: nn.Module, x: torch.Tensor, wire: str | None) -> Made:
    model = fusedring.FusedRingDDP(module, wire_dtype=wire)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return model, step


def _gpt(wire: str | None) -> Made:
    config, data = GPTConfig(), corpus()
    model = fusedring.FusedRingDDP(GPT(config), wire_dtype=wire)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = batch_at(data, config, step=0, rank=dist.get_rank(), size=8)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return model, step


MODELS: dict[str, Callable[[str | None], Made]] = {
    "mlp of 0.3 million": _mlp,
    "1000 x one element": _many,
    "8 x Linear(1024)": _linears,
    "gpt": _gpt,
}


if __name__ == "__main__":
    main()
