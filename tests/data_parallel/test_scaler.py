"""FusedRingDDP under torch.amp: the gradient scaler, clipping of what it unscales, and autocast.

A scale is a power of two. So scaled gradients, their averages and what unscaling makes of them are, to the bit, what
training without a scaler has: nothing here is near the ends of float32's range.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedring
from fusedring import FusedRingDDP
from tests.ranks import run_ranks

SCALE = 2.0**12


def make_model(**options: object) -> FusedRingDDP:
    torch.manual_seed(0)
    return FusedRingDDP(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), **options)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x).square().mean()


def on_all_ranks(value: object, world: int) -> list[object]:
    everyone: list[object] = [None] * world
    dist.all_gather_object(everyone, value)
    return everyone


def check_overflow(rank: int, world: int, as_view: bool, clips: bool, set_to_none: bool, what: float) -> None:
    """In step 1 the gradients of the last rank alone are infinite or NaN: that step is left out, on every rank."""
    options = {"gradient_as_bucket_view": as_view, "bucket_cap_mb": 2e-4}
    model, plain = make_model(**options), make_model(**options)
    optimizer, of_plain = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    scales = []
    for step in range(5):
        loss = loss_of(model, step, rank)
        scaler.scale(loss * what if step == 1 and rank == world - 1 else loss).backward()
        before = [p.detach().clone() for p in model.parameters()]
        if clips:
            scaler.unscale_(optimizer)
            norm = fusedring.clip_grad_norm_(model, 0.1)
            assert norm.isfinite() == (step != 1)
        scaler.step(optimizer)
        (found,) = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        assert on_all_ranks(found.item(), world) == [float(step == 1)] * world
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad(set_to_none=set_to_none)
        if step == 1:
            assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
            continue
        loss_of(plain, step, rank).backward()
        if clips:
            assert torch.equal(norm, fusedring.clip_grad_norm_(plain, 0.1))
        of_plain.step()
        of_plain.zero_grad(set_to_none=set_to_none)
        assert all(torch.equal(p, other) for p, other in zip(model.parameters(), plain.parameters(), strict=True))
    # Halved after step 1, doubled after two good steps in a row.
    assert on_all_ranks(scales, world) == [[SCALE, SCALE / 2, SCALE / 2, SCALE, SCALE]] * world
    everyone = on_all_ranks([p.tolist() for p in model.parameters()], world)
    assert all(one == everyone[0] for one in everyone)


def check_wire(rank: int, world: int) -> None:
    """A value that float16 has no number for becomes infinite on the wire alone; the scaler finds it everywhere."""
    model = make_model(wire_dtype="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(loss_of(model, 0, rank)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**39
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()
    scaler.update(1024.0)
    scaler.scale(loss_of(model, 0, rank)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1024.0
    assert not any(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def check_accumulation(rank: int, world: int) -> None:
    """Scaled micro-batches accumulate; unscaled and clipped once, they are what the unscaled ones are."""
    model, plain = make_model(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for step in range(3):
        if step < 2:
            with model.no_sync(), plain.no_sync():
                scaler.scale(loss_of(model, step, rank)).backward()
                loss_of(plain, step, rank).backward()
        else:
            scaler.scale(loss_of(model, step, rank)).backward()
            loss_of(plain, step, rank).backward()
    scaler.unscale_(optimizer)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


def check_scaler(rank: int, world: int) -> None:
    """All in the same processes, where the first optimizer imports half of torch."""
    check_wire(rank, world)
    check_accumulation(rank, world)
    for as_view in (True, False):
        for clips in (True, False):
            for set_to_none in (True, False):
                for what in (torch.inf, -torch.inf, torch.nan):
                    check_overflow(rank, world, as_view, clips, set_to_none, what)


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_skip_the_step_in_which_one_overflows(world):
    run_ranks(world, check_scaler)


def check_autocast(rank: int, world: int) -> None:
    """Gradients of float32 parameters are float32; the mean is of what every rank has under autocast by itself."""
    for inside in (True, False):  # autocast around the wrapper, or in the module's own forward
        module = make_model().module
        if not inside:
            module.forward = torch.autocast("cpu", torch.bfloat16)(module.forward)
        model = FusedRingDDP(module)
        everyone = []
        for r in range(world):
            local = copy.deepcopy(model.module)
            if not inside:
                local.forward = torch.autocast("cpu", torch.bfloat16)(
                    lambda x, layers=local: nn.Sequential.forward(layers, x)
                )
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                loss = loss_of(local, 0, r)
            loss.backward()
            everyone.append([p.grad.double() for p in local.parameters()])
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            loss = loss_of(model, 0, rank)
        loss.backward()
        for parameter, *terms in zip(model.parameters(), *everyone, strict=True):
            assert parameter.grad.dtype == torch.float32
            stacked = torch.stack(terms)
            # Scaling by a rounded 1/W, and W - 1 sums: W + 1 roundings of half an eps, and their products.
            allowed = (world + 2) * torch.finfo(torch.float32).eps / 2 * stacked.abs().mean(0)
            assert ((parameter.grad - stacked.mean(0)).abs() <= allowed).all()


@pytest.mark.parametrize("world", [2, 3])
def test_autocast(world):
    run_ranks(world, check_autocast)
