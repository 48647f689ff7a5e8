"""The measurement of the wrapper's overhead: that it runs, on one rank and on two, and leaves launches as they were."""

from __future__ import annotations

import pytest
import torch

import fusedring
from benchmarks.wrapper_overhead import overhead
from tests.ranks import run_ranks


def measure(rank: int, world: int) -> int:
    cost = overhead(parameters=60, buckets=6, repeats=2)
    x = torch.full((5,), float(rank))
    fusedring.all_reduce(x, op="sum", async_op=True).wait()
    assert x.tolist() == [sum(range(world))] * 5
    return cost.buckets


@pytest.mark.parametrize("world", [1, 2])
def test_overhead_is_measured(world):
    assert run_ranks(world, measure) == [6] * world
