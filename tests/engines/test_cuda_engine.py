"""The CUDA engine without a GPU: what it asks of the GPU, and in which order, on a double that writes that down.

The double runs copies and kernels at once, in shared host memory, so the results are compared, too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusedring
from fusedring import FusedRingDDP
from fusedring.data_parallel.backward import Backward
from fusedring.data_parallel.checks import gpu_of
from fusedring.engines.work import GpuWork
from fusedring.group.groups import communicator_of
from fusedring.plan.policy import rules_on_gpus
from tests.engines.recording_gpu import RecordingGpu, pretend
from tests.ranks import run_ranks, start_ranks


def run_interpreted(world: int, check: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
    return run_ranks(world, _interpreted, check, args, **how)


def _interpreted(rank: int, world: int, check: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    return check(rank, world, *args)


def open_gpu(**how: Any) -> RecordingGpu:
    gpu = RecordingGpu()
    pretend(communicator_of(), gpu, **how)
    gpu.calls.clear()
    return gpu


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 50), nn.LayerNorm(50), nn.Linear(50, 3, bias=False)
    )


def train(model: nn.Module, rank: int, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def check_a_launch(rank: int, world: int) -> None:
    gpu = open_gpu()
    x = torch.arange(5000.0) + rank
    fusedring.all_reduce(x, op="sum", algorithm="ring")
    assert torch.equal(x, world * torch.arange(5000.0) + sum(range(world)))
    fusedring.all_reduce(x, algorithm="ring")
    gpu.calls.clear()
    work = fusedring.all_reduce(x, algorithm="ring", async_op=True)
    # The kernel comes after what produced the tensor, between two marks, and the tensor's memory is kept for it ...
    assert gpu.calls == [
        ("order", "main", "comm"),
        ("mark", "comm"),
        ("kernel", "ring", "comm"),
        ("mark", "comm"),
        ("keep", "comm"),
    ]
    gpu.calls.clear()
    assert work.is_completed()
    assert work.wait() is True
    assert gpu.calls == [("after", "comm", "main")]  # ... and what uses the result comes after the second mark
    assert work.result() is x
    gpu.pending.add(work.pending.done)
    assert not work.is_completed()
    with pytest.raises(fusedring.CollectiveTimeoutError, match=r"has not ended after 0\.01 s"):
        work.wait(timeout=0.01)
    with gpu.on("other"):
        fusedring.all_reduce(x, algorithm="two_shot")
    assert ("order", "other", "comm") in gpu.calls
    assert gpu.calls[-1] == ("after", "comm", "other")
    assert fusedring.empty(7, device="cpu").device == gpu.device
    fusedring.close()
    assert gpu.calls[-1] == ("settle",)  # nothing may run when memory goes
    assert gpu.registered == set()


def test_the_order_of_calls_for_a_launch():
    run_interpreted(2, check_a_launch)


def check_every_collective(rank: int, world: int, wire: str | None) -> None:
    """The same bits as the host engine, for tensors that take several windows, too."""
    x = torch.randn(70_003, generator=torch.Generator().manual_seed(rank))
    cases = [(algorithm, wire) for algorithm in ("ring", "two_shot", "one_shot", "master")]
    wanted = []
    for algorithm, wire in cases:
        y = x.clone()
        part = fusedring.reduce_scatter(y, algorithm=algorithm, wire_dtype=wire).clone()
        fusedring.all_gather(y, algorithm=algorithm, wire_dtype=wire)
        wanted.append((part, y))
    fusedring.close()
    gpu = open_gpu()
    for (algorithm, wire), (part, whole) in zip(cases, wanted, strict=True):
        y = x.clone()
        assert torch.equal(fusedring.reduce_scatter(y, algorithm=algorithm, wire_dtype=wire), part), algorithm
        fusedring.all_gather(y, algorithm=algorithm, wire_dtype=wire)
        assert torch.equal(y, whole), (algorithm, wire)
        y = x.clone()
        fusedring.all_reduce(y, algorithm=algorithm, wire_dtype=wire)
        assert torch.equal(y, whole), (algorithm, wire)
    assert gpu.names().count("kernel") > 3 * len(cases)
    gpu.calls.clear()
    fusedring.all_reduce(torch.empty(0))
    assert "kernel" not in gpu.names()


@pytest.mark.parametrize("wire", ["bf16", pytest.param(None, marks=pytest.mark.slow)])
def test_every_collective_gives_the_host_engines_bits(wire):
    run_interpreted(2, check_every_collective, wire, deadline=240)


def check_a_step(rank: int, world: int) -> None:
    want = train(FusedRingDDP(make_model(), algorithm="ring", bucket_cap_mb=0.01), rank)
    fusedring.close()
    gpu = open_gpu()
    module = make_model()
    # Gradients of the first layer come in another stream, as those of a module that ran in one.
    side = [module[0].weight, module[0].bias]
    for parameter in side:
        parameter.register_post_accumulate_grad_hook(lambda _: gpu._current.__setitem__(-1, "side"))
    model = FusedRingDDP(module, algorithm="ring", bucket_cap_mb=0.01)
    for parameter in side:
        parameter.register_post_accumulate_grad_hook(lambda _: gpu._current.__setitem__(-1, "main"))
    assert all(map(torch.equal, train(model, rank), want))
    gpu.calls.clear()
    learnt = GpuWork.learnt

    def in_stream(self: GpuWork) -> Any:
        gpu.note("learn", gpu.current_stream())
        return learnt(self)

    GpuWork.learnt = in_stream
    train(model, rank, 1)
    kernels = [at for at, call in enumerate(gpu.calls) if call[0] == "kernel"]
    assert len(kernels) == 3, gpu.calls
    first, second, third = kernels  # the last one sums the flags
    # Each kernel comes after the streams that have produced gradients so far.
    assert ("order", "main", "comm") in gpu.calls[:first]
    assert ("order", "side", "comm") not in gpu.calls[:first]
    assert ("order", "side", "comm") in gpu.calls[first:second]
    assert ("order", "main", "comm") in gpu.calls[first:second]
    # What kernels learn of values is read behind them, and before it is told.
    learns = [at for at, call in enumerate(gpu.calls) if call == ("learn", "comm")]
    assert len(learns) == 2
    assert second < min(learns) < max(learns) < third
    # Both streams wait for the last kernel before they go on: the optimizer reads, and memory of gradients is freed.
    assert {("after", "comm", "main"), ("after", "comm", "side")} <= set(gpu.calls[second:])
    ended = max(at for at, call in enumerate(gpu.calls) if call == ("mark", "main"))
    assert gpu.calls[ended - 1][:2] == ("copy", "main")  # the flags, which nobody waits for
    assert "settle" not in gpu.names()
    report = model.report()
    assert [launch.bucket for launch in report.launches] == [0, 1]
    assert report.backward_start < report.launches[0].start < report.launches[0].end <= report.launches[1].start
    assert 0 <= report.overlap <= 1
    # Two wrappers on one GPU share its stream, in one order.
    both = nn.ModuleList([FusedRingDDP(make_model(), algorithm="ring") for _ in range(2)])
    gpu.calls.clear()
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
    (both[0](x).sum() + both[1](x).square().sum()).backward()
    assert {call[2] for call in gpu.calls if call[0] == "kernel"} == {"comm"}
    for a, b in zip(both[0].parameters(), both[1].parameters(), strict=True):
        assert a.grad is not None
        assert not torch.equal(a.grad, b.grad)


def test_the_order_of_calls_in_a_step_of_training():
    run_interpreted(2, check_a_step)


def check_a_compiled_step(rank: int, world: int) -> None:
    """A gradient that is announced is copied in the stream of its graph, which the launch waits for."""
    want = train(FusedRingDDP(make_model(), algorithm="ring", bucket_cap_mb=0.01), rank, 4)
    fusedring.close()
    gpu = open_gpu()
    module = make_model()
    model = FusedRingDDP(module, algorithm="ring", bucket_cap_mb=0.01)
    real = Backward.on_announced

    def announced(self: Backward, parameter: nn.Parameter, grad: torch.Tensor, *, only_use: bool) -> None:
        with gpu.on("side" if parameter is module[0].weight else "main"):
            real(self, parameter, grad, only_use=only_use)

    Backward.on_announced = announced
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, train(compiled, rank, 4), want))
    gpu.calls.clear()
    train(compiled, rank, 1)
    first, second, _ = (at for at, call in enumerate(gpu.calls) if call[0] == "kernel")
    assert ("order", "side", "comm") not in gpu.calls[:first]
    assert ("order", "side", "comm") in gpu.calls[first:second]
    assert {("after", "comm", "main"), ("after", "comm", "side")} <= set(gpu.calls[second:])


def test_the_order_of_calls_in_a_compiled_step():
    run_interpreted(2, check_a_compiled_step)


def check_capture(rank: int, world: int) -> None:
    """The double fails if events are asked, memory is pinned or anything is waited for during a capture."""
    gpu = open_gpu()
    engine = communicator_of().engine_for("auto", gpu.device)
    model = FusedRingDDP(make_model(), algorithm="ring", bucket_cap_mb=0.01)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))

    def backward() -> list[torch.Tensor]:
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    gpu.capturing = True
    with pytest.raises(fusedring.FusedRingError, match="outside of a graph"):
        fusedring.all_reduce(torch.ones(100), algorithm="ring")
    gpu.capturing = False  # and the group is as it was
    model = FusedRingDDP(make_model(), algorithm="ring", bucket_cap_mb=0.01)
    want = backward()
    for _ in range(2):  # every capture has tables of its own
        gpu.capturing = True
        got = backward()
        gpu.capturing = False
        assert all(map(torch.equal, got, want))
        assert model.report() is None
        backward()
    captured = engine._in_graphs
    assert len(captured) == 2 * 3
    tables = [window.table.tiles.clone() for _, windows in captured for window in windows]
    keep_away = [torch.empty(50_000) for _ in range(3)]  # so that gradients move
    for _ in range(3):
        backward()
    assert len(captured) == 2 * 3
    after = [window.table.tiles for _, windows in captured for window in windows]
    assert all(map(torch.equal, tables, after))
    del keep_away
    # A replay: the same kernel with the same tables. Epochs are counted where the kernels run.
    flat, (window,) = captured[0]
    for source, address in zip([torch.full((flat.numel(),), float(rank + 1))], [flat.data_ptr()], strict=True):
        window.table.tiles[:, 0] = address + 4 * window.table.tiles[:, 1]
        flat.copy_(source)
    window.kernel.launch(flat, 1 << 40)
    assert (flat == (1 + world) / 2).all()
    # A gradient that is missing cannot be told from within a graph.
    unused = FusedRingDDP(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), find_unused_parameters=True)
    unused.module.forward = lambda x: unused.module[0](x)
    unused(torch.ones(1, 4)).sum().backward()
    gpu.capturing = True
    with pytest.raises(RuntimeError, match=r"CUDA graph cannot capture .* 1\.weight, 1\.bias|1\.bias, 1\.weight"):
        unused(torch.ones(1, 4)).sum().backward()


def test_a_captured_step_waits_for_nothing_and_keeps_its_tables():
    run_interpreted(2, check_capture)


def check_staging(rank: int, world: int) -> None:
    from fusedring.transport.pinned import PinnedWrites

    gpu = RecordingGpu()
    staging, target = PinnedWrites(gpu), torch.zeros(8, dtype=torch.int64)
    staging.write(target, torch.arange(8))
    assert target.tolist() == list(range(8))
    (oldest,) = (mark for mark, _ in staging._on_the_way[4096])
    gpu.pending.add(oldest)
    staging.write(target, torch.arange(8) + 1)
    assert gpu.names().count("pinned") == 2  # the first buffer may not have been copied yet
    gpu.pending.clear()
    staging.write(target, torch.arange(8) + 2)
    assert gpu.names().count("pinned") == 2
    assert target.tolist() == list(range(2, 10))
    staging.put_aside()
    staging.put_aside()
    assert gpu.names().count("pinned") == 3  # one for each target
    gpu.capturing = True
    staging.write(target, torch.arange(8) + 3)
    (in_graph,) = staging._in_graphs
    with pytest.raises(fusedring.FusedRingError, match="before each capture"):
        staging.check_spares([64])
    gpu.capturing = False
    for _ in range(4):
        staging.write(target, torch.zeros(8, dtype=torch.int64))
    assert in_graph[:64].view(torch.int64).tolist() == list(range(3, 11))  # a replay copies the same again
    staging.write(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))


def test_pinned_buffers_are_used_again_only_when_copied():
    run_interpreted(1, check_staging)


def check_unused(rank: int, world: int, expected: bool) -> list[str]:
    open_gpu()

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.always, self.rank_0, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            return self.rank_0(self.always(x)) if both else self.always(x)

    model = FusedRingDDP(Branches(), find_unused_parameters=expected)
    x = torch.ones(2, 4)
    texts = []
    for step in range(3):
        try:
            model(x, both=rank == 0).sum().backward()
        except RuntimeError as error:
            texts.append(str(error))
            continue
        weight = model.module.rank_0.weight
        assert model.module.never.weight.grad is None
        assert (weight.grad != 0).any(), step
        model.zero_grad()
    return texts


@pytest.mark.filterwarnings("ignore:no gradient")
def test_missing_gradients_are_told_to_all_ranks():
    assert run_interpreted(2, check_unused, True) == [[], []]
    texts = run_interpreted(2, check_unused, False)
    assert [len(each) for each in texts] == [1, 1]
    ends = {each[0].partition("on some rank:")[2] for each in texts}
    assert len(ends) == 1  # all ranks know of all
    (end,) = ends
    assert "rank_0.weight" in end
    assert "never.bias" in end
    assert "always" not in end


def check_one_lacks(rank: int, world: int) -> str:
    """Rank 0 has all its gradients, so it does not wait for the flags, and hears of rank 1's at its next forward."""
    gpu = open_gpu()
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    module = nn.ModuleList([first, second])
    module.forward = lambda x: second(first(x)) if rank == 0 else first(x)
    model = FusedRingDDP(module)
    with pytest.warns(UserWarning, match="no gradient on some rank") if rank else _nothing():
        model(torch.ones(1, 4)).sum().backward()
    assert second.weight.grad is not None
    (on_the_way,) = model._scheduler.results._on_the_way or [None]
    if rank == 0:  # while they are on their way, nothing is known
        gpu.pending.add(on_the_way._copied)
        assert model._scheduler.late_elsewhere() == []
        gpu.pending.clear()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction") as raised:
        model(torch.ones(1, 4))
    return str(raised.value)


class _nothing:  # noqa: N801
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.mark.filterwarnings("ignore:no gradient")
def test_a_rank_that_lacks_nothing_hears_of_the_others_without_waiting():
    ends = [text.partition("on some rank:")[2] for text in run_interpreted(2, check_one_lacks)]
    assert ends[0] == ends[1]
    assert "1.weight" in ends[0]


def check_mismatch(rank: int, world: int) -> list[str]:
    open_gpu()
    x = torch.ones(1000)
    fusedring.all_reduce(x, algorithm="ring")
    fusedring.all_reduce(x, algorithm="ring", scale=1.0 + rank, async_op=True)  # a GPU finds that out afterwards
    torch.distributed.barrier()
    texts = []
    for _ in range(2):
        with pytest.raises(fusedring.MismatchError) as raised:
            fusedring.all_reduce(x, algorithm="ring")
        texts.append(str(raised.value))
    torch.distributed.barrier()
    fusedring.close()
    os.environ["FUSEDRING_DEBUG"] = "1"
    open_gpu()
    with pytest.raises(fusedring.MismatchError, match="nothing was written"):
        fusedring.all_reduce(x, algorithm="ring", scale=1.0 + rank)
    assert (x == x[0]).all()
    fusedring.all_reduce(x, algorithm="ring")
    return texts


def test_ranks_that_launch_different_things_find_out():
    results = run_interpreted(3, check_mismatch)
    assert len({text for texts in results for text in texts}) == 1
    text = results[0][0]
    assert "rank 0" in text
    assert "rank 2" in text
    assert "results since then are wrong" in text
    assert "fusedring.close()" in text


def check_late(rank: int, world: int) -> str:
    open_gpu()
    x = torch.full((5000,), float(rank))
    fusedring.all_reduce(x, algorithm="ring")
    torch.distributed.barrier()
    if rank == 1:
        time.sleep(4)
        fusedring.all_reduce(x, algorithm="ring", timeout=1, async_op=True)  # the kernel leaves at once
    else:
        work = fusedring.all_reduce(x, algorithm="ring", timeout=1, async_op=True)
        with pytest.raises(fusedring.CollectiveTimeoutError):
            work.wait()
        assert x.isnan().all()
    with pytest.raises(fusedring.FusedRingError) as raised:
        fusedring.all_reduce(x, algorithm="ring", timeout=1)
    torch.distributed.barrier()
    fusedring.close()
    open_gpu()
    x = torch.full((5000,), float(rank))
    fusedring.all_reduce(x, algorithm="ring", op="sum")
    assert (x == world * (world - 1) / 2).all()
    return str(raised.value)


def test_a_rank_that_comes_too_late_is_named_and_the_group_can_start_again():
    texts = run_interpreted(3, check_late)
    assert "rank 0 waited for rank 2" in texts[0]
    assert "rank 2 waited for rank 1 at step 1" in texts[0]
    assert "rank 2 waited for rank 1 at step 1" in texts[2]
    assert "the tensor is NaN" in texts[1]


def check_killed(rank: int, world: int) -> str:
    open_gpu()
    x = torch.full((5000,), float(rank))
    fusedring.all_reduce(x, algorithm="ring")
    torch.distributed.barrier()
    if rank == 1:
        os.kill(os.getpid(), 9)
    started = time.monotonic()
    with pytest.raises(fusedring.PeerLostError) as raised:
        fusedring.all_reduce(x, algorithm="ring", timeout=600)
    assert time.monotonic() - started < 30
    return str(raised.value)


def test_a_killed_rank_is_named_long_before_the_timeout():
    outcomes = start_ranks(2, _interpreted, check_killed, ())
    assert outcomes[1] == ("died", -9)
    assert outcomes[0][0] == "returned", outcomes[0]
    assert "rank 1 has ended" in outcomes[0][1]


def check_exit(rank: int, world: int) -> None:
    """A rank that ends without close() while its peer still waits in a kernel."""
    open_gpu()
    x = torch.ones(100)
    fusedring.all_reduce(x, algorithm="ring")
    if rank == 0:
        return
    with pytest.raises(fusedring.PeerLostError):
        fusedring.all_reduce(x, algorithm="ring", timeout=600)


def test_a_rank_that_ends_is_named():
    run_interpreted(2, check_exit)


def check_channels(rank: int, world: int) -> None:
    gpu = open_gpu(channels=3)
    communicator = communicator_of()
    engine = communicator.engine_for("auto", gpu.device)
    FusedRingDDP(make_model(), channels=3)
    with pytest.raises(fusedring.FusedRingError, match="opened with 3 channels, and now 4"):
        FusedRingDDP(make_model(), channels=4)
    assert communicator.algorithm_for("auto", 1 << 10, engine) == "one_shot"
    assert communicator.algorithm_for("auto", 1 << 30, engine) == "two_shot"
    engine.rules = rules_on_gpus(world, full_mesh=False)
    assert communicator.algorithm_for("auto", 1 << 30, engine) == ("two_shot" if world == 2 else "ring")


def test_channels_and_algorithms():
    run_interpreted(2, check_channels)
    run_interpreted(3, check_channels)


def check_lone(rank: int, world: int) -> None:
    gpu = open_gpu()
    x = torch.randn(5000)
    y = x.clone()
    fusedring.all_reduce(y, scale=2.0)
    assert torch.equal(y, 2.0 * x)
    assert gpu.names().count("kernel") == 1
    train(FusedRingDDP(make_model()), rank)


def test_a_group_of_one_rank():
    run_interpreted(1, check_lone)


def check_hook(rank: int, world: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    want = train(FusedRingDDP(make_model(), algorithm="ring"), rank, 1)
    fusedring.close()
    gpu = open_gpu()
    model = FusedRingDDP(make_model())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    for got, wanted in zip(train(model, rank, 1), want, strict=True):
        torch.testing.assert_close(got, wanted)
    assert gpu.names().count("kernel") == 1  # the flags
    assert model.report() is None


def test_communication_hooks():
    run_interpreted(2, check_hook)


def check_trace(rank: int, world: int, folder: str) -> None:
    open_gpu()
    model = FusedRingDDP(make_model(), algorithm="ring", bucket_cap_mb=0.01)
    with fusedring.trace(folder):
        train(model, rank, 2)


def test_a_trace_has_the_gpus_times(tmp_path):
    run_interpreted(2, check_trace, str(tmp_path))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e.get("ph") == "X" and e["name"].startswith("fusedring::all_reduce[bucket=")]
    assert len(spans) == 2 * 2 * 2  # ranks, steps, buckets
    # The double's clock ticks once for each mark, a millisecond apart; a launch lies between two of them.
    assert all(1000 * 0.99 < span["dur"] < 1000 * 20 for span in spans)
    assert len({span["args"]["step"] for span in spans}) == 2


@pytest.mark.parametrize("channels", [0, 129, 2.0, True, "8"])
def test_channels_that_cannot_be(channels):
    with pytest.raises(ValueError, match="channels must be a number from 1 to 128"):
        FusedRingDDP(make_model(), channels=channels)


def test_without_a_gpu_the_host_engine_is_named():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=r"no GPU here.*engine='host'"):
        fusedring.empty(3, device="cuda")
    with pytest.raises(ValueError, match="host engine"):
        FusedRingDDP(make_model(), device_ids=[0])
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        FusedRingDDP(make_model(), engine="triton")
    from fusedring.transport.gpu import Cuda

    with pytest.raises(fusedring.FusedRingError, match="host engine"):
        Cuda(torch.device("cuda:0"))


def test_devices_that_disagree():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"0\.weight is on cpu and 1\.weight on meta"):
        FusedRingDDP(module)
    with pytest.raises(ValueError, match="only tensors in host memory and on GPUs"):
        FusedRingDDP(module[1])
    device = torch.device("cuda", 1)
    assert gpu_of(device, [1], None) == [1]
    assert gpu_of(device, [device], device) == [1]
    assert gpu_of(device, None, None) is None
    for ids, output in (([0], None), (None, 0), ([1], torch.device("cuda", 0))):
        with pytest.raises(ValueError, match=r"the module is on cuda:1.*module\.to\(\)"):
            gpu_of(device, ids, output)
    with pytest.raises(ValueError, match="one process for each"):
        gpu_of(device, [0, 1], None)
