"""FusedRingDDP beside others: several wrappers in one backward, shared parameters, checkpointing, lost steps."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedring
from fusedring import FusedRingDDP
from tests.ranks import run_ranks


def linear(size: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(size, size)


def filled(rank: int, size: int = 4) -> torch.Tensor:
    return torch.full((1, size), float(rank + 1))


def check_shared_parameter(rank: int, world: int) -> None:
    """An encoder is wrapped and trained alone, then inside of another wrapper; large, so that a race would show."""
    encoder = FusedRingDDP(linear(1500))
    network = FusedRingDDP(nn.Sequential(linear(1500), encoder))
    x = filled(rank, 1500)
    for step in range(6):
        model = network if step % 2 else encoder
        model(x).sum().backward()
        weight = encoder.module.weight
        want = 1.5 if step % 2 == 0 else None
        everyone = [torch.empty_like(weight.grad) for _ in range(world)]
        dist.all_gather(everyone, weight.grad)
        assert torch.equal(everyone[0], everyone[1])
        if want is None:
            local = copy.deepcopy(nn.Sequential(network.module[0], encoder.module))
            grads = []
            for r in range(world):
                local.zero_grad()
                local(filled(r, 1500)).sum().backward()
                grads.append(local[1].weight.grad.clone())
            torch.testing.assert_close(weight.grad, sum(grads) / world, rtol=1e-4, atol=1e-4)
        else:
            assert (weight.grad == want).all()
        network.zero_grad(set_to_none=False)


def test_a_parameter_in_two_wrappers_is_averaged_from_local_gradients():
    run_ranks(2, check_shared_parameter)


def check_lost_steps(rank: int, world: int, where: str) -> list[str]:
    model = FusedRingDDP(nn.Sequential(linear(), linear()), bucket_cap_mb=1e-5, timeout=20)
    seen = []
    for iteration in range(5 + rank):
        model.zero_grad()
        try:
            out = model(filled(rank) if iteration != 1 or rank == 0 or where != "forward" else torch.ones(1, 3))
            if iteration == 1 and rank == 1:
                if where == "loss":
                    raise ZeroDivisionError
                if where == "backward":
                    out.register_hook(lambda g: 1 / 0)
            out.sum().backward()
        except (fusedring.MismatchError, ZeroDivisionError, RuntimeError) as error:
            seen.append(type(error).__name__)
        else:
            seen.append("ok")
            assert (model.module[1].bias.grad == 1).all()
    return seen


@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_a_step_lost_before_the_first_gradient_is_found(where):
    first, second = run_ranks(2, check_lost_steps, where)
    assert first == ["ok", "MismatchError", "ok", "ok", "ok"]
    assert second[:3] == ["ok", "RuntimeError" if where == "forward" else "ZeroDivisionError", "MismatchError"]
    assert set(second[3:]) == {"ok"}


@dataclasses.dataclass
class Output:
    """What pytree does not look into."""

    value: torch.Tensor


class Hidden:
    """What nobody looks into."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Gives(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.layer, self.kind = linear(), kind

    def forward(self, x):
        return self.kind(self.layer(x))


def check_outputs(rank: int, world: int) -> None:
    for kind in (Output, Hidden):
        model = FusedRingDDP(Gives(kind))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            first, second = model(filled(rank)), model(filled(rank))
            for out in (first, second):
                model.zero_grad()
                out.value.sum().backward()
                assert (model.module.layer.weight.grad == 1.5).all()


def test_outputs_in_dataclasses_and_objects():
    run_ranks(2, check_outputs)


def check_checkpointed(rank: int, world: int) -> None:
    model = FusedRingDDP(linear(), broadcast_buffers=False)
    x = filled(rank).requires_grad_()
    with model.no_sync():
        loss = checkpoint(model, x, use_reentrant=False).sum()
    loss.backward()  # the forward decided
    assert (model.module.weight.grad == rank + 1).all()
    model.zero_grad()
    loss = checkpoint(model, x, use_reentrant=False).sum()
    with model.no_sync():
        loss.backward()
    assert (model.module.weight.grad == 1.5).all()
    for reentrant in (True, False):
        model.zero_grad()
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        assert (model.module.weight.grad == 1.5).all()
    # A recomputation that stops early is no failed forward.
    for _ in range(2):
        model.zero_grad()
        checkpoint(lambda t: model(t).tanh() if rank == 0 else model(t) * 2, x, use_reentrant=False).sum().backward()
    # A wrapper in a checkpoint before one that leaves a parameter unused on one rank.
    for reentrant in (False, None):
        torch.manual_seed(0)
        a, b = FusedRingDDP(linear()), FusedRingDDP(nn.ModuleList([linear(), linear()]), find_unused_parameters=True)
        b.module.forward = lambda t, b=b: b.module[0](t) + (b.module[1](t) if rank == 0 else 0)
        for _ in range(2):
            inner = a(x) if reentrant is None else checkpoint(a, x, use_reentrant=False)
            b(inner).sum().backward()


def test_checkpointing_around_and_before_wrappers():
    run_ranks(2, check_checkpointed)


def check_reopened(rank: int, world: int) -> None:
    model = FusedRingDDP(nn.Sequential(linear(), linear(), linear()), find_unused_parameters=True)
    model(filled(rank)).sum().backward()
    fusedring.close()
    model.module[0].requires_grad_(False)
    model.zero_grad()
    model(filled(rank)).sum().backward()
    assert (model.module[2].bias.grad == 1).all()
    assert model.module[0].weight.grad is None
    loss = model(filled(rank)).sum()
    fusedring.close()
    with pytest.raises(fusedring.FusedRingError, match="closed between the forward and the backward"):
        loss.backward()
    model.zero_grad()
    model(filled(rank)).sum().backward()
    assert (model.module[2].bias.grad == 1).all()


def test_reopening_after_freezing_and_closing_between_forward_and_backward():
    run_ranks(2, check_reopened)


def check_frozen_critic(rank: int, world: int) -> None:
    generator, critic = FusedRingDDP(linear()), FusedRingDDP(linear())
    for _ in range(3):
        critic.module.requires_grad_(True)
        critic.zero_grad()
        (critic(filled(rank)).sum() - critic(generator(filled(rank)).detach()).sum()).backward()
        critic.module.requires_grad_(False)
        generator.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            critic(generator(filled(rank))).sum().backward()
        weight = critic.module.weight.sum(0)
        torch.testing.assert_close(generator.module.weight.grad, 1.5 * weight[:, None].expand(4, 4))
    target = copy.deepcopy(critic)
    target.module.requires_grad_(False)
    x = filled(rank).requires_grad_()
    target(x).sum().backward()


def test_a_frozen_critic_and_a_frozen_copy_take_no_part():
    run_ranks(2, check_frozen_critic)


def check_second_backwards(rank: int, world: int) -> None:
    def make() -> FusedRingDDP:
        model = FusedRingDDP(nn.ModuleList([linear(), linear()]), find_unused_parameters=True)
        model.module.forward = lambda t: model.module[0](t) + (model.module[1](t) if rank == 0 else 0)
        return model

    a, b = make(), make()
    for _ in range(2):
        losses = [(a(filled(rank)) * b(filled(rank))).sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
    loss = (a(filled(rank)) * b(filled(rank))).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def test_second_backwards_of_several_wrappers_keep_their_order():
    run_ranks(2, check_second_backwards)


def check_teacher(rank: int, world: int) -> list[bool]:
    """Whether the student's first launch began before its backward ended, step by step."""
    layers = [nn.Linear(400, 400) for _ in range(8)]
    student, teacher = FusedRingDDP(nn.Sequential(*layers), bucket_cap_mb=0.5), FusedRingDDP(linear(400))
    early = []
    for _ in range(6):
        x = torch.randn(256, 400)
        (student(x) - teacher(x).detach()).square().mean().backward()
        report = student.report()
        early.append(report.launches[0].start < report.backward_end)
        student.zero_grad()
    return early


def test_a_teacher_that_is_never_trained_costs_no_overlap():
    for early in run_ranks(2, check_teacher):
        assert not early[0]
        assert any(early[1:])


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        return sum(part(x).sum() for part in list(self.parts)[:used])


def check_two_groups(rank: int, world: int) -> None:
    """Each rank visits the wrappers in its own order, which is right, since they are of two groups."""
    groups = [dist.group.WORLD, dist.new_group()]
    for compiled in (False, True):
        how = {"find_unused_parameters": True, "timeout": 20}
        models = [FusedRingDDP(TwoParts(), process_group=group, **how) for group in groups]
        called = [torch.compile(model, backend="aot_eager") if compiled else model for model in models]
        for lacking in (False, True, False):
            used = 1 if lacking and rank == 0 else 2
            for model in models:
                model.zero_grad()
            order = called if rank == 0 else called[::-1]
            sum(model(torch.ones(1, 3), used) for model in order).backward()
            for model in models:
                first, second = (part.weight.grad for part in model.module.parts)
                assert first.eq(1).all()
                assert second.eq(0.5 if lacking else 1).all()


def test_two_groups_in_one_backward():
    run_ranks(2, check_two_groups)
