"""The compiled launch for host memory, bit for bit against the slow reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from fusedring.config import ALGORITHMS, scale_factor
from fusedring.kernels import host_layout as layout
from fusedring.plan.plan import split_evenly
from tests import reference
from tests.kernels.host_ranks import Ranks, compile_launch

SIZES = (0, 1, 17, 1000, 40_003, 300_001)
MODES = ("raw", "apart", "slot")
PAIRS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float16),
    (torch.bfloat16, torch.bfloat16),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("object_code")


def inputs_for(world: int, elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(elements)
    return [torch.randn(elements, generator=generator, dtype=torch.float64).to(dtype) for _ in range(world)]


def prepare(ranks: Ranks, rank: int, x: torch.Tensor, mode: str):
    """This rank's tensor with `x` as its contribution, and what is read elsewhere."""
    if mode == "slot":
        return x.clone(), []
    tensor = ranks.tensor(rank, x.numel(), x.dtype)
    tensor.copy_(x)
    if mode == "raw" or x.numel() == 0:
        return tensor, []
    # Three runs with gaps, and of odd lengths; there the tensor itself has something else.
    edges = [x.numel() * n // 7 for n in range(8)]
    runs = [(edges[n], x[edges[n] : edges[n + 1]].clone()) for n in (0, 2, 5) if edges[n] < edges[n + 1]]
    for start, source in runs:
        tensor[start : start + source.numel()] = 99
    return tensor, runs


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    bits = [x.reshape(-1).contiguous().view(torch.uint8) for x in (got, want) if x.numel()]
    return got.numel() == want.numel() and (not bits or torch.equal(*bits))


@pytest.mark.parametrize("channels", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_a_launch_is_the_reference_bit_for_bit(world, dtype, wire, channels, folder):
    """A few seconds each: threads that meet again and again, on two cores."""
    compiled = compile_launch(folder, dtype, wire)
    ranks = Ranks(world, 300_032 * dtype.itemsize, channels=channels)
    ended = [layout.ENDED] * (world * channels)
    factor = scale_factor("avg", None, world, dtype)
    for elements, algorithm, shift in itertools.product(SIZES, ALGORITHMS, range(3)):
        inputs = inputs_for(world, elements, dtype)
        want = reference.all_reduce(inputs, algorithm, wire)
        modes = [MODES[(rank + shift) % 3] if shift else MODES[elements % 3] for rank in range(world)]
        tensors, runs = zip(*(prepare(ranks, r, inputs[r], modes[r]) for r in range(world)), strict=True)
        case = (elements, algorithm, modes)
        assert ranks.run(compiled, "all_reduce", algorithm, factor, tensors, wire, runs) == ended, case
        assert all(ranks.more)
        for rank in range(world):
            assert same(tensors[rank], want), (case, rank)
        parts = split_evenly(elements, world)
        tensors, runs = zip(*(prepare(ranks, r, inputs[r], modes[r]) for r in range(world)), strict=True)
        assert ranks.run(compiled, "reduce_scatter", algorithm, factor, tensors, wire, runs) == ended, case
        for rank, (start, stop) in enumerate(parts):
            assert same(tensors[rank][start:stop], want[start:stop]), ("reduce_scatter", case, rank)
        assert ranks.run(compiled, "all_gather", algorithm, 1.0, tensors, wire) == ended, case
        for rank in range(world):
            assert same(tensors[rank], want), ("all_gather", case, rank)


def test_ranks_that_differ_are_told_and_nothing_is_written(folder):
    compiled = compile_launch(folder, torch.float32, torch.float32)
    ranks = Ranks(2, 4096)
    inputs = inputs_for(2, 1000, torch.float32)
    for algorithm, mode in itertools.product(ALGORITHMS, ("raw", "slot")):
        tensors = [prepare(ranks, rank, inputs[rank], mode)[0] for rank in range(2)]
        answers = ranks.run(compiled, "all_reduce", algorithm, 0.5, tensors, torch.float32, headers=(1, 2))
        assert answers == [layout.MISMATCH] * 2
        assert all(same(tensors[rank], inputs[rank]) for rank in range(2))
    ranks.control[layout.ALARM // 8] = 1
    assert ranks.run(compiled, "all_reduce", "ring", 0.5, tensors, torch.float32) == [layout.ALARMED] * 2
