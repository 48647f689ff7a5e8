"""FusedRingDDP in eager training on CPU ranks."""

from __future__ import annotations

import copy
import itertools
import time
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedring
from fusedring import FusedRingDDP, Work
from tests.ranks import run_ranks


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 12, generator=generator), torch.randn(8, 3, generator=generator)


def train_50_steps(rank: int, world: int, algorithm: str) -> None:
    model, alone = FusedRingDDP(make_model(), algorithm=algorithm, bucket_cap_mb=0.002), make_model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, alone)]
    for step in range(50):
        x, y = batch(step, rank)
        nn.functional.mse_loss(model(x), y).backward()
        joined = [batch(step, r) for r in range(world)]
        nn.functional.mse_loss(alone(torch.cat([b[0] for b in joined])), torch.cat([b[1] for b in joined])).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        everyone = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(everyone, mine.detach())
        assert all(torch.equal(one, mine) for one in everyone)
    assert all(name.startswith("module.") for name in model.state_dict())


@pytest.mark.parametrize(("world", "algorithm"), [(2, "ring"), (3, "auto")])
def test_training_matches_one_process_on_the_joined_batch(world, algorithm):
    run_ranks(world, train_50_steps, algorithm)


def check_report(rank: int, world: int) -> None:
    model = FusedRingDDP(make_model(), bucket_cap_mb=0.002)
    assert model.report() is None
    model(batch(0, rank)[0]).sum().backward()
    report = model.report()
    names = [name for bucket in report.buckets for name in bucket.parameters]
    assert sorted(names) == sorted(name for name, _ in model.module.named_parameters())
    assert [launch.bucket for launch in report.launches] == list(range(len(report.buckets)))
    assert len(report.buckets) > 1
    assert report.backward_start <= report.backward_end
    for launch in report.launches:
        assert report.backward_start <= launch.start <= launch.end
        assert launch.bytes == report.buckets[launch.bucket].bytes
    assert report.exposed_wait >= 0
    assert 0 <= report.overlap <= 1


def test_the_report_describes_the_last_backward():
    run_ranks(2, check_report)


def check_accumulation(rank: int, world: int) -> None:
    for as_view in (True, False):
        model, local = FusedRingDDP(make_model(), gradient_as_bucket_view=as_view), make_model()
        for _ in range(2):
            with model.no_sync():
                model(batch(1, rank)[0]).sum().backward()
            model(batch(2, rank)[0]).sum().backward()
            local.zero_grad()
            for r in range(world):
                for step in (1, 2):
                    (local(batch(step, r)[0]).sum() / world).backward()
            for mine, theirs in zip(model.parameters(), local.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
            model.zero_grad()


def test_no_sync_accumulates_and_the_next_backward_averages_it_all():
    run_ranks(2, check_accumulation)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.nobody = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, left):
        return (self.left if left else self.right)(x)


def check_unused(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    model = FusedRingDDP(Branches())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model(torch.ones(2, 4), rank == 0).sum().backward()
    assert (model.module.left.bias.grad == 2 / world).all()
    assert model.module.nobody.weight.grad is None
    texts = [str(w.message) for w in seen if "nobody.weight" in str(w.message)]
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        model(torch.ones(2, 4), True)
    quiet = FusedRingDDP(Branches(), find_unused_parameters=True)
    for _ in range(2):
        quiet(torch.ones(2, 4), rank == 0).sum().backward()
        quiet.zero_grad()
    return texts


def test_unused_parameters_are_named_alike_on_every_rank():
    texts = run_ranks(2, check_unused)
    assert len(texts[0]) == 1
    assert texts[0] == texts[1]


class Assorted(nn.Module):
    """Parameters of which each forward uses those that it is told, each with a gradient of `factor`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name in ("always", "alone", "nobody", "earlier"):  # the first ones are in the last bucket
            setattr(self, name, nn.Parameter(torch.zeros(5, dtype=dtype)))
        self.complex = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, names: list[str], factor: float) -> torch.Tensor:
        return factor * sum(getattr(self, name).real.sum().double() for name in names)


def check_missing_gradients(rank: int, world: int) -> None:
    """A gradient is the world size on the ranks that have one, so that every mean is a small whole number."""
    everything = [name for name, _ in Assorted(torch.float32).named_parameters()]
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    algorithms = itertools.cycle(("auto", "ring", "master"))
    for dtype, wire, cap in itertools.product(dtypes, (None, "fp16", "bf16"), (None, 1e-5)):
        model = FusedRingDDP(Assorted(dtype), wire_dtype=wire, algorithm=next(algorithms), bucket_cap_mb=cap)
        skip_a_step_and_go_on(model, rank, world, everything)
    copied = copy.deepcopy(model)
    skip_a_step_and_go_on(copied, rank, world, everything)
    fusedring.close()
    skip_a_step_and_go_on(copied, rank, world, everything)


def skip_a_step_and_go_on(model: FusedRingDDP, rank: int, world: int, everything: list[str]) -> None:
    parameters = dict(model.module.named_parameters())

    def step(names: list[str]) -> list[str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model(names, world).backward()
        return [str(w.message) for w in seen]

    model.zero_grad()
    with model.no_sync():
        step(["earlier"] if rank == world - 1 else ["always"])
    (text,) = step(["always", "alone", "nothing"] if rank == 0 else ["always", "complex"])
    missing = [name for bucket in model.report().buckets for name in bucket.parameters if name != "always"]
    assert f"no gradient on some rank for {', '.join(missing)}: it counted" in text
    assert {name for name, p in parameters.items() if p.grad is None} == {"nobody"}
    means = {"always": 2 * world - 1, "alone": 1, "earlier": 1, "complex": world - 1, "nothing": 0}
    for name, mean in means.items():
        assert (parameters[name].grad == mean).all(), name
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        step(everything)
    for _ in range(2):  # the first one clears what the last step left
        model.zero_grad()
        assert step(everything) == []
        assert all((p.grad == world).all() for p in parameters.values())
    (text,) = step(["always"] if rank == 0 else everything)  # the gradients of the last step count where none came
    assert "no gradient on some rank for" in text
    for name, parameter in parameters.items():
        assert (parameter.grad == (2 * world if name == "always" else 2 * world - 1)).all(), name
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        step(everything)


@pytest.mark.parametrize("world", [2, 3])
def test_missing_gradients_are_counted_in_every_dtype_and_over_every_wire(world):
    run_ranks(world, check_missing_gradients)


def check_failed_step_with_flags(rank: int, world: int) -> None:
    model = FusedRingDDP(Branches(), timeout=20)
    if rank == 0:
        with pytest.raises(fusedring.MismatchError):
            model(torch.ones(2, 4), True).sum().backward()
    else:
        handle = model.module.left.weight.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 4), True).sum().backward()
        handle.remove()
        with pytest.raises(fusedring.MismatchError):
            model(torch.ones(2, 4), True).sum().backward()
    model.module.forward = lambda x: model.module.left(x) + model.module.right(x) + model.module.nobody(x)
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, 4)).sum().backward()
    assert all((p.grad == 2).all() for p in model.parameters())


def test_flags_of_a_step_that_failed_are_not_counted_in_the_next():
    run_ranks(2, check_failed_step_with_flags)


def check_one_error_each(rank: int, world: int) -> list[str]:
    """Many buckets: what one mismatch costs each rank, until training goes on."""
    model = FusedRingDDP(make_model(), timeout=20, bucket_cap_mb=1e-5)
    seen = []
    for attempt in range(5 + rank):  # rank 1 needs one more, since it loses a step
        handle = None
        if attempt == 1 and rank == 1:
            handle = model.module[2].weight.register_hook(lambda g: 1 / 0)
        try:
            loss = model(torch.full((1, 12), float(rank))).sum()
            model.zero_grad()
            loss.backward()
        except (fusedring.MismatchError, ZeroDivisionError) as error:
            seen.append(type(error).__name__)
        else:
            seen.append("ok")
            assert (model.module[4].bias.grad == 1).all()
        if handle is not None:
            handle.remove()
    return seen


def test_a_lost_step_costs_one_mismatch_on_each_rank():
    assert run_ranks(2, check_one_error_each) == [
        ["ok", "MismatchError", "ok", "ok", "ok"],
        ["ok", "ZeroDivisionError", "MismatchError", "ok", "ok", "ok"],
    ]


def check_recovery(rank: int, world: int) -> None:
    model = FusedRingDDP(make_model(), timeout=20)
    loss = model(batch(0, rank)[0]).sum()
    if rank == 1:
        handle = model.module[2].weight.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
    else:
        with pytest.raises(fusedring.MismatchError):
            loss.backward()
    if rank == 1:
        with pytest.raises(fusedring.MismatchError):
            model(batch(1, rank)[0]).sum().backward()
    model.zero_grad()
    model(torch.full((1, 12), float(rank))).sum().backward()
    assert (model.module[4].bias.grad == 1).all()


def check_failed_forward(rank: int, world: int) -> None:
    model = FusedRingDDP(make_model(), timeout=20)
    if rank == 1:
        with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(1, 5))
    model(batch(0, rank)[0]).sum().backward()  # an evaluation that failed on one rank is no lost step
    if rank == 1:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(1, 5))
    with pytest.raises(fusedring.MismatchError):
        model(batch(1, rank)[0]).sum().backward()
    model.zero_grad()
    model(torch.full((1, 12), float(rank))).sum().backward()
    assert (model.module[4].bias.grad == 1).all()


def test_a_forward_that_failed_on_one_rank_is_a_lost_step():
    run_ranks(2, check_failed_forward)


def test_a_rank_that_lost_a_step_is_found_and_training_goes_on():
    run_ranks(2, check_recovery)


def check_module_errors(rank: int, world: int) -> str:
    with pytest.raises(RuntimeError, match="not needed when a module doesn't have any parameters"):
        FusedRingDDP(nn.ReLU())
    with pytest.raises(RuntimeError, match="uninitialized parameters"):
        FusedRingDDP(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"0\.weight has sparse gradients"):
        FusedRingDDP(nn.Sequential(nn.Embedding(3, 3, sparse=True)))
    with pytest.raises(ValueError, match="device_ids"):
        FusedRingDDP(nn.Linear(2, 2), device_ids=[0])
    with pytest.raises(fusedring.MismatchError) as raised:
        FusedRingDDP(nn.Sequential(nn.Linear(2, 2 + rank)))
    return str(raised.value)


def test_modules_that_cannot_be_wrapped():
    texts = run_ranks(2, check_module_errors)
    assert texts[0] == texts[1]
    assert "0.weight" in texts[0]


def check_odd_modules(rank: int, world: int) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar, self.nothing = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))
            self.wide, self.narrow = nn.Linear(4, 4).double(), nn.Linear(4, 4).bfloat16()
            self.convolution = nn.Conv2d(2, 4, 1).to(memory_format=torch.channels_last)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x):
            image = self.norm(self.convolution(x.view(-1, 2, 2, 1))).mean() * self.scalar + self.nothing.sum()
            return image + self.wide(x.double()).sum() + self.narrow(x.bfloat16()).sum()

    model = FusedRingDDP(Odd())
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))
    local = copy.deepcopy(model.module)
    local(x).backward()
    (model(x) + model(x)).backward()
    for (name, mine), theirs in zip(model.module.named_parameters(), local.parameters(), strict=True):
        assert mine.grad.dtype == mine.dtype
        assert mine.grad.shape == mine.shape
        assert mine.grad.numel() == 0 or mine.grad.stride() == mine.stride(), name
        want = theirs.grad.double() * 2
        dist.all_reduce(want)
        torch.testing.assert_close(mine.grad.double(), want / world, rtol=2e-2, atol=2e-2)
    copied = copy.deepcopy(model)
    copied.zero_grad()
    copied(x).backward()
    assert copied.report() is not None


def test_dtypes_shapes_strides_buffers_and_copies():
    run_ranks(2, check_odd_modules)


class Pair(nn.Module):
    """Two wrapped layers of one layout, used in the order that each rank is told."""

    def __init__(self, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (FusedRingDDP(nn.Linear(4, 4), **options) for _ in range(2))


def check_two_wrappers(rank: int, world: int) -> None:
    x = torch.full((1, 4), float(rank + 1))
    pair = Pair(bucket_cap_mb=1e-5)
    for _ in range(3):
        first, second = pair.first(x).sum(), 10 * pair.second(x).sum()
        # Autograd starts with the operand that was made last, so the ranks' gradients come in different orders.
        (first * 1 + second * 1 if rank == 0 else second.clone() + first.clone().clone()).backward()
        assert (pair.first.module.weight.grad == 1.5).all()
        assert (pair.second.module.weight.grad == 15).all()
        pair.zero_grad()
    loose = Pair(find_unused_parameters=True)
    out = loose.first(x).sum() + 10 * loose.second(x).sum() * (1 if rank == 0 else 0)
    out.backward()
    assert (loose.first.module.weight.grad == 1.5).all()
    assert (loose.second.module.weight.grad == 5).all()
    # One after the other, later forward first or last.
    for order in (("first", "second"), ("second", "first")):
        loose.zero_grad()
        losses = {name: getattr(loose, name)(x).sum() for name in ("first", "second")}
        for name in order:
            losses[name].backward()
            assert (getattr(loose, name).module.weight.grad == 1.5).all()


def test_wrappers_that_share_a_backward_do_not_mix_their_gradients():
    run_ranks(2, check_two_wrappers)


def check_wrong_wrapper(rank: int, world: int) -> str:
    pair = Pair(timeout=20)
    name = ("first", "second")[rank]
    with pytest.raises(fusedring.MismatchError) as raised:
        getattr(pair, name)(torch.ones(1, 4)).sum().backward()
    return str(raised.value)


def test_ranks_that_train_different_wrappers_are_told():
    texts = run_ranks(2, check_wrong_wrapper)
    assert texts[0] == texts[1]
    assert "of wrapper 0" in texts[0]
    assert "of wrapper 1" in texts[0]


def check_interrupt(rank: int, world: int) -> None:
    model = FusedRingDDP(make_model())
    x = torch.full((1, 12), float(rank + 1))
    if rank == 0:
        real = Work.wait
        calls = []

        def interrupted(self, timeout=None):
            calls.append(self)
            if len(calls) == 1:
                raise KeyboardInterrupt
            return real(self, timeout)

        Work.wait = interrupted
        with pytest.raises(KeyboardInterrupt):
            model(x).sum().backward()
        Work.wait = real
    else:
        time.sleep(1)  # rank 0 is interrupted while its launches wait for this rank
        model(x).sum().backward()
    model.zero_grad(set_to_none=False)
    model(x).sum().backward()
    assert (model.module[4].bias.grad == 1).all()
    alone = make_model()
    for r in range(world):
        (alone(torch.full((1, 12), float(r + 1))).sum() / world).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_an_interrupt_while_backward_waits_spoils_no_later_step():
    run_ranks(2, check_interrupt)


def check_second_backward(rank: int, world: int) -> None:
    model = FusedRingDDP(make_model())
    loss = model(torch.full((1, 12), float(rank + 1))).sum()
    handle = model.module[2].weight.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    handle.remove()
    model.zero_grad()
    loss.backward(retain_graph=True)
    averaged = [p.grad.clone() for p in model.parameters()]
    everyone = [None] * world
    dist.all_gather_object(everyone, averaged)
    assert all(torch.equal(a, b) for a, b in zip(*everyone, strict=True))
    model.zero_grad()
    loss.backward()  # and once more, through the same graph
    assert all(torch.equal(p.grad, a) for p, a in zip(model.parameters(), averaged, strict=True))


def test_another_backward_through_the_same_graph_is_averaged():
    run_ranks(2, check_second_backward)


def check_bypass(rank: int, world: int) -> None:
    module = make_model()
    model = FusedRingDDP(module, timeout=20)
    x = torch.full((1, 12), float(rank))
    model(x).sum().backward()
    model.zero_grad()
    if rank == 0:
        for expected in (1, 0):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                module(x).sum().backward()
            assert sum("without calling the FusedRingDDP" in str(w.message) for w in seen) == expected
    module.zero_grad()
    gone, old = weakref.ref(model), model
    model = FusedRingDDP(module)
    del old
    assert gone() is None, "something keeps a dropped wrapper alive"
    for _ in range(2):
        model(x).sum().backward()
        assert (module[4].bias.grad == 1).all()
        model.zero_grad()
    del model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if rank == 0:
            module(x).sum().backward()


def test_only_backwards_of_the_wrapper_are_averaged_and_a_dropped_wrapper_is_gone():
    run_ranks(2, check_bypass)


def check_deferred_error(rank: int, world: int) -> None:
    model = FusedRingDDP(Branches())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.ones(2, 4), True).sum().backward()
    with torch.no_grad():
        model(torch.ones(2, 4), True)
    with model.no_sync():
        model(torch.ones(2, 4), True)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        model(torch.ones(2, 4), True)


def test_the_error_about_unused_parameters_waits_for_a_synced_forward():
    run_ranks(2, check_deferred_error)


def check_rank_without_any(rank: int, world: int) -> None:
    class Maybe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, used):
            return self.layer(x) if used else x * 2

    model = FusedRingDDP(Maybe(), find_unused_parameters=True, timeout=20)
    x = torch.ones(1, 4, requires_grad=True)
    for _ in range(2):
        model(x, rank == 0).sum().backward()
        assert (model.module.layer.bias.grad == 1 / world).all()
        model.zero_grad()
    # autograd.grad through the output begins no step.
    torch.autograd.grad(model(x, True).sum(), x)
    model(x, True).sum().backward()
    assert (model.module.layer.bias.grad == 1).all()


def test_a_rank_may_use_no_parameter_at_all():
    run_ranks(2, check_rank_without_any)


def check_option_agreement(rank: int, world: int) -> list[str]:
    texts = []

    class Buffered(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("statistics", torch.zeros(size))

    for make in (
        lambda: FusedRingDDP(nn.Linear(2, 2), forward_sync_buffers=rank == 0),
        lambda: FusedRingDDP(nn.Linear(2, 2), init_sync=rank == 0),
        lambda: FusedRingDDP(Buffered(2 + rank)),
    ):
        with pytest.raises(fusedring.MismatchError) as raised:
            make()
        texts.append(str(raised.value))
    return texts


def test_buffers_and_options_are_compared_too():
    texts = run_ranks(2, check_option_agreement)
    assert texts[0] == texts[1]
    assert ["forward_sync_buffers" in texts[0][0], "init_sync" in texts[0][1], "statistics" in texts[0][2]] == [
        True
    ] * 3


def check_late_wrap(rank: int, world: int) -> None:
    fusedring.all_reduce(torch.ones(3))
    dist.barrier()
    if rank == 1:
        time.sleep(3)
    with pytest.raises(fusedring.FusedRingError) as raised:
        FusedRingDDP(nn.Linear(2, 2), timeout=1)
    if rank == 0:
        assert "rank(s) 1" in str(raised.value)
    dist.barrier()
    fusedring.close()
    FusedRingDDP(nn.Linear(2, 2), timeout=20)


def test_a_rank_that_wraps_too_late_is_told_and_close_starts_anew():
    run_ranks(2, check_late_wrap)


def check_changed_modules(rank: int, world: int) -> None:
    """Parameters frozen, unfrozen, replaced, added and removed after wrapping, on all ranks: averaged all the same."""

    def check(model: FusedRingDDP, module: nn.Module, seed: int) -> None:
        x = [torch.randn(3, 8, generator=torch.Generator().manual_seed(100 * seed + r)) for r in range(world)]
        model.zero_grad()
        model(x[rank]).square().sum().backward()
        got = {name: p.grad.clone() for name, p in module.named_parameters() if p.requires_grad}
        for name, parameter in module.named_parameters():
            assert (parameter.grad is not None) is parameter.requires_grad, name
        wanted: dict[str, torch.Tensor] = {}
        for each in x:
            trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
            grads = torch.autograd.grad(module(each).square().sum(), list(trainable.values()))
            for name, grad in zip(trainable, grads, strict=True):
                wanted[name] = wanted.get(name, 0) + grad / world
        for name, grad in wanted.items():
            torch.testing.assert_close(got[name], grad)

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    module[2].weight.requires_grad_(False)
    model = FusedRingDDP(module)
    check(model, module, 0)
    module[2].weight.requires_grad_(True)
    check(model, module, 1)
    module[0].weight = nn.Parameter(module[0].weight.detach() * 2)
    check(model, module, 2)
    torch.manual_seed(1)
    module.append(nn.Linear(8, 4))
    check(model, module, 3)
    del module[3]
    module[0].bias.requires_grad_(False)
    check(model, module, 4)
    model.double()
    y = torch.ones(2, 8, dtype=torch.float64) * (rank + 1)
    model.zero_grad()
    model(y).square().sum().backward()
    weights = [torch.empty_like(module[0].weight) for _ in range(world)]
    dist.all_gather(weights, module[0].weight.grad)
    assert torch.equal(weights[0], weights[-1])
    assert weights[0].dtype == torch.float64
    model.float()
    module.requires_grad_(False)  # as the half of a GAN that is not trained now
    assert model(torch.ones(1, 8).requires_grad_()).requires_grad
    module.requires_grad_(True)
    check(model, module, 5)
    # What was accumulated before the change is not lost.
    module[2].weight.requires_grad_(False)
    model.zero_grad()
    with model.no_sync():
        model(torch.ones(1, 8)).sum().backward()
    module[2].weight.requires_grad_(True)
    accumulated = module[0].weight.grad.clone()
    model(torch.zeros(1, 8)).sum().mul(0).backward()
    torch.testing.assert_close(module[0].weight.grad, accumulated)
    # On one rank only.
    if rank == 0:
        module[2].bias.requires_grad_(False)
    with pytest.raises(fusedring.MismatchError, match="wrapper 0 has changed, now 3 trainable parameters") as raised:
        model(torch.ones(1, 8)).sum().backward()
    assert "nothing was written" in str(raised.value)
    module[2].bias.requires_grad_(False)
    module.zero_grad()
    check(model, module, 6)


@pytest.mark.parametrize("world", [2, 3])
def test_modules_that_change_after_wrapping(world):
    run_ranks(world, check_changed_modules)


def check_nested_no_sync(rank: int, world: int) -> None:
    torch.manual_seed(0)
    inner = FusedRingDDP(nn.Linear(4, 4))
    outer = FusedRingDDP(nn.Sequential(nn.Linear(4, 4), inner), find_unused_parameters=True)
    x = torch.full((1, 4), float(rank + 1))
    with outer.no_sync():
        outer(x).sum().backward()
        assert not inner.require_backward_grad_sync
    assert inner.require_backward_grad_sync
    local = inner.module.weight.grad.clone()
    everyone = [torch.empty_like(local) for _ in range(world)]
    dist.all_gather(everyone, local)
    assert not torch.equal(everyone[0], everyone[1])


def test_no_sync_reaches_wrappers_inside():
    run_ranks(2, check_nested_no_sync)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise ZeroDivisionError
        return gradient, None


def check_zeroed_after_failure(rank: int, world: int) -> None:
    """A launch of the backward that failed must not write into gradients that were set to zero since."""
    torch.manual_seed(0)
    module = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    module.forward = lambda x, fails=False: module[1](_Fails.apply(module[0](x), fails))
    model = FusedRingDDP(module, bucket_cap_mb=0.001, algorithm="ring")
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))
    model(x).sum().backward()
    want = [p.grad.clone() for p in model.parameters()]
    for late in range(world):
        model.zero_grad(set_to_none=False)
        if rank == late:
            time.sleep(0.4)
        with pytest.raises(ZeroDivisionError):
            model(x, fails=True).sum().backward()
        model.zero_grad(set_to_none=False)
        time.sleep(0.4 * (rank != late))
        assert all((p.grad == 0).all() for p in model.parameters())
        model(x).sum().backward()
        assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), want, strict=True))


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_set_to_zero_after_a_failed_backward(world):
    run_ranks(world, check_zeroed_after_failure)


class Backwards(nn.Module):
    """Layers registered in the order in which they are not used; rank 1 uses them the other way round."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(4)])
        self.turned = turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers if self.turned else reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def check_order(rank: int, world: int) -> None:
    module = Backwards(turned=rank == 1)
    model = FusedRingDDP(module, bucket_cap_mb=0.0002)

    def names() -> list[str]:
        return [name for bucket in model.report().buckets for name in bucket.parameters]

    def step(seed: int) -> None:
        grads = []
        for r in range(world):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * seed + r))
            module.turned = r == 1
            grads.append(torch.autograd.grad(module(x).sum(), list(module.parameters())))
            if r == rank:
                mine = x
        module.turned = rank == 1
        before = [0 if p.grad is None else p.grad.clone() for p in module.parameters()]
        model(mine).sum().backward()
        for p, old, *each in zip(module.parameters(), before, *grads, strict=True):
            torch.testing.assert_close(p.grad, old + sum(each) / world)

    step(0)
    assert names() == [f"layers.{i}.weight" for i in (3, 2, 1, 0)]
    step(1)  # what was accumulated before the buckets are made anew is kept
    assert names() == [f"layers.{i}.weight" for i in (0, 1, 2, 3)]  # as rank 0 has seen it, on all ranks
    step(2)
    assert names() == [f"layers.{i}.weight" for i in (0, 1, 2, 3)]
    other = FusedRingDDP(Backwards(turned=False))  # one bucket: nothing to learn
    for _ in range(3):
        other(torch.ones(1, 8)).sum().backward()


@pytest.mark.parametrize("world", [2, 3])
def test_buckets_follow_the_order_of_gradients(world):
    run_ranks(world, check_order)
