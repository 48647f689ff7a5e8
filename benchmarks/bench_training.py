"""Training steps in every way, for pytest-benchmark: a group for each model. See conftest.py."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.conftest import CLOCK
from fusedring.bench.measure import QUICK_LEAVES_OUT, QUICK_WAYS, Results
from fusedring.bench.models import MODELS
from fusedring.bench.steps import ONE_RANK

NAMES = [model.name for model in MODELS if model.name not in QUICK_LEAVES_OUT]

pytestmark = pytest.mark.benchmark(timer=CLOCK)


@pytest.mark.parametrize("synced", [True, False], ids=["step", "no_sync"])
@pytest.mark.parametrize("way", [ONE_RANK, *QUICK_WAYS])
@pytest.mark.parametrize("model", NAMES)
def test_step(model: str, way: str, synced: bool, training: Results, benchmark: Any) -> None:
    """Seconds of forward and backward, of the slowest rank."""
    benchmark.group = f"step of {model}"
    (step,) = (step for step in training.steps if (step.model, step.way) == (model, way))
    assert step.wrong == 0
    timing = step.step if synced else step.no_sync
    if timing is None:
        pytest.skip("one rank has nothing to leave out")
    benchmark.extra_info |= {"exposed": step.exposed, "overlap": step.overlap}
    CLOCK.replay(benchmark, timing)
