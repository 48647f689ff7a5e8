"""fusedring's averaging as a communication hook of torch's DistributedDataParallel."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedring
from fusedring import CommHookState, comm_hook
from fusedring.group.groups import communicator_of
from tests.engines.recording_gpu import RecordingGpu, pretend
from tests.ranks import run_ranks


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 7)).to(dtype)


def hooked(model: nn.Module, state: CommHookState, hook: Any = comm_hook, **how: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, **how)
    ddp.register_comm_hook(state, hook)
    return ddp


class Recording:
    """A hook's state that keeps every bucket as it was before."""

    def __init__(self, state: CommHookState) -> None:
        self.state = state
        self.before: list[torch.Tensor] = []
        self.after: list[torch.Tensor] = []


def recording_hook(state, bucket):  # torch refuses annotations that are strings
    state.before.append(bucket.buffer().clone())
    future = comm_hook(state.state, bucket)

    def keep(ended: Any) -> torch.Tensor:
        state.after.append(ended.value().clone())
        return ended.value()

    return future.then(keep)


def check_bits(rank: int, world: int) -> None:
    """What backward leaves are the bits of all_reduce of the same buckets, and those of the ranks' mean."""
    cases = [
        (torch.float32, None, "auto", True, None),
        (torch.float32, "bf16", "ring", False, 0.0003),
        (torch.float64, None, "two_shot", True, 0.0003),
        (torch.float64, "fp16", "one_shot", False, None),
        (torch.bfloat16, None, "master", True, 0.0003),
        (torch.float16, torch.float16, "auto", False, 0.0003),
    ]
    for dtype, wire, algorithm, as_view, cap in cases:
        state = Recording(CommHookState(wire_dtype=wire, algorithm=algorithm))
        ddp = hooked(make_model(dtype), state, recording_hook, bucket_cap_mb=cap, gradient_as_bucket_view=as_view)
        local = make_model(dtype)
        for step in range(2):
            x = torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
            ddp(x).square().sum().backward()
            local(x).square().sum().backward()
            alone = {"wire_dtype": wire, "algorithm": algorithm}
            for before, after in zip(state.before, state.after, strict=True):
                assert torch.equal(after, fusedring.all_reduce(before, **alone))
            assert step == 0 or cap is None or len(state.after) > 1  # torch's first step has one bucket
            averaged = torch.cat(state.after)
            mine = torch.cat([p.grad.flatten() for p in ddp.parameters()])
            assert torch.equal(averaged.sort().values, mine.sort().values)
            for p, q in zip(ddp.parameters(), local.parameters(), strict=True):
                # At most 2 W + 1 roundings to the coarsest dtype, by eps / 2 each, of what is no more than the mean of
                # absolute values; below the smallest normal number rounding is absolute.
                coarsest = max(dtype, wire_of(wire, dtype), key=lambda d: torch.finfo(d).eps)
                eps, tiny = torch.finfo(coarsest).eps, torch.finfo(coarsest).smallest_normal
                terms = [torch.empty_like(q.grad) for _ in range(world)]
                dist.all_gather(terms, q.grad)
                bound = (world + 1) * eps * (sum(t.double().abs() for t in terms) / world + tiny)
                mean = sum(t.double() for t in terms) / world
                assert ((p.grad.double() - mean).abs() <= bound).all(), (dtype, wire, algorithm)
            state.before.clear()
            state.after.clear()
            for model in (ddp, local):
                model.zero_grad(set_to_none=step == 0)


def wire_of(wire: Any, dtype: torch.dtype) -> torch.dtype:
    return {None: dtype, "fp16": torch.float16, "bf16": torch.bfloat16}.get(wire, wire)


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_are_the_bits_of_all_reduce(world):
    run_ranks(world, check_bits)


def check_accumulation(rank: int, world: int) -> None:
    check_complex_and_unused(rank, world)
    for as_view in (True, False):
        ddp = hooked(nn.Linear(4, 2), CommHookState(), gradient_as_bucket_view=as_view)
        for _ in range(2):
            with ddp.no_sync():
                ddp(torch.full((1, 4), float(rank))).sum().backward()
            assert (ddp.module.weight.grad == rank).all()
            ddp(torch.full((1, 4), 2.0 * rank)).sum().backward()
            assert (ddp.module.weight.grad == 3 * (world - 1) / 2).all()
            assert (ddp.module.bias.grad == 2).all()
            ddp.zero_grad()
    group = dist.new_group(list(range(world)))
    ddp = hooked(nn.Linear(4, 2), CommHookState(group, wire_dtype="bf16"), process_group=group)
    ddp(torch.full((1, 4), float(rank))).sum().backward()
    assert (ddp.module.weight.grad == (world - 1) / 2).all()
    dist.barrier()
    fusedring.close(group)
    ddp(torch.full((1, 4), float(rank))).sum().backward()  # opens the workspace anew
    assert (ddp.module.weight.grad == world - 1).all()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.zeros(3, dtype=torch.complex64)) for _ in range(2))

    def forward(self, left: bool) -> torch.Tensor:
        return (torch.view_as_real(self.left if left else self.right) * torch.tensor([2.0, 6.0])).sum()


def check_complex_and_unused(rank: int, world: int) -> None:
    ddp = hooked(Branches(), CommHookState(), find_unused_parameters=True, bucket_cap_mb=1e-5)
    for _ in range(2):
        ddp(rank == 0).backward()
        assert (ddp.module.left.grad == 1 + 3j).all()
        assert (ddp.module.right.grad == 1 + 3j).all()
        ddp.zero_grad()


def test_no_sync_groups_complex_gradients_and_parameters_that_one_rank_did_not_use():
    run_ranks(2, check_accumulation)  # in one test, since torch's DDP takes seconds to import


def step(ddp: nn.Module, rank: int) -> None:
    ddp.zero_grad()
    ddp(torch.full((8, 12), float(rank))).sum().backward()
    assert (ddp.module[2].bias.grad == 8).all()


def failing_step(ddp: nn.Module, rank: int) -> str:
    with pytest.raises(RuntimeError) as raised:
        step(ddp, rank)
    return str(raised.value)


def check_errors(rank: int, world: int) -> tuple[str, list[str]]:
    state = CommHookState()
    ddp = hooked(make_model(), state, bucket_cap_mb=0.0003)  # several buckets, from the second step on
    for _ in range(2):
        step(ddp, rank)
    state.config = CommHookState(wire_dtype=None if rank else "bf16").config
    mismatch = failing_step(ddp, rank)
    state.config = CommHookState().config
    step(ddp, rank)  # nothing was written, and nothing is broken
    state.config = CommHookState(timeout=0.5).config
    if rank != 0:
        dist.barrier()  # until rank 0 has given up
    late = [failing_step(ddp, rank)]
    if rank == 0:
        dist.barrier()
    late.append(failing_step(ddp, rank))  # the workspace stays unusable ...
    state.config = CommHookState().config
    dist.barrier()
    fusedring.close()
    dist.barrier()
    step(ddp, rank)  # ... until all ranks close it
    return next(line for line in mismatch.splitlines() if "MismatchError" in line), late


def test_errors_end_every_backward_and_training_can_go_on():
    outcomes = run_ranks(2, check_errors)
    (text,) = {mismatch for mismatch, _ in outcomes}
    for words in ("MismatchError: ranks launched different collectives", "rank 0: all_reduce", "wire bfloat16"):
        assert words in text
    for _, late in outcomes:
        assert all("CollectiveTimeoutError" in text for text in late)
    assert "rank 0 waited 0.5 s for rank(s) 1" in outcomes[0][1][0]


def test_one_process_alone_needs_no_group_for_its_buckets():
    bucket = FakeBucket(torch.full((5,), 3.0))
    assert comm_hook(CommHookState(), bucket).wait() is bucket.buffer()
    assert (bucket.buffer() == 3).all()
    fusedring.close()


class FakeBucket:
    """dist.GradBucket, which only torch can make."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def index(self) -> int:
        return 4

    def parameters(self) -> list[torch.Tensor]:
        return [torch.empty(2, 3)]


def test_a_bucket_that_cannot_be_reduced_is_named():
    for buffer in (torch.zeros(6, dtype=torch.int32), torch.eye(3).to_sparse()):
        with pytest.raises(ValueError, match=r"bucket 4 \(parameters of shape \[2, 3\]\) is torch\.") as raised:
            comm_hook(CommHookState(), FakeBucket(buffer))
        assert str(buffer.dtype) in str(raised.value)
        assert str(buffer.layout) in str(raised.value)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"wire_dtype": "int8"}, "wire_dtype must be None, 'fp16'"),
        ({"algorithm": "tree"}, "algorithm must be one of auto, ring"),
        ({"timeout": 0}, "timeout must be a positive number"),
        ({"timeout": timedelta(seconds=1)}, "timeout must be a positive number"),
        ({"process_group": "gloo"}, "process_group must be a process group"),
        ({"process_group": dist.GroupMember.NON_GROUP_MEMBER}, "process_group must be a process group"),
    ],
)
def test_wrong_arguments_are_named(how, words):
    with pytest.raises(ValueError, match=words):
        CommHookState(**how)


def check_futures(rank: int, world: int) -> None:
    x = torch.full((100_000,), float(rank))
    works = [fusedring.all_reduce(x, op="sum", async_op=True) for _ in range(3)]
    early = [work.get_future() for work in works]
    (value,) = torch.futures.wait_all(early)[-1]
    assert value is x
    late = works[0].get_future()  # of a collective that has ended
    assert late.done()
    assert late.wait() == [x]
    assert early[0].then(lambda ended: ended.value()[0].numel()).wait() == x.numel()
    bad = fusedring.all_reduce(torch.ones(3 + rank), async_op=True)
    for _ in range(2):
        with pytest.raises(fusedring.MismatchError, match="ranks launched different collectives"):
            bad.get_future().wait()
    dist.barrier()
    fusedring.close()
    if rank == 0:  # futures end with the workspace, too
        lonely = fusedring.all_reduce(x, async_op=True, timeout=20).get_future()
        with pytest.raises(fusedring.FusedRingError):
            lonely.wait()
    else:
        communicator_of()
        fusedring.close()


def test_a_work_has_a_future_of_its_result_or_its_error():
    run_ranks(2, check_futures)


def check_future_on_gpu(rank: int, world: int) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    gpu = RecordingGpu()
    pretend(communicator_of(), gpu)
    x = torch.arange(100.0) + rank
    work = fusedring.all_reduce(x, op="sum", async_op=True)
    gpu.calls.clear()
    streams = []
    gpu_on = gpu.on
    gpu.on = lambda stream: streams.append(stream) or gpu_on(stream)
    future = work.get_future()
    # It has ended, in the stream of the launch, and the current stream does not wait: backward goes on.
    assert future.done()
    assert streams == ["comm"]
    assert gpu.calls == []
    assert future.wait() == [x]
    bucket = FakeBucket(torch.full((64,), 1.0 + rank))
    assert comm_hook(CommHookState(), bucket).wait() is bucket.buffer()
    assert (bucket.buffer() == (world + 1) / 2).all()
    fusedring.close()


def test_on_a_gpu_the_future_has_ended_and_orders_streams():
    run_ranks(2, check_future_on_gpu)
