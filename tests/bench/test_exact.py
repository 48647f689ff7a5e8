"""Inputs whose average is exact in whatever order and dtype it is computed, and in which every mistake shows."""

from __future__ import annotations

import pytest
import torch

from fusedring.bench.exact import MOST_RANKS, PERIOD, ExactInputs
from fusedring.config import DTYPES

CPU = torch.device("cpu")
FORMS = [(dtype, wire) for dtype in DTYPES for wire in (None, torch.float16, torch.bfloat16) if wire != dtype]
ELEMENTS = 20_000


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 11, MOST_RANKS])
@pytest.mark.parametrize(("dtype", "wire"), FORMS)
def test_every_order_of_operations_gives_the_average(world, dtype, wire):
    inputs = ExactInputs(dtype, wire, world, CPU)
    tensors = [torch.empty(ELEMENTS, dtype=dtype) for _ in range(world)]
    for rank, tensor in enumerate(tensors):
        inputs.fill(tensor, rank)
    factor = torch.tensor(1 / world, dtype=torch.float32)
    scaled_first = (tensors[0].float() * factor).to(wire or dtype)
    summed_first = tensors[0].to(wire or dtype)
    for tensor in tensors[1:]:
        scaled_first = (scaled_first.float() + tensor.float() * factor).to(wire or dtype)
        summed_first = summed_first + tensor.to(wire or dtype)
    assert inputs.wrong(scaled_first.to(dtype)) == 0
    assert inputs.wrong((summed_first / world).to(dtype)) == 0
    assert world == 1 or not torch.equal(tensors[0], tensors[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_mistakes_are_counted(dtype):
    inputs = ExactInputs(dtype, None, 2, CPU)
    one, other = torch.empty(PERIOD + 100, dtype=dtype), torch.empty(PERIOD + 100, dtype=dtype)
    inputs.fill(one, 0)
    inputs.fill(other, 1)
    assert inputs.changed(one, 0) == inputs.changed(other, 1) == 0
    assert inputs.changed(one, 1) > PERIOD / 2
    average = (one + other) / 2
    assert inputs.wrong(average) == 0
    average[[3, PERIOD, PERIOD + 99]] += 1
    assert inputs.wrong(average) == 3
    assert inputs.wrong(one) > PERIOD / 2, "nobody else's contribution was added"
    assert inputs.wrong(average.roll(16)) > PERIOD / 2, "a segment is in the wrong place"


def test_a_part_of_a_tensor():
    inputs = ExactInputs(torch.float32, None, 2, CPU)
    whole, parts = torch.empty(2 * PERIOD), torch.empty(2 * PERIOD)
    inputs.fill(whole, 1)
    for start, stop in ((0, 7), (7, PERIOD + 5), (PERIOD + 5, 2 * PERIOD)):
        inputs.fill(parts[start:stop], 1, start=start)
    assert torch.equal(whole, parts)


def test_too_many_ranks_are_refused():
    with pytest.raises(ValueError, match="1 to 16 ranks, got 17"):
        ExactInputs(torch.float32, None, 17, CPU)
