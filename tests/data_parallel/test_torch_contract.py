"""What torch's DistributedDataParallel promises beside averaging: uneven inputs, hooks, buffers, options, methods."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fusedring
from fusedring import FusedRingDDP
from tests.ranks import run_ranks


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def inputs(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def local_gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def assert_close(ones: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other)


def check_join(rank: int, world: int, divide_by_initial: bool) -> None:
    """Rank r has r + 2 inputs; the others' gradients are zero once they have none."""
    wrapped = nn.Sequential(make_model(), nn.BatchNorm1d(4, track_running_stats=True))
    model = FusedRingDDP(wrapped)
    with model.join(divide_by_initial_world_size=divide_by_initial):
        for step in range(rank + 2):
            model.zero_grad()
            accumulates = step == 0
            with model.no_sync() if accumulates else _nothing():
                model(inputs(rank, step)).square().sum().backward()
            if accumulates:
                continue
            training = [r for r in range(world) if step < r + 2]
            got = [p.grad[0].clone().view(-1)[0] for p in model.parameters()]
            want = [torch.zeros(()) for _ in got]
            for r in training:
                reference = copy.deepcopy(wrapped)
                reference.zero_grad()
                reference(inputs(r, step)).square().sum().backward()
                divisor = world if divide_by_initial else len(training)
                want = [w + p.grad[0].view(-1)[0] / divisor for w, p in zip(want, reference.parameters(), strict=True)]
            for g, w in zip(got, want, strict=True):
                torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
    states = [None] * world
    dist.all_gather_object(states, {k: v.tolist() for k, v in wrapped.state_dict().items()})
    assert all(state == states[0] for state in states)  # all have the model of the last one


class _nothing:  # noqa: N801
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("divide_by_initial", [True, False])
def test_uneven_inputs(divide_by_initial):
    run_ranks(3, check_join, divide_by_initial)


def check_early_termination(rank: int, world: int) -> None:
    model = FusedRingDDP(make_model())

    def train() -> None:
        with model.join(throw_on_early_termination=True):
            for step in range(rank + 1):
                model(inputs(rank, step)).sum().backward()

    with pytest.raises(RuntimeError, match="exhausted"):
        train()
    with model.join(enable=False):
        model(inputs(rank)).sum().backward()


def test_uneven_inputs_may_be_an_error():
    run_ranks(2, check_early_termination)


def check_comm_hooks(rank: int, world: int) -> None:
    everyone = [local_gradients(make_model(), inputs(r)) for r in range(world)]
    mean = [sum(grads) / world for grads in zip(*everyone, strict=True)]
    for hook, state, tolerance in (
        (default_hooks.allreduce_hook, None, 0.0),
        (default_hooks.fp16_compress_hook, None, 1e-2),
        (powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10), 0.0),
    ):
        for cap in (25, 0.0001):
            for view in (True, False):
                model = FusedRingDDP(make_model(), bucket_cap_mb=cap, gradient_as_bucket_view=view)
                model.register_comm_hook(state, hook)
                for _ in range(2):
                    model.zero_grad()
                    model(inputs(rank)).square().sum().backward()
                    for got, want in zip(gradients(model), mean, strict=True):
                        torch.testing.assert_close(got, want, rtol=max(tolerance, 1.3e-6), atol=max(tolerance, 1e-5))
                assert model._get_ddp_logging_data()["comm_hook"] == hook.__qualname__
                with pytest.raises(RuntimeError, match="only be called once"):
                    model.register_comm_hook(state, hook)
    # What a hook is shown, and what it gives, is what there is.
    seen = []

    def doubles(state, bucket):  # torch checks annotations, and would see strings here
        state.append(bucket.index())
        seen.append((bucket.is_last(), len(bucket.parameters()), [g.shape for g in bucket.gradients()]))
        assert all(g.data_ptr() >= bucket.buffer().data_ptr() for g in bucket.gradients())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future

    order: list[int] = []
    model = FusedRingDDP(make_model(), bucket_cap_mb=0.0001)
    model.register_comm_hook(order, doubles)
    model(inputs(rank)).square().sum().backward()
    assert_close(gradients(model), [2 * g for g in everyone[rank]])
    assert order == list(range(len(order)))
    assert [last for last, *_ in seen] == [False] * (len(order) - 1) + [True]
    # A parameter without a gradient on one rank is found all the same.
    branches = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    branches.forward = lambda x: branches[1](branches[0](x)) if rank == 0 else branches[0](x)
    model = FusedRingDDP(branches, find_unused_parameters=True)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    model(torch.ones(1, 4)).sum().backward()
    assert branches[1].weight.grad is not None

    def fails(state, bucket):
        raise ZeroDivisionError

    model = FusedRingDDP(make_model())
    model.register_comm_hook(None, fails)
    with pytest.raises(ZeroDivisionError):
        model(inputs(rank)).sum().backward()
    with pytest.raises(TypeError, match="callable"):
        FusedRingDDP(make_model()).register_comm_hook(None, 3)

    def misannotated(state: None, bucket: int) -> None: ...

    with pytest.raises(ValueError, match="annotation"):
        FusedRingDDP(make_model()).register_comm_hook(None, misannotated)


def test_comm_hooks():
    run_ranks(2, check_comm_hooks)


def check_buffers(rank: int, world: int) -> None:
    def with_buffer(**how: object) -> tuple[FusedRingDDP, nn.Module]:
        module = nn.Linear(2, 2)
        module.register_buffer("seen", torch.full((3,), float(rank)))
        return FusedRingDDP(module, **how), module

    model, module = with_buffer()
    assert module.seen.eq(0).all()  # rank 0's, at the start ...
    module.seen.fill_(rank)
    model(torch.ones(1, 2))
    assert module.seen.eq(0).all()  # ... and before each forward
    module.seen.fill_(rank)
    with model.no_sync():
        model(torch.ones(1, 2))
    assert module.seen.eq(rank).all()
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert module.seen.eq(rank).all()
    model, module = with_buffer(forward_sync_buffers=False)
    assert module.seen.eq(0).all()
    module.seen.fill_(rank)
    model(torch.ones(1, 2))
    assert module.seen.eq(rank).all()
    with pytest.warns(FutureWarning, match="broadcast_buffers"):
        model, module = with_buffer(broadcast_buffers=False)
    assert module.seen.eq(rank).all()
    assert model.broadcast_buffers is model.forward_sync_buffers is False

    def average(state: str, buffers: dict[str, torch.Tensor]) -> list[torch.futures.Future[torch.Tensor]]:
        assert state == "state"
        assert list(buffers) == ["seen"]
        return [dist.all_reduce(buffers["seen"], async_op=True).get_future()]

    model, module = with_buffer()
    model._register_buffer_comm_hook("state", average)
    module.seen.fill_(rank + 1.0)
    model(torch.ones(1, 2)).sum().backward()
    assert module.seen.eq(sum(range(1, world + 1))).all()


def test_buffers():
    run_ranks(2, check_buffers)


def check_options(rank: int, world: int) -> None:
    assert issubclass(FusedRingDDP, DistributedDataParallel)
    model = FusedRingDDP(make_model(), device_mesh=init_device_mesh("cpu", (world,)))
    assert model.device_mesh.ndim == 1
    model(inputs(rank)).square().sum().backward()
    everyone = [local_gradients(make_model(), inputs(r)) for r in range(world)]
    mean = [sum(grads) / world for grads in zip(*everyone, strict=True)]
    assert_close(gradients(model), mean)
    with pytest.raises(RuntimeError, match="both process_group and device_mesh"):
        FusedRingDDP(make_model(), process_group=dist.group.WORLD, device_mesh=model.device_mesh)
    with pytest.raises(ValueError, match=r"wire_dtype.*ranks"):
        FusedRingDDP(make_model(), mixed_precision=object())
    with pytest.raises(ValueError, match="at the same time"):
        FusedRingDDP(make_model(), param_to_hook_all_reduce=nn.Parameter(torch.ones(1)))
    with pytest.warns(FutureWarning, match="check_reduction"):
        FusedRingDDP(make_model(), check_reduction=True)
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        FusedRingDDP(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
    module = make_model()
    model = FusedRingDDP(
        module,
        delay_all_reduce_named_params=[("0.weight", module[0].weight)],
        param_to_hook_all_reduce=module[2].weight,
        static_graph=True,
        skip_all_reduce_unused_params=True,
        batched_grad_copy=True,
    )
    model(inputs(rank)).square().sum().backward()
    assert_close(gradients(model), mean)
    for caps, buckets in (([0.0001, 0.0001, 25], 2), ([25], 1)):
        model = FusedRingDDP(make_model(), bucket_cap_mb_list=caps)
        model(inputs(rank)).square().sum().backward()
        assert len(model.report().buckets) == buckets
        assert model.bucket_bytes_cap_list == [int(cap * (1 << 20)) for cap in caps]
    for wrong in ({"bucket_cap_mb": 0}, {"bucket_cap_mb_list": [1, -1]}):
        with pytest.raises(ValueError, match="must be positive"):
            FusedRingDDP(make_model(), **wrong)
    # Parameters that are to be ignored stay this rank's own.
    module = make_model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
    module[0].weight.data.fill_(rank + 1.0)
    model = FusedRingDDP(module)
    assert module[0].weight.eq(rank + 1.0).all()
    model(inputs(rank)).square().sum().backward()
    weights = [torch.empty_like(module[0].weight) for _ in range(world)]
    dist.all_gather(weights, module[0].weight.grad)
    assert not torch.equal(weights[0], weights[1])
    dist.all_gather(weights := [torch.empty_like(module[2].weight) for _ in range(world)], module[2].weight.grad)
    assert torch.equal(weights[0], weights[1])


def test_options():
    run_ranks(2, check_options)


def check_methods(rank: int, world: int) -> None:
    model = FusedRingDDP(make_model(), find_unused_parameters=True)
    model(inputs(rank)).square().sum().backward()
    data = model._get_ddp_logging_data()
    assert data["world_size"] == world
    assert data["rank"] == rank
    assert data["module_name"] == "Sequential"
    assert data["num_parameter_tensors"] == 4
    assert data["total_parameter_size_bytes"] == sum(p.nbytes for p in model.parameters())
    assert data["iteration"] == 1
    assert "comm_hook" not in data
    model._check_reducer_finalized()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.zero_grad()
        other(inputs(rank)).square().sum().backward()
        assert_close(gradients(other), gradients(model))
    alone = [dist.new_group([r]) for r in range(world)][rank]
    model._update_process_group(alone)
    model.zero_grad()
    model(inputs(rank)).square().sum().backward()
    assert_close(gradients(model), local_gradients(make_model(), inputs(rank)))
    model._remove_autograd_hooks()
    model.zero_grad()
    model(inputs(rank)).square().sum().backward()
    for refused in (model._register_fused_optim, model._set_sparse_metadata):
        with pytest.raises(RuntimeError):
            refused(torch.optim.SGD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model._set_static_graph()
    with pytest.warns(UserWarning, match="no need to set it again"):
        model._set_static_graph()
    with pytest.raises(ValueError, match="sample rate"):
        model._set_ddp_runtime_logging_sample_rate(0)
    fusedring.close()


def test_methods():
    run_ranks(2, check_methods)


@pytest.mark.parametrize(("value", "given"), [(None, "NoneType"), (torch.ones(1), "1 elements")])
def test_what_a_comm_hook_gives_must_fit_the_bucket(value, given):
    def hook(state, bucket):
        future = torch.futures.Future()
        future.set_result(value)
        return future

    model = FusedRingDDP(nn.Linear(4, 4))
    model.register_comm_hook(None, hook)
    with pytest.raises(ValueError, match=f"a tensor of .* elements, and it gave {given}"):
        model(torch.ones(1, 4)).sum().backward()
