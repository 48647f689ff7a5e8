"""What `pytest benchmarks` measures, and how pytest-benchmark gets it.

Ranks are processes, and a test could only time how long it takes to ask them. So the ranks measure as they do for
`fusedring bench`, all ways in turn, once for all tests of a file; each test then hands the seconds of one way to
pytest-benchmark, through a clock that goes forward by as much. Saved runs can be compared as any others:
`--benchmark-autosave`, then `--benchmark-compare --benchmark-compare-fail=median:10%`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from fusedring.bench.clock import Timing
from fusedring.bench.conditions import conditions
from fusedring.bench.exact import MOST_RANKS
from fusedring.bench.goals import GOAL_RANKS
from fusedring.bench.measure import Results, Settings, measure
from fusedring.bench.ranks import find_mpi

GPUS = min(torch.cuda.device_count(), MOST_RANKS)
DEVICE, RANKS = ("cuda", GPUS) if GPUS else ("cpu", GOAL_RANKS)

SETTINGS = Settings(
    parts=("all_reduce",),
    sizes=(64 << 10, 1 << 20, 25 << 20),
    dtypes=("float32",),
    wires=(None, "bf16"),
    algorithms=("auto", "ring", "two_shot"),
    device=DEVICE,
    quick=True,
    talks=False,
)


class MeasuredClock:
    """A clock for pytest-benchmark that stands still, but for what ranks have measured."""

    __name__ = "seconds_of_the_slowest_rank"

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """The time, in seconds."""
        return self._now

    def replay(self, benchmark: Any, timing: Timing) -> None:
        """Have pytest-benchmark see a round for each of these times."""
        seconds: Iterator[float] = iter(timing.seconds)

        def act() -> None:
            self._now += next(seconds)

        benchmark.pedantic(act, rounds=timing.repeats)


CLOCK = MeasuredClock()
"""For `pytest.mark.benchmark(timer=CLOCK)`."""


@pytest.fixture(scope="session")
def all_reduces() -> Results:
    """Of SETTINGS.cases; nothing but these ranks runs meanwhile."""
    return measure(SETTINGS, RANKS, find_mpi(RANKS) if DEVICE == "cpu" else "not used")


@pytest.fixture(scope="session")
def training() -> Results:
    """Of all models of a quick run."""
    return measure(replace(SETTINGS, parts=("training",)), RANKS, "not used")


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """What runs are saved with, so that one sees which can be compared."""
    machine_info["fusedring"] = asdict(conditions(ranks=RANKS, device=DEVICE, mpi=""))
