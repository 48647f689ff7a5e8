"""Libraries that ask for torch's DistributedDataParallel with isinstance, given a FusedRingDDP.

accelerate and lightning are optional (`pip install -e '.[ecosystem]'`). What is wanted is computed on every rank with
plain modules: the same operations on the same values, one thread. On two ranks the mean is one sum, halved. So results
are equal to the bit, where no other tolerance is given.
"""

from __future__ import annotations

import copy
import importlib.util
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from fusedring import FusedRingDDP
from tests.ranks import run_ranks


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install -e '.[ecosystem]'")


def make_module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def inputs(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def local_gradients(module: nn.Module, rank: int, step: int = 0) -> list[torch.Tensor]:
    """Of a plain copy of `module` on that rank's inputs."""
    local = copy.deepcopy(module)
    loss_of(local, inputs(rank, step)).backward()
    return [p.grad for p in local.parameters()]


def mean_gradients(module: nn.Module, world: int, step: int = 0) -> list[torch.Tensor]:
    """Of all ranks' local ones."""
    everyone = [local_gradients(module, rank, step) for rank in range(world)]
    return [torch.stack(grads).mean(0) for grads in zip(*everyone, strict=True)]


def assert_averaged(model: nn.Module, want: list[torch.Tensor]) -> None:
    for parameter, mean in zip(model.parameters(), want, strict=True):
        assert torch.equal(parameter.grad, mean)


def assert_equal_on_all_ranks(module: nn.Module, world: int) -> None:
    everyone: list[object] = [None] * world
    dist.all_gather_object(everyone, {key: value.tolist() for key, value in module.state_dict().items()})
    assert all(one == everyone[0] for one in everyone)


# Torch's own


def check_state_dict(rank: int, world: int) -> None:
    model = FusedRingDDP(make_module())
    optimizer = torch.optim.Adam(model.parameters())
    loss_of(model, inputs(rank)).backward()
    optimizer.step()
    saved, saved_optimizer = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    assert list(saved) == list(make_module().state_dict())
    assert set(saved_optimizer["state"]) == set(saved)
    other = FusedRingDDP(make_module())
    of_other = torch.optim.Adam(other.parameters())
    set_model_state_dict(other, copy.deepcopy(saved))
    set_optimizer_state_dict(other, of_other, copy.deepcopy(saved_optimizer))
    plain = make_module()  # what was saved from a wrapper fits a plain module
    set_model_state_dict(plain, saved)
    plain.load_state_dict(saved)
    for mine, theirs, third in zip(model.parameters(), other.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine, third)
    for m, o in ((model, optimizer), (other, of_other)):
        m.zero_grad()
        loss_of(m, inputs(rank, 1)).backward()
        assert_averaged(m, mean_gradients(m.module, world, 1))
        o.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def check_zero_redundancy(rank: int, world: int) -> None:
    """Every rank keeps the optimizer's state of a part, and all have what one optimizer would do."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which is slow, and warns of torch.jit

    for as_view in (True, False):
        model, plain = FusedRingDDP(make_module(), gradient_as_bucket_view=as_view), make_module()
        sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        whole = torch.optim.Adam(plain.parameters(), lr=0.01)
        for step in range(3):
            want = mean_gradients(plain, world, step)
            loss_of(model, inputs(rank, step)).backward()
            assert_averaged(model, want)
            for parameter, grad in zip(plain.parameters(), want, strict=True):
                parameter.grad = grad
            sharded.step()
            whole.step()
            sharded.zero_grad(set_to_none=step == 0)
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine, theirs)
        assert len(sharded.optim.state) < len(list(model.parameters()))


def check_averaged_model(rank: int, world: int) -> None:
    """An average of weights, kept in a copy of the wrapper or of the module, which can be evaluated and trained."""
    for wrapped in (True, False):
        model = FusedRingDDP(make_module())
        average = torch.optim.swa_utils.AveragedModel(model if wrapped else model.module)
        seen = []
        for step in range(3):
            loss_of(model, inputs(rank, step)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= parameter.grad
            model.zero_grad()
            average.update_parameters(model if wrapped else model.module)
            seen.append([p.detach().double() for p in model.parameters()])
        for mine, *terms in zip(average.module.parameters(), *seen, strict=True):
            # Each of 3 updates rounds a difference, a quotient and a sum, all at most 2 max|w|, by half an eps of it.
            allowed = 3 * 3 * torch.finfo(torch.float32).eps * torch.stack(terms).abs().max()
            assert (mine - torch.stack(terms).mean(0)).abs().max() <= allowed
        inner = average.module.module if wrapped else average.module
        want = mean_gradients(inner, world)
        with torch.no_grad():
            assert torch.equal(average(inputs(rank)), inner(inputs(rank)))
        if wrapped:  # the copy is a wrapper of its own
            loss_of(average, inputs(rank)).backward()
            assert_averaged(average.module, want)
        assert all(p.grad is None for p in model.parameters())


def check_parametrized(rank: int, world: int) -> None:
    module = make_module()
    nn.utils.parametrizations.weight_norm(module[0])
    nn.utils.parametrizations.spectral_norm(module[2])
    model = FusedRingDDP(module, bucket_cap_mb=1e-5)
    for step in range(2):
        want = mean_gradients(module, world, step)
        loss_of(model, inputs(rank, step)).backward()
        assert_averaged(model, want)
        model.zero_grad()
    # Parametrized and again not after wrapping: other parameters, which get new buckets.
    nn.utils.parametrize.remove_parametrizations(module[0], "weight")
    want = mean_gradients(module, world, 2)
    loss_of(model, inputs(rank, 2)).backward()
    assert_averaged(model, want)
    model.zero_grad()
    nn.utils.parametrizations.weight_norm(module[0])
    want = mean_gradients(module, world, 3)
    loss_of(model, inputs(rank, 3)).backward()
    assert_averaged(model, want)
    # Values kept for the time of a context are computed once.
    model.zero_grad()
    with nn.utils.parametrize.cached():
        (loss_of(model, inputs(rank, 3)) / 2 + loss_of(model, inputs(rank, 3)) / 2).backward()
    assert_averaged(model, want)


def check_functional_call(rank: int, world: int) -> None:
    """With other values in place of parameters gradients go to those values, and are this rank's own."""
    model = FusedRingDDP(make_module())
    values = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    assert all(name.startswith("module.") for name in values)
    out = torch.func.functional_call(model, values, (inputs(rank),))
    out.square().mean().backward()
    local = copy.deepcopy(model.module)
    loss_of(local, inputs(rank)).backward()
    for (name, mine), parameter in zip(local.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(values[f"module.{name}"].grad, mine.grad)
        assert parameter.grad is None
    # With one value replaced, the others are averaged as ever.
    some = {"module.0.weight": values["module.0.weight"].detach()}
    find = FusedRingDDP(make_module(), find_unused_parameters=True)
    want = mean_gradients(find.module, world)
    torch.func.functional_call(find, some, (inputs(rank),)).square().mean().backward()
    assert find.module[0].weight.grad is None
    for parameter, mean in list(zip(find.parameters(), want, strict=True))[1:]:
        assert torch.equal(parameter.grad, mean)
    want = mean_gradients(model.module, world)
    loss_of(model, inputs(rank)).backward()
    assert_averaged(model, want)


def check_torch(rank: int, world: int) -> None:
    """All in the same processes, where the first optimizer imports half of torch."""
    check_state_dict(rank, world)
    check_zero_redundancy(rank, world)
    check_averaged_model(rank, world)
    check_parametrized(rank, world)
    check_functional_call(rank, world)


def test_what_torch_builds_on_its_own_class():
    run_ranks(2, check_torch)


# accelerate


def check_accelerate(rank: int, world: int) -> None:
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # read, and not used
    from accelerate import Accelerator
    from accelerate.utils import extract_model_from_parallel

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == world
    module = make_module()
    model = FusedRingDDP(module)
    assert extract_model_from_parallel(model) is module
    assert accelerator.unwrap_model(model) is module
    assert list(accelerator.get_state_dict(model)) == list(module.state_dict())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    accumulated = [
        [(first + second) / 2 for first, second in zip(*(local_gradients(module, r, s) for s in range(2)), strict=True)]
        for r in range(world)
    ]
    want = [torch.stack(grads).mean(0) for grads in zip(*accumulated, strict=True)]
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, inputs(rank, step)))
            assert model._get_ddp_logging_data()["iteration"] == step
            if step == 1:
                assert_averaged(model, want)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            assert (step == 1) != all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
            optimizer.zero_grad()
    # A forward under no_sync whose backward is synced after all.
    optimizer.zero_grad()
    want = [grad / 2 for grad in mean_gradients(module, world, 0)]  # accelerate divides by the steps it accumulates
    with model.no_sync():
        loss = loss_of(model, inputs(rank, 0))
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    assert_averaged(model, want)
    assert_equal_on_all_ranks(module, world)


@needs("accelerate")
def test_accelerate():
    run_ranks(2, check_accelerate)


# lightning


def check_lightning(rank: int, world: int) -> None:
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # read, and not used
    import lightning
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.wrappers import _unwrap_objects

    class RingFabric(lightning.fabric.strategies.DDPStrategy):
        def setup_module(self, module):
            return FusedRingDDP(module, **self._ddp_kwargs)

    strategy = RingFabric(cluster_environment=TorchElasticEnvironment(), find_unused_parameters=True)
    fabric = lightning.Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    module = make_module()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert isinstance(_unwrap_objects(model), FusedRingDDP)
    assert _unwrap_objects(model).find_unused_parameters
    assert model.module is module
    assert list(strategy.get_module_state_dict(_unwrap_objects(model))) == list(module.state_dict())
    for _ in range(2):
        with fabric.no_backward_sync(model):
            fabric.backward(loss_of(model, inputs(rank)))
        assert torch.equal(module[0].weight.grad, local_gradients(module, rank)[0])
        optimizer.zero_grad()
        want = mean_gradients(module, world)
        fabric.backward(loss_of(model, inputs(rank)))
        assert_averaged(module, want)
        optimizer.step()
        optimizer.zero_grad()

    class Ring(lightning.pytorch.strategies.DDPStrategy):
        def _setup_model(self, model):
            return FusedRingDDP(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_module()

        def training_step(self, batch, index):
            assert isinstance(self.trainer.strategy.model, FusedRingDDP)
            assert self.trainer.strategy.lightning_module is self
            return loss_of(self.layers, batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Manual(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss_of(self.layers, batch))
            optimizer.step()

    batches = torch.utils.data.DataLoader([inputs(rank, step) for step in range(3)], batch_size=None)

    def fit(lit: Lit) -> None:
        lightning.Trainer(
            accelerator="cpu",
            devices=world,
            strategy=Ring(cluster_environment=TorchElasticEnvironment()),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        ).fit(lit, batches)

    plain = make_module()
    for step in range(3):
        for parameter, grad in zip(plain.parameters(), mean_gradients(plain, world, step), strict=True):
            parameter.data.add_(grad, alpha=-0.1)
    for lit in (Lit(), Manual()):  # the second calls torch's Reducer
        fit(lit)
        assert list(lit.state_dict()) == [f"layers.{name}" for name in plain.state_dict()]
        for mine, theirs in zip(lit.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@needs("lightning")
@pytest.mark.filterwarnings("ignore")
def test_lightning():
    run_ranks(2, check_lightning)
