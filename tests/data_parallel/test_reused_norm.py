"""What launches learn of the averages: the norm and non-finite values that a report tells, and clipping with them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import fusedring
from fusedring import FusedRingDDP
from fusedring.group.groups import communicator_of
from tests.engines.recording_gpu import RecordingGpu, pretend
from tests.ranks import run_ranks

UNIT = 2.0**-24
"""The relative error of one operation in float32."""


def bound(elements: int) -> float:
    """Of the relative error of a norm: squares are rounded once each, then at most `elements` sums in any order."""
    return 0.5 * (elements + 1) * UNIT / (1 - (elements + 1) * UNIT) + UNIT


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 30), nn.LayerNorm(30), nn.Linear(30, 3))


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def step(model: nn.Module, rank: int, number: int = 0) -> None:
    model.zero_grad()
    generator = torch.Generator().manual_seed(10 * number + rank)
    x = torch.randn(8, 40, generator=generator, dtype=torch.float32)
    model(x).square().sum().backward()


def passes(model: nn.Module, count: list[int]) -> Callable[..., torch.Tensor]:
    """clip_grad_norm_, noting how many elements it reads for a norm, beside a norm that is known."""
    real = torch.nn.utils.get_total_norm

    def noted(tensors: Any, *args: Any) -> torch.Tensor:
        tensors = list(tensors)
        count.append(sum(t.numel() for t in tensors if t.dim() > 0))
        return real(tensors, *args)

    def clip(*args: Any, **how: Any) -> torch.Tensor:
        torch.nn.utils.get_total_norm = noted
        try:
            return fusedring.clip_grad_norm_(model, *args, **how)
        finally:
            torch.nn.utils.get_total_norm = real

    return clip


def check_norms(rank: int, world: int, engine: str) -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    if engine == "gpu":
        pretend(communicator_of(), RecordingGpu())
    chosen = {"engine": "triton"} if engine == "triton" else {}
    model = FusedRingDDP(make_model(), bucket_cap_mb=0.005, wire_dtype="bf16", **chosen)
    count: list[int] = []
    clip = passes(model, count)
    for number in range(2):
        step(model, rank, number)
        report, grads = model.report(), gradients(model)
        assert len(report.buckets) > 1
        norm = float(grads.norm())
        assert abs(report.grad_norm - norm) <= bound(grads.numel()) * norm
        assert report.found_inf is False
        same = [None] * world
        dist.all_gather_object(same, report.grad_norm)
        assert len(set(same)) == 1
        got = clip(norm / 2, reuse_norm=True)
        assert count.pop() == 0
        assert abs(float(got) - norm) <= bound(grads.numel()) * norm
        # The factor has the norm's error, and is rounded as the norm, the sum under it and the product are.
        wanted = grads / 2
        assert (
            (gradients(model) - wanted).abs() <= (bound(grads.numel()) + 6 * UNIT + 1e-5 / norm) * wanted.abs()
        ).all()

    # A change that leaves a version behind is noticed, and so is clipping itself.
    clip(norm, reuse_norm=True)
    assert count.pop() == grads.numel() + padding(model)
    step(model, rank)
    with torch.no_grad():
        model.module[0].weight.grad.mul_(3)
    assert float(clip(1e9, reuse_norm=True)) == pytest.approx(float(gradients(model).norm()), rel=bound(grads.numel()))
    assert count.pop() > 0

    # A gradient that is not in its bucket any more is read, the others are not.
    step(model, rank)
    model.module[4].bias.grad = torch.ones(3)
    assert float(clip(1e9, reuse_norm=True)) == pytest.approx(float(gradients(model).norm()), rel=bound(grads.numel()))
    assert 0 < count.pop() < grads.numel()

    # Launched in another order, each bucket still has its own squares; and no default dtype of torch's gets into them.
    model._scheduler.turn.order = tuple(reversed(model._scheduler.turn.order))
    torch.set_default_dtype(torch.float16)
    step(model, rank)
    torch.set_default_dtype(torch.float32)
    norms = [bucket.flat.double().norm().item() for bucket in model._scheduler.buckets]
    known = [math.sqrt(average.squares) for average in model._scheduler.results.averages()]
    assert len(set(norms)) == len(norms)
    assert known == [pytest.approx(norm, rel=bound(grads.numel())) for norm in norms]

    # Squares that overflow float32, where the values do not.
    large = FusedRingDDP(nn.Linear(20, 4, bias=False).double(), **chosen)
    large(torch.full((1, 20), 1e25).double()).sum().backward()
    assert large.report().grad_norm == math.inf
    assert large.report().found_inf is False
    clip = passes(large, count)
    assert float(clip(1.0, reuse_norm=True, error_if_nonfinite=False)) == pytest.approx(1e25 * math.sqrt(80), rel=1e-6)
    assert count.pop() == 80

    # What is not finite on one rank is so on all.
    large.zero_grad()
    large(torch.full((1, 20), math.inf if rank == world - 1 else 1.0).double()).sum().backward()
    assert large.report().found_inf is True
    with pytest.raises(RuntimeError, match="non-finite"):
        clip(1.0, reuse_norm=True, error_if_nonfinite=True)
    assert count.pop() == 0

    # Nobody knows the norm where a hook of the user sums, or where not all gradients are in buckets.
    hooked = FusedRingDDP(make_model(), **chosen)
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    step(hooked, rank)
    clip = passes(hooked, count)
    clip(1.0, reuse_norm=True)
    assert count.pop() > 0
    assert (hooked.report() is None) == (engine == "gpu")
    assert hooked.report() is None or hooked.report().grad_norm is None
    module = make_model()
    module[1].register_buffer("count", torch.zeros(1))
    module._ddp_params_and_buffers_to_ignore = ["1.count"]
    ignoring = FusedRingDDP(module, **chosen)
    step(ignoring, rank)
    assert ignoring.report().grad_norm > 0  # no gradient is missing
    module._ddp_params_and_buffers_to_ignore = ["0.bias"]
    ignoring = FusedRingDDP(module, **chosen)
    step(ignoring, rank)
    assert ignoring.report().grad_norm is None
    assert ignoring.report().found_inf is None


def padding(model: FusedRingDDP) -> int:
    """Elements between the gradients of a bucket, which are read with them."""
    return sum(
        bucket.entries[-1].offset + bucket.entries[-1].view.numel() - sum(e.view.numel() for e in bucket.entries)
        for bucket in model._scheduler.buckets
    )


@pytest.mark.parametrize("engine", ["triton", "gpu"])
def test_launches_learn_the_norm_of_what_they_average(engine):
    run_ranks(2, check_norms, engine)


def check_unknown_on_the_host(rank: int, world: int) -> None:
    model = FusedRingDDP(make_model())
    step(model, rank)
    assert model.report().grad_norm is None
    assert model.report().found_inf is None
    wanted = gradients(model).norm()
    norm = fusedring.clip_grad_norm_(model, 1.0, reuse_norm=True)
    assert float(norm) == pytest.approx(float(wanted), rel=bound(gradients(model).numel()))


def test_the_host_engine_does_not_look_at_values_yet():
    run_ranks(2, check_unknown_on_the_host)


def test_only_the_norm_of_type_2_is_known():
    with pytest.raises(ValueError, match="norm_type=1"):
        fusedring.clip_grad_norm_(FusedRingDDP(make_model()), 1.0, 1.0, reuse_norm=True)
