"""The measurement of training steps: gradients are verified in every wrapper, and ways are compared."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from fusedring.bench.models import MODELS, Model
from fusedring.bench.place import take_place
from fusedring.bench.steps import FUSEDRING, FUSEDRING_BF16, ONE_RANK, TORCH, TORCH_BF16, Step, measure_steps, wrappers
from tests.ranks import run_ranks

SMALL = Model("small", lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), lambda: torch.randn(2, 8), 3)
SIZES = {
    "8 x Linear(1024)": 8_396_800,
    "GPT of 3 million": 3_241_600,
    "ResNet-18, 64 x 64": 11_181_642,
    "LoRA, 8 x Linear(1024)": 131_072,
    "MLP of 0.3 million": 282_628,
    "2,500 of one element": 2_500,
}


def steps_of(rank: int, world: int) -> list[Step]:
    return measure_steps(SMALL, take_place("cpu"), turns=3)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_way_is_right_and_timed(world):
    one, *rest = run_ranks(world, steps_of)[0]
    assert (one.way, one.no_sync, one.exposed, one.overlap) == (ONE_RANK, None, None, None)
    assert [step.way for step in rest] == [TORCH, TORCH_BF16, FUSEDRING, FUSEDRING_BF16]
    for step in rest:
        assert (step.wrong, step.parameters) == (0, 144)
        assert step.step.repeats == step.no_sync.repeats == 3
        assert step.exposed == step.step.median - step.no_sync.median
        assert (step.overlap is None) is (step.way in (TORCH, TORCH_BF16))


class Forgets(nn.Module):
    """A wrapper that averages nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def no_sync(self) -> nullcontext:
        return nullcontext()


def steps_beside_a_wrong_one(rank: int, world: int) -> list[Step]:
    place = take_place("cpu")
    return measure_steps(SMALL, place, turns=2, ways={"forgets": Forgets, TORCH: wrappers(place)[TORCH]})


def test_what_is_wrong_is_counted_and_not_timed():
    _, forgets, theirs = run_ranks(2, steps_beside_a_wrong_one)[0]
    assert forgets.wrong > 144  # of three steps on two ranks
    assert (forgets.step, forgets.no_sync, forgets.exposed) == (None, None, None)
    assert theirs.wrong == 0
    assert theirs.step.repeats == 2


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_models_have_the_size_that_their_name_says(model):
    module = model.make()
    assert sum(p.numel() for p in module.parameters() if p.requires_grad) == SIZES[model.name]
    copy.deepcopy(module)(model.batch()).square().mean().backward()


@pytest.mark.slow
@pytest.mark.parametrize("model", [model.name for model in MODELS])
def test_all_models(model):

    assert all(step.wrong == 0 for step in run_ranks(2, steps_of_named, model)[0])


def steps_of_named(rank: int, world: int, name: str) -> list[Step]:
    (model,) = (each for each in MODELS if each.name == name)
    return measure_steps(model, take_place("cpu"), turns=1)
