"""FusedRingDDP under torch.compile: the gradients of an eager run, launches within backward, no breaks, no recompiling.

The model is the same in all tests, since what Inductor has compiled once is found in its cache.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import pickle
import shutil
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from fusedring import FusedRingDDP
from fusedring.data_parallel.scheduler import Scheduler
from tests.ranks import Ranks, staying_ranks

ORDERS = ("outside", "inside", "layers")
WIDTH = 16
SMALL = {"bucket_cap_mb": 1e-3}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler: g++")


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with staying_ranks(request.param) as group:
        yield group


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with staying_ranks(2) as group:
        yield group


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
    def __init__(
        self, *, layers: int = 2, tied: bool = False, twice: bool = False, unused: bool = False, **layer: bool
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(**layer) for _ in range(layers))
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


def inputs(rank: int, step: int, batch: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank), dtype=dtype)


def wrapped(module: nn.Module, order: str, backend: str, **options: Any) -> tuple[FusedRingDDP, Callable[..., Any]]:
    """The wrapper, and what to call."""
    torch._dynamo.reset()
    compiled = functools.partial(torch.compile, backend=backend, fullgraph=True)
    if order == "layers":
        for layer in module.layers:
            layer.compile(backend=backend, fullgraph=True)
    wrapper = FusedRingDDP(compiled(module) if order == "inside" else module, **options)
    return wrapper, compiled(wrapper) if order == "outside" else wrapper


# Gradients


@dataclass(frozen=True)
class Feature:
    """module, options: of the model and of the wrapper. tolerance: of eager and compiled, in the largest gradient."""

    module: dict[str, bool] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=lambda: SMALL)
    micro_batches: int = 1
    autocast: bool = False
    evaluates: bool = False
    batches: tuple[int, ...] = (8, 8, 8, 8)
    to_none: bool = True
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-5


BF16 = 2.0**-7  # an ulp: a sum that differs in its last bits may be rounded to the other side
FEATURES = {
    "plain": Feature(options={}),
    "no_sync, small buckets": Feature(micro_batches=3),
    "gradients kept": Feature(to_none=False),
    "gradients that are no views": Feature(micro_batches=2, options={**SMALL, "gradient_as_bucket_view": False}),
    "bf16 wire": Feature(options={**SMALL, "wire_dtype": "bf16"}, tolerance=BF16),
    "fp16 wire": Feature(options={"wire_dtype": "fp16"}, tolerance=2.0**-10),
    "tied weights": Feature(module={"tied": True}),
    "layers used twice": Feature(module={"twice": True}),
    "activation checkpointing": Feature(module={"checkpointed": True}),
    "dynamic batches": Feature(batches=(8, 5, 13, 6, 8)),
    "buffers and evaluation": Feature(module={"normed": True}, evaluates=True, tolerance=1e-4),
    "autocast": Feature(autocast=True, tolerance=2 * BF16),
    "float64": Feature(dtype=torch.float64, tolerance=1e-12),
    "a parameter that is not used": Feature(module={"unused": True}, options={**SMALL, "find_unused_parameters": True}),
}


def train(feature: Feature, order: str, backend: str, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every gradient and buffer after every step."""
    torch.manual_seed(1)
    module = Net(**feature.module).to(feature.dtype)
    wrapper, model = wrapped(module, order, backend, **feature.options)
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
            x = inputs(rank, 10 * step + micro, batch, feature.dtype)
            with nullcontext() if micro == feature.micro_batches - 1 else wrapper.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=feature.autocast):
                    output = model(x)
                output.to(feature.dtype).square().mean().backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                yield f"step {step} {name}", parameter.grad.clone()
        for name, buffer in module.named_buffers():
            yield f"step {step} {name}", buffer.clone()
        optimizer.step()


def check_feature(rank: int, world: int, name: str, backend: str) -> None:
    feature = FEATURES[name]
    expected = dict(train(feature, "eager", backend, rank))
    for order in ORDERS:
        got = dict(train(feature, order, backend, rank))
        assert got.keys() == expected.keys(), order
        for what, value in got.items():
            bound = feature.tolerance * max(1e-3, expected[what].abs().max().item())
            error = (value - expected[what]).abs().max().item()
            assert error <= bound, f"{order}, {what}: {error} > {bound}"


# These compile anew for each batch, or more modules.
COMPILED_OFTEN = ("dynamic batches", "buffers and evaluation")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in COMPILED_OFTEN else ()) for name in FEATURES]
)
def test_compiled_gradients_are_those_of_an_eager_run(ranks, name):
    ranks.run(check_feature, name, "aot_eager")


# With Inductor each takes seconds to compile; those that are not slow have one model.
COMPILED_ONCE = ("plain", "no_sync, small buckets", "gradients kept")


@needs_compiler
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in COMPILED_ONCE else pytest.mark.slow) for name in FEATURES]
)
def test_inductors_gradients_are_those_of_an_eager_run(ranks, name):
    ranks.run(check_feature, name, "inductor", deadline=200)


# Launches


@contextmanager
def watched_launches() -> Iterator[list[tuple[int, int]]]:
    """For each launch: how many gradients were computed by then, and how many autograd had accumulated by then."""
    seen: list[tuple[int, int]] = []
    accumulated: list[tuple[int, int]] = []
    launch_it, accumulate = Scheduler._launch, Scheduler.ready

    def launch(self: Scheduler, step: Any, index: int, **options: Any) -> None:
        seen.append((sum(map(sum, step.arrived)), len(accumulated)))
        launch_it(self, step, index, **options)

    def ready(self: Scheduler, step: Any, *place: int) -> None:
        accumulated.append(place)
        accumulate(self, step, *place)

    Scheduler._launch, Scheduler.ready = launch, ready
    try:
        yield seen
    finally:
        Scheduler._launch, Scheduler.ready = launch_it, accumulate


def each_bucket_goes_when_it_is_full(rank: int, world: int, order: str, backend: str) -> None:
    wrapper, model = wrapped(Net(layers=4), order, backend, **SMALL)
    for step in range(5):
        wrapper.zero_grad()
        with watched_launches() as launches:
            model(inputs(rank, step)).sum().backward()
        sizes = [len(bucket.parameters) for bucket in wrapper.report().buckets]
        assert len(sizes) > 3
        # The first backward tells which announced gradients are whole, the second in which order they come.
        if step >= 2:
            computed, accumulated = zip(*launches, strict=True)
            assert list(computed) == list(itertools.accumulate(sizes))
            if order == "layers":  # the head is not compiled
                assert accumulated[-2] < computed[-2]
            else:
                assert set(accumulated) == {0}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_each_bucket_is_launched_within_the_compiled_backward(two_ranks, order, backend):
    two_ranks.run(each_bucket_goes_when_it_is_full, order, backend, deadline=200)


def twenty_steps(rank: int, world: int, order: str) -> None:
    counters = torch._dynamo.utils.counters
    wrapper, model = wrapped(Net(layers=12), order, "aot_eager")
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(20):
            with wrapper.no_sync() if step % 2 else nullcontext():
                model(inputs(rank, step).requires_grad_()).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1, counters
    assert not counters["graph_break"], counters


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_is_compiled_twice_and_no_graph_breaks(two_ranks, order):
    two_ranks.run(twenty_steps, order)


# What else is done with models


def same_as_alone(
    rank: int,
    world: int,
    wrapper: FusedRingDDP,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    *,
    model: Any = None,
    backward: Callable[[Any, torch.Tensor], None] | None = None,
    steps: int = 4,
) -> None:
    """After each of some steps of `wrapper`, called as `model`, the gradients are the mean of what a copy gives."""
    alone = copy.deepcopy(wrapper.module)
    for step in range(steps):
        wrapper.zero_grad()
        if backward is not None:
            backward(wrapper, inputs(rank, step))
        else:
            loss(model if model is not None else wrapper, inputs(rank, step)).backward()
        check_mean(world, wrapper.module, alone, loss, step)


def check_mean(world: int, module: nn.Module, alone: nn.Module, loss: Callable[..., torch.Tensor], step: int) -> None:
    alone.zero_grad()
    for rank in range(world):
        (loss(alone, inputs(rank, step)) / world).backward()
    for (name, parameter), reference in zip(module.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.grad, reference.grad, rtol=1e-4, atol=1e-5, msg=lambda t, n=name: f"{n} {t}"
        )


def squares(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def compiled(what: Any, **options: Any) -> Any:
    return torch.compile(what, **{"backend": "aot_eager", "fullgraph": True, **options})


def masked_output(rank, world, backend="aot_eager"):
    def loss(model, x):
        y = model(x)
        y[:, 0] = 0.0
        return y.mul_(2).square().sum()

    wrapper = FusedRingDDP(Net(), **SMALL)
    whole = compiled(loss, backend=backend)
    same_as_alone(rank, world, wrapper, loss, backward=lambda model, x: whole(model, x).backward())
    same_as_alone(rank, world, wrapper, loss, model=compiled(wrapper, backend=backend))


def parameters_used_beside_the_modules(rank, world, backend="aot_eager"):
    def loss(model, x):
        return model(x).square().sum() + sum(p.square().sum() for p in model.parameters())

    wrapper = FusedRingDDP(Net(), **SMALL)
    whole = compiled(loss, backend=backend)
    same_as_alone(rank, world, wrapper, loss, backward=lambda model, x: whole(model, x).backward())
    model = compiled(wrapper, backend=backend)

    def half_eager(wrapper, x):
        (model(x).square().sum() + sum(p.square().sum() for p in wrapper.parameters())).backward()

    same_as_alone(rank, world, wrapper, loss, backward=half_eager)


def parameters_used_beside_the_modules_by_inductor(rank, world):
    """It adds in place, into what had been announced if that were announced."""
    parameters_used_beside_the_modules(rank, world, "inductor")


def parameters_replaced_for_a_call(rank, world, backend="aot_eager"):
    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x):
            halves = {name: p / 2 for name, p in self.net.named_parameters()}
            return torch.func.functional_call(self.net, halves, (x,))

    wrapper = FusedRingDDP(Halved(), **SMALL)
    same_as_alone(rank, world, wrapper, squares, model=compiled(wrapper, backend=backend))


def parameters_replaced_for_a_call_by_inductor(rank, world):
    parameters_replaced_for_a_call(rank, world, "inductor")


def masked_output_by_inductor(rank, world):
    masked_output(rank, world, "inductor")


def parameters_used_beside_the_modules_all_at_once(rank, world):
    """On one rank: all ranks hear of it, and go on together."""
    wrapper = FusedRingDDP(Net(), **SMALL)
    model = compiled(wrapper)
    for culprits in (range(world), [1]):
        same_as_alone(rank, world, wrapper, squares, model=model)
        wrapper.zero_grad()
        loss = squares(model, inputs(rank, 3))
        if rank in culprits:
            loss = loss + wrapper.module.head.weight.square().sum()
        with pytest.raises(
            RuntimeError, match=r"gradient of parameter head.weight is not what a compiled backward had"
        ):
            loss.backward()


def overwritten_outputs(rank, world):
    class Outputs(Net):
        def forward(self, x, kind):
            y = super().forward(x)
            return torch.tanh(y) if kind == "saved" else (y, y) if kind == "twice" else (y, y[:, :2])

    def loss(model, x, kind):
        y, z = model(x, kind)
        y.mul_(2)
        return z.square().sum()

    wrapper = FusedRingDDP(Outputs(), **SMALL)
    model = compiled(wrapper)
    for kind in ("twice", "view"):
        one = functools.partial(loss, kind=kind)
        whole = compiled(one)
        same_as_alone(rank, world, wrapper, one, model=model)
        same_as_alone(rank, world, wrapper, one, backward=lambda model, x, whole=whole: whole(model, x).backward())
    output = model(inputs(rank, 0), "saved")
    output.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def overwritten_inputs(rank, world):
    class Doubling(Net):
        def forward(self, x):
            return super().forward(x.mul_(2))

    def loss(model, x):
        return model(1 * x.requires_grad_()).square().sum()

    wrapper = FusedRingDDP(Doubling(), **SMALL)
    same_as_alone(rank, world, wrapper, loss, model=compiled(wrapper))


def two_forwards_in_one_graph(rank, world):
    """As of a discriminator; one rank runs it without compiling."""

    def discriminate(model, x):
        return model(x).sum() - model(x + 1).square().sum()

    def generate(model, x):
        return model(x).square().sum()

    wrapper = FusedRingDDP(Net(), **SMALL)
    for kind in (1, 2):
        graphs = [compiled(loss) if rank < kind else loss for loss in (generate, discriminate)]
        for loss, graph in 2 * [*zip((generate, discriminate), graphs, strict=True)]:

            def backward(model, x, graph=graph):
                graph(model, x).backward()

            same_as_alone(rank, world, wrapper, loss, backward=backward, steps=2)


def no_sync_within_what_is_compiled(rank, world):
    wrapper = FusedRingDDP(Net(), **SMALL)

    def loss(x):
        with wrapper.no_sync():
            return squares(wrapper, x)

    compiled(loss, fullgraph=False)(inputs(rank, 0)).backward()
    alone = copy.deepcopy(wrapper.module)
    alone.zero_grad()
    squares(alone, inputs(rank, 0)).backward()
    torch.testing.assert_close(wrapper.module.head.weight.grad, alone.head.weight.grad)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(loss)(inputs(rank, 0))


def attributes_that_are_not_what_a_module_holds(rank, world):
    class Positive(Net):
        def __init__(self):
            super().__init__()
            self._parameters["scale"] = nn.Parameter(torch.zeros(WIDTH))

        @property
        def scale(self):
            return torch.exp(self._parameters["scale"])

        def forward(self, x):
            return super().forward(x) * self.scale

    class Doubled(nn.Linear):
        def reset_parameters(self):  # Linear's own would fill what `__getattr__` returns, a copy
            nn.init.uniform_(self._parameters["weight"], -0.25, 0.25)
            nn.init.zeros_(self.bias)

        def __getattr__(self, name):
            value = super().__getattr__(name)
            return 2 * value if name == "weight" else value

    for module in (Positive(), nn.Sequential(Doubled(WIDTH, 4), nn.Tanh())):
        wrapper = FusedRingDDP(module, **SMALL)
        same_as_alone(rank, world, wrapper, squares, model=compiled(wrapper))
        same_as_alone(rank, world, wrapper, squares)


def several_forwards(rank, world):
    def loss(model, x):
        return model(x).square().sum() + model(x + 1).sum()

    wrapper = FusedRingDDP(Net(), **SMALL)
    model = compiled(wrapper)
    for each in (squares, loss, squares, loss):
        same_as_alone(rank, world, wrapper, each, model=model, steps=3)


def a_step_with_backward_in_it(rank, world):
    wrapper = FusedRingDDP(Net(), **SMALL)

    def step(model, x):
        squares(model, x).backward()

    same_as_alone(rank, world, wrapper, squares, backward=compiled(step, fullgraph=False))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(step)(wrapper, inputs(rank, 0))
    torch._dynamo.reset()
    if hasattr(torch._dynamo.config, "trace_autograd_ops"):
        traced = torch._dynamo.config.patch(trace_autograd_ops=True)
        with traced, pytest.raises(RuntimeError, match=r"gradient of parameter \S+ is computed in a compiled graph"):
            compiled(step)(wrapper, inputs(rank, 0))


def compiled_autograd(rank, world):
    wrapper = FusedRingDDP(Net(), **SMALL)
    compiler = functools.partial(torch.compile, backend="aot_eager")
    for model in (wrapper, compiled(wrapper)):
        enabled = torch._dynamo.compiled_autograd._enable(compiler)
        with enabled, pytest.raises(RuntimeError, match="compiled autograd"):
            squares(model, inputs(rank, 0)).backward()
    same_as_alone(rank, world, wrapper, squares, model=model)


def other_ranks_compile_differently(rank, world):
    class Broken(Net):
        def forward(self, x):
            x = self.layers[0](x)
            if rank == 1:
                torch._dynamo.graph_break()
            return self.head(self.layers[1](x))

    wrapper = FusedRingDDP(Net(), **SMALL)
    same_as_alone(rank, world, wrapper, squares, model=compiled(wrapper) if rank == 0 else wrapper)
    wrapper = FusedRingDDP(Broken(), **SMALL)
    same_as_alone(rank, world, wrapper, squares, model=compiled(wrapper, fullgraph=False))


def autograd_grad(rank, world):
    wrapper = FusedRingDDP(Net(), **SMALL)
    model = compiled(wrapper)
    for _ in range(3):
        x = inputs(rank, 0).requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        torch.autograd.grad(model(x).sum(), list(wrapper.parameters()))
        assert all(p.grad is None for p in wrapper.parameters())
        same_as_alone(rank, world, wrapper, squares, model=model, steps=2)
        wrapper.zero_grad()


def hooks_of_the_user(rank, world):
    wrapper = FusedRingDDP(Net(), **SMALL)
    weight = wrapper.module.head.weight
    model = compiled(wrapper)
    same_as_alone(rank, world, wrapper, squares, model=model)
    seen = []
    handle = weight.register_hook(lambda grad: seen.append(grad) or 2 * grad)
    wrapper.zero_grad()
    squares(model, inputs(rank, 0)).backward()
    assert len(seen) == 1
    doubled = weight.grad.clone()
    handle.remove()
    same_as_alone(rank, world, wrapper, squares, model=model, steps=1)
    torch.testing.assert_close(doubled, 2 * weight.grad)


def a_backward_that_fails(rank, world):
    wrapper = FusedRingDDP(Net(), **SMALL)
    model = compiled(wrapper)
    same_as_alone(rank, world, wrapper, squares, model=model)
    for to_none in (True, False):
        wrapper.zero_grad(set_to_none=to_none)
        with wrapper.no_sync():
            squares(model, inputs(rank, 0)).backward()
        before = [p.grad.clone() for p in wrapper.parameters()]
        handle = wrapper.module.layers[0].linear.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            squares(model, inputs(rank, 0)).backward()
        handle.remove()
        for parameter, kept in zip(wrapper.parameters(), before, strict=True):
            assert parameter.grad is not None
            assert parameter.grad.shape == kept.shape
        assert torch.equal(wrapper.module.layers[0].linear.weight.grad, before[0])
        same_as_alone(rank, world, wrapper, squares, model=model, steps=2)


def loops_of_any_length(rank, world):
    class Looping(Net):
        def forward(self, x, times=1):
            for _ in range(times):
                for layer in self.layers:
                    x = layer(x)
            return self.head(x)

    module = Looping()
    for layer in module.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    for wrapper in (FusedRingDDP(module, **SMALL), FusedRingDDP(Looping(), **SMALL)):
        model = wrapper if wrapper.module is module else compiled(wrapper)
        for times in (1, 1, 1, 2, 1, 3, 1):

            def loss(model, x, times=times):
                return model(x, times).square().sum()

            same_as_alone(rank, world, wrapper, loss, model=model, steps=1)


def recomputed_forwards(rank, world):
    """Reentrant checkpointing runs the compiled wrapper without gradients first, and again within backward."""
    wrapper = FusedRingDDP(Net(), **SMALL)
    model = compiled(wrapper)

    def loss(model, x):
        return checkpoint(model, x.requires_grad_(), use_reentrant=True).square().sum()

    for _ in range(2):
        same_as_alone(rank, world, wrapper, loss, model=model, steps=2)
        wrapper.zero_grad()
        with wrapper.no_sync():
            loss(model, inputs(rank, 0)).backward()
        mine = wrapper.module.head.weight.grad.clone()
        alone = copy.deepcopy(wrapper.module)
        alone.zero_grad()
        squares(alone, inputs(rank, 0)).backward()
        torch.testing.assert_close(mine, alone.head.weight.grad)


def buffers_by_a_hook(rank, world):
    from torch.nn.parallel.distributed import _BufferCommHookLocation

    def later(wrapper, buffers):
        future = torch.futures.Future()
        future.set_result(None)
        wrapper._default_broadcast_coalesced()
        return [future.then(lambda _: [buffer.add_(1) for buffer in buffers.values()])]

    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.count.add_(1)
            return super().forward(x)

    for where in _BufferCommHookLocation:
        counts = []
        for order in ("eager", "outside"):
            wrapper, model = wrapped(Counting(), order, "aot_eager", **SMALL)
            wrapper.module.count.fill_(rank)
            wrapper._register_buffer_comm_hook(wrapper, later, where)
            for step in range(3):
                squares(model, inputs(rank, step)).backward()
            counts.append(wrapper.module.count.item())
        assert counts == [6, 6], (where, counts)


def transformed_functions(rank, world):
    class Derived(Net):
        def forward(self, x):
            return torch.func.vmap(torch.func.grad(lambda row: Net.forward(self, row[None]).sum()))(x)

    wrapper = FusedRingDDP(Derived(), find_unused_parameters=True)
    same_as_alone(rank, world, wrapper, squares, model=compiled(wrapper))


def parameters_that_change(rank, world):
    wrapper = FusedRingDDP(Net(), **SMALL)
    model = compiled(wrapper)
    same_as_alone(rank, world, wrapper, squares, model=model)
    wrapper.module.head.weight = nn.Parameter(wrapper.module.head.weight.detach() / 2)
    same_as_alone(rank, world, wrapper, squares, model=model)
    wrapper.module.head.weight.requires_grad_(False)
    same_as_alone(rank, world, wrapper, squares, model=model)


def a_rank_that_skips_all_parameters(rank, world):
    class Skipping(Net):
        def forward(self, x, skips):
            return 2 * x if skips else super().forward(x)

    wrapper = FusedRingDDP(Skipping(), find_unused_parameters=True)
    alone = copy.deepcopy(wrapper.module)
    model = compiled(wrapper)
    for step in range(4):
        wrapper.zero_grad()
        alone.zero_grad()
        model(inputs(rank, step).requires_grad_(), rank > 0).sum().backward()
        (alone(inputs(0, step), False).sum() / world).backward()
        for parameter, reference in zip(wrapper.module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, reference.grad)


def an_unused_parameter_is_noticed(rank, world):
    model = compiled(FusedRingDDP(Net(unused=True)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        squares(model, inputs(rank, 0)).backward()
    assert any("no gradient on some rank for spare" in str(warning.message) for warning in told)
    with pytest.raises(RuntimeError, match=r"Expected to have finished reduction.*spare"):
        model(inputs(rank, 1))


def what_cannot_be_traced(rank, world):
    class Untraceable(Net):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)

    wrapper = FusedRingDDP(Untraceable(), **SMALL)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        compiled(wrapper)(inputs(rank, 0))
    same_as_alone(rank, world, wrapper, squares)


def nested_wrappers(rank, world):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = Net()
            self.second = FusedRingDDP(Net(), **SMALL)
            self._ddp_params_and_buffers_to_ignore = [n for n, _ in self.named_parameters() if n.startswith("second")]

        def forward(self, x):
            return self.second(self.first(x))

    wrapper = FusedRingDDP(Outer(), **SMALL)
    alone = nn.Sequential(copy.deepcopy(wrapper.module.first), copy.deepcopy(wrapper.module.second.module))
    model = compiled(wrapper)
    for step in range(4):
        wrapper.zero_grad()
        squares(model, inputs(rank, step)).backward()
        check_mean(world, wrapper.module, alone, squares, step)


def uneven_inputs(rank, world):
    wrapper = FusedRingDDP(Net(), **SMALL)
    model = compiled(wrapper)
    with wrapper.join():
        for step in range(3 + rank):
            wrapper.zero_grad()
            squares(model, inputs(rank, step)).backward()
    alone = copy.deepcopy(wrapper.module)
    alone.zero_grad()
    (squares(alone, inputs(world - 1, 2 + world - 1)) / world).backward()
    if rank == world - 1:
        for parameter, reference in zip(wrapper.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-4, atol=1e-5)


def modules_of_torch(rank, world):
    """Attention reads parameters of its parts itself, an LSTM keeps a list of its own."""
    for module, fullgraph in ((nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0), True), (nn.LSTM(WIDTH, 4), False)):
        wrapper = FusedRingDDP(module, **SMALL)

        def loss(model, x):
            output = model(x[None])
            return (output[0] if isinstance(output, tuple) else output).square().sum()

        same_as_alone(rank, world, wrapper, loss, model=compiled(wrapper, fullgraph=fullgraph))


def modules_look_as_before(rank, world):
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    wrapper = FusedRingDDP(module, **SMALL)
    model = compiled(wrapper)
    squares(model, inputs(rank, 0)).backward()
    linear = module.head
    assert isinstance(linear, nn.Linear)
    assert isinstance(linear.weight, nn.Parameter)
    assert linear.weight.grad is not None
    assert linear.bias is None
    assert repr(linear).startswith("Linear(")
    before = linear.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, linear.weight)
    assert next(iter(model.state_dict())) == "_orig_mod.module.layers.0.linear.weight"
    assert next(iter(wrapper.state_dict())) == "module.layers.0.linear.weight"
    inside = FusedRingDDP(compiled(Net()))
    assert next(iter(inside.state_dict())) == "module._orig_mod.layers.0.linear.weight"
    copies = [pickle.loads(pickle.dumps(linear, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for made in (copy.deepcopy(module), copy.copy(linear), saved(module), *copies):
        assert type(made) in (nn.Linear, Net)
        assert "_fusedring_tags" not in vars(made)
    above = type("Above", (type(linear),), {})
    linear.__class__ = above
    assert type(copy.deepcopy(linear)) is above
    linear.__class__ = above.__bases__[0]
    nn.utils.parametrizations.weight_norm(linear)
    same_as_alone(rank, world, wrapper, squares, model=model)
    pruned = module.layers[0].linear
    prune.identity(pruned, "weight")  # weight is a tensor now, made from the parameter weight_orig
    squares(model, inputs(rank, 0)).backward()
    assert pruned.weight_orig.grad is not None
    prune.remove(pruned, "weight")
    same_as_alone(rank, world, wrapper, squares, model=model)
    with pytest.raises(AttributeError, match="no_such"):
        linear.no_such  # noqa: B018


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def a_copy_of_the_wrapper(rank, world):
    wrapper = FusedRingDDP(Net(), **SMALL)
    same_as_alone(rank, world, wrapper, squares, model=compiled(wrapper))
    copied = copy.deepcopy(wrapper)
    same_as_alone(rank, world, copied, squares, model=compiled(copied))
    same_as_alone(rank, world, wrapper, squares, model=compiled(wrapper))


def compiled_before_it_is_wrapped(rank, world):
    module = compiled(Net(layers=4))
    squares(module, inputs(rank, 0)).backward()
    wrapper = FusedRingDDP(module, **SMALL)
    for step in range(4):
        wrapper.zero_grad()
        with watched_launches() as launches:
            squares(wrapper, inputs(rank, step)).backward()
    assert launches[0][0] < launches[-1][0]
    assert launches[0][1] == 0


def functions_compiled_within_a_module(rank, world):
    class Inner(Net):
        @functools.partial(torch.compile, backend="aot_eager")
        def part(self, x):
            return self.layers[1](x)

        def forward(self, x):
            return self.head(self.part(self.layers[0](x)))

    wrapper = FusedRingDDP(Inner(), **SMALL)
    same_as_alone(rank, world, wrapper, squares)


def forgotten_wrapper(rank, world):
    """A module whose wrapper is gone trains on its own."""
    module = Net()
    model = compiled(module)
    wrapper = FusedRingDDP(model)
    for step in range(3):
        squares(wrapper, inputs(rank, step)).backward()
    gone = weakref.ref(wrapper)
    del wrapper
    gc.collect()
    assert gone() is None
    alone = Net()
    alone.load_state_dict(module.state_dict())
    module.zero_grad()
    squares(model, inputs(rank, 1)).backward()
    squares(alone, inputs(rank, 1)).backward()
    for parameter, reference in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad)


def classes_that_do_not_want_subclasses(rank, world):
    class Registered(nn.Linear):
        def __init_subclass__(cls, *, key):
            raise AssertionError("an announcing class is nobody's subclass")

    class Final(type(nn.Module)):
        def __new__(cls, name, bases, contents):
            if any(isinstance(base, Final) for base in bases):
                raise ValueError("no subclasses")
            return super().__new__(cls, name, bases, contents)

    class Alone(nn.Linear, metaclass=Final):
        pass

    for kind in (Registered, Alone):
        wrapper = FusedRingDDP(nn.Sequential(kind(WIDTH, 4), nn.Tanh(), nn.Linear(4, 2)), **SMALL)
        alone = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 2))
        alone.load_state_dict(wrapper.module.state_dict())
        model = compiled(wrapper)
        for step in range(4):
            wrapper.zero_grad()
            squares(model, inputs(rank, step)).backward()
            check_mean(world, wrapper.module, alone, squares, step)


# Each takes seconds in Dynamo. Those that are slow compile the most often, or with Inductor.
CASES = [
    masked_output,
    parameters_used_beside_the_modules,
    pytest.param(parameters_used_beside_the_modules_by_inductor, marks=[needs_compiler, pytest.mark.slow]),
    parameters_replaced_for_a_call,
    pytest.param(parameters_replaced_for_a_call_by_inductor, marks=[needs_compiler, pytest.mark.slow]),
    pytest.param(masked_output_by_inductor, marks=[needs_compiler, pytest.mark.slow]),
    parameters_used_beside_the_modules_all_at_once,
    pytest.param(overwritten_outputs, marks=pytest.mark.slow),
    overwritten_inputs,
    two_forwards_in_one_graph,
    no_sync_within_what_is_compiled,
    attributes_that_are_not_what_a_module_holds,
    several_forwards,
    a_step_with_backward_in_it,
    compiled_autograd,
    other_ranks_compile_differently,
    autograd_grad,
    hooks_of_the_user,
    a_backward_that_fails,
    pytest.param(loops_of_any_length, marks=pytest.mark.slow),
    recomputed_forwards,
    buffers_by_a_hook,
    transformed_functions,
    parameters_that_change,
    a_rank_that_skips_all_parameters,
    an_unused_parameter_is_noticed,
    what_cannot_be_traced,
    nested_wrappers,
    uneven_inputs,
    pytest.param(modules_of_torch, marks=pytest.mark.slow),
    modules_look_as_before,
    a_copy_of_the_wrapper,
    compiled_before_it_is_wrapped,
    functions_compiled_within_a_module,
    forgotten_wrapper,
    classes_that_do_not_want_subclasses,
]


def run_case(rank: int, world: int, case: Callable[[int, int], None]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(rank)
    case(rank, world)
    dist.barrier()


@pytest.mark.parametrize("case", CASES)
def test_case(two_ranks, case):
    two_ranks.run(run_case, case)


def test_a_wrapper_trains_where_nobody_has_imported_the_compiler():
    """In a process of its own, which takes seconds: the ranks of all other tests have imported it."""
    code = """
import sys, torch, fusedring
model = fusedring.FusedRingDDP(torch.nn.Linear(3, 2))
for _ in range(2):
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    assert (model.module.weight.grad == 1).all()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
