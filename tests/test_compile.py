"""FusedRingDDP under torch.compile: the gradients of an eager run, launches within backward, no breaks, no recompiling.

A test of a backend has one group of processes go through all features and orders, since starting them is slow and what
Inductor has compiled once is found in its cache.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedring import FusedRingDDP
from tests.ranks import run_ranks

ORDERS = ("outside", "inside", "layers")
WIDTH = 24
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler, g++")


class Layer(nn.Module):
    """A linear map and what the features want beside it."""

    def __init__(self, *, normed: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if normed else nn.Identity()
        self.checkpointed = checkpointed

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.linear(x))) + x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)


class Net(nn.Module):
    def __init__(self, *, tied: bool = False, twice: bool = False, unused: bool = False, **layer: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(**layer) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if tied:
            self.head.weight = self.layers[0].linear.weight
        self.twice = twice
        if unused:
            self.spare = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2 if self.twice else 1):
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


@dataclass(frozen=True)
class Feature:
    """options: of the wrapper. tolerance: between eager and compiled, relative to the largest gradient."""

    module: dict[str, bool] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    autocast: bool = False
    evaluates: bool = False
    batches: tuple[int, ...] = (8, 8, 8, 8)
    to_none: bool = True
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-5


BF16 = 2.0**-7  # an ulp: a sum that differs in its last bits may be rounded to the other side
FEATURES = {
    "plain": Feature(),
    "small buckets": Feature(options={"bucket_cap_mb": 1e-3}),
    "no_sync": Feature(micro_batches=3, options={"bucket_cap_mb": 1e-3}),
    "gradients kept": Feature(to_none=False, options={"bucket_cap_mb": 1e-3}),
    "no views": Feature(micro_batches=2, options={"bucket_cap_mb": 1e-3, "gradient_as_bucket_view": False}),
    "bf16 wire": Feature(options={"bucket_cap_mb": 1e-3, "wire_dtype": "bf16"}, tolerance=BF16),
    "fp16 wire": Feature(options={"wire_dtype": "fp16"}, tolerance=2.0**-10),
    "tied": Feature(module={"tied": True}, options={"bucket_cap_mb": 1e-3}),
    "twice": Feature(module={"twice": True}, options={"bucket_cap_mb": 1e-3}),
    "checkpoint": Feature(module={"checkpointed": True}, options={"bucket_cap_mb": 1e-3}),
    "dynamic": Feature(batches=(8, 5, 13, 6, 8), options={"bucket_cap_mb": 1e-3}),
    "buffers": Feature(module={"normed": True}, options={"bucket_cap_mb": 1e-3}, evaluates=True, tolerance=1e-4),
    "autocast": Feature(autocast=True, tolerance=2 * BF16),
    "float64": Feature(dtype=torch.float64, options={"bucket_cap_mb": 1e-3}, tolerance=1e-12),
    "unused": Feature(module={"unused": True}, options={"find_unused_parameters": True, "bucket_cap_mb": 1e-3}),
}


def train(feature: Feature, order: str, backend: str, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every gradient and buffer after every step."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    module = Net(**feature.module).to(feature.dtype)
    compiled = functools.partial(torch.compile, backend=backend, fullgraph=True)
    if order == "layers":
        for layer in module.layers:
            layer.compile(backend=backend, fullgraph=True)
    wrapper = FusedRingDDP(compiled(module) if order == "inside" else module, **feature.options)
    model = compiled(wrapper) if order == "outside" else wrapper
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for step, batch in enumerate(feature.batches):
        if feature.evaluates:
            wrapper.eval()
            for context in (torch.no_grad(), torch.inference_mode()):
                with context:
                    assert not model(torch.ones(4, WIDTH, dtype=feature.dtype)).requires_grad
            wrapper.train()
        optimizer.zero_grad(set_to_none=feature.to_none)
        for micro in range(feature.micro_batches):
            seed = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            x = torch.randn(batch, WIDTH, generator=seed, dtype=feature.dtype)
            with nullcontext() if micro == feature.micro_batches - 1 else wrapper.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=feature.autocast):
                    loss = model(x).float().square().mean() if feature.autocast else model(x).square().mean()
                loss.backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                yield f"step {step} {name}", parameter.grad.clone()
        for name, buffer in module.named_buffers():
            yield f"step {step} {name}", buffer.clone()
        optimizer.step()


def all_features(rank: int, world: int, backend: str) -> None:
    for name, feature in FEATURES.items():
        expected = dict(train(feature, "eager", backend, rank))
        for order in ORDERS:
            got = dict(train(feature, order, backend, rank))
            assert got.keys() == expected.keys(), (name, order)
            for what, value in got.items():
                bound = feature.tolerance * max(1e-3, expected[what].abs().max().item())
                error = (value - expected[what]).abs().max().item()
                assert error <= bound, f"{name}, {order}, {what}: {error} > {bound}"


@pytest.mark.parametrize("world", [2, 3])
def test_compiled_gradients_are_those_of_an_eager_run(world):
    run_ranks(world, all_features, "aot_eager", deadline=400)


@needs_compiler
@pytest.mark.parametrize("world", [2, 3])
def test_inductors_gradients_are_those_of_an_eager_run(world):
    run_ranks(world, all_features, "inductor", deadline=900)
