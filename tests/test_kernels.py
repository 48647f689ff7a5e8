"""The kernels, run by several processes under Triton's interpreter: the same bits as the host engine."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

import fusedring
from fusedring.plan import ALGORITHMS
from tests.ranks import run_ranks

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WIRES = (None, torch.float16, torch.bfloat16)
SIZES = (0, 1, 17, 2047, 9001)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN equals NaN, whatever its payload."""
    if not torch.equal(a.isnan(), b.isnan()):
        return False
    a, b = a.nan_to_num(0.5), b.nan_to_num(0.5)
    return a.numel() == 0 or torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def check_bits(rank: int, world: int, dtypes: tuple[torch.dtype, ...]) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    special = torch.tensor([-0.0, 0.0, float("inf"), float("nan"), 65519.0, 1e-8, -1e-40])
    for dtype, elements in itertools.product(dtypes, SIZES):
        generator = torch.Generator().manual_seed(100 * elements + rank)
        x = torch.randn(elements, generator=generator, dtype=torch.float64).to(dtype)
        if elements > 100:
            x[11 : 11 + len(special)] = special.roll(rank if elements % 2 else 0).to(dtype)
        for wire, algorithm in itertools.product(WIRES, ALGORITHMS):
            how = {"wire_dtype": wire, "algorithm": algorithm}
            results = []
            for engine in ("host", "triton"):
                y = x.clone()
                fusedring.all_reduce(y, engine=engine, **how)
                results.append(y)
            assert same_bits(*results), (dtype, elements, how)
            if wire is not None and elements != SIZES[-1]:
                continue  # the halves cost as much again: every wire with one size, every size with one wire
            y = x.clone()
            part = fusedring.reduce_scatter(y, engine="triton", **how)
            z = x.clone()
            assert same_bits(part, fusedring.reduce_scatter(z, engine="host", **how)), ("scatter", dtype, elements, how)
            fusedring.all_gather(y, engine="triton", **how)
            assert same_bits(y, results[0]), ("gather", dtype, elements, how)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_engines_give_the_same_bits(world):
    run_ranks(world, check_bits, DTYPES, deadline=500)
