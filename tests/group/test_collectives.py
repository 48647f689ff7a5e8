"""all_reduce, reduce_scatter and all_gather on real processes, bit for bit against the slow reference."""

from __future__ import annotations

import itertools
import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fusedring
from fusedring.config import ALGORITHMS
from tests import reference
from tests.ranks import run_ranks, start_ranks

SIZES = (0, 1, 3, 17, 1000, 65537, 300001)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WIRES = (None, torch.float16, torch.bfloat16)


def inputs_for(world: int, elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(elements)
    return [torch.randn(elements, generator=generator, dtype=torch.float64).to(dtype) for _ in range(world)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) if tensor.numel() else tensor


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, what: object) -> None:
    assert torch.equal(bits(got), bits(want)), f"{what}: {(got != want).sum()} of {got.numel()} elements differ"


def check_all_reduce(rank: int, world: int) -> None:
    for elements, dtype in itertools.product(SIZES, DTYPES):
        inputs = inputs_for(world, elements, dtype)
        exact = sum(x.double() for x in inputs) / world
        shared = fusedring.empty(elements, dtype=dtype)
        for wire, algorithm in itertools.product(WIRES, ALGORITHMS):
            # Ordinary and workspace tensors mix: odd ranks are staged.
            tensor = shared if rank % 2 == 0 else torch.empty(elements, dtype=dtype)
            tensor.copy_(inputs[rank])
            returned = fusedring.all_reduce(tensor, wire_dtype=wire, algorithm=algorithm)
            assert returned is tensor
            want = reference.all_reduce(inputs, algorithm, wire)
            assert_same_bits(tensor, want, (world, elements, dtype, wire, algorithm))
            # Each of at most W+1 roundings errs by half an ulp of a partial sum, which is below the sum of |x|.
            eps = max(torch.finfo(dtype).eps, torch.finfo(wire or dtype).eps)
            size = sum(x.double().abs() for x in inputs) / world
            tiny = torch.finfo(wire or dtype).smallest_normal * torch.finfo(wire or dtype).eps
            assert ((tensor.double() - exact).abs() <= (world + 1) * (eps * size + tiny)).all()
            again = inputs[rank].clone()
            part = fusedring.reduce_scatter(again, wire_dtype=wire, algorithm=algorithm)
            assert part.numel() == 0 or part.untyped_storage().data_ptr() == again.untyped_storage().data_ptr()
            fusedring.all_gather(again, wire_dtype=wire, algorithm=algorithm)
            assert_same_bits(again, want, ("two halves", world, elements, dtype, wire, algorithm))


@pytest.mark.parametrize("world", [1, 2, 3, *(pytest.param(world, marks=pytest.mark.slow) for world in (4, 5))])
def test_all_reduce_is_the_reference_bit_for_bit(world):
    run_ranks(world, check_all_reduce, deadline=240)


def check_options(rank: int, world: int) -> None:
    inputs = inputs_for(world, 5000, torch.float32)
    for op, scale in (("sum", None), ("sum", 0.3), ("avg", 3.0)):
        tensor = inputs[rank].clone()
        fusedring.all_reduce(tensor, op=op, scale=scale, algorithm="ring")
        assert_same_bits(tensor, reference.all_reduce(inputs, "ring", None, op, scale or 1.0), (op, scale))
    for algorithm in ALGORITHMS:
        for poison in (float("nan"), float("inf")):
            tensor = inputs[rank].clone()
            if rank == world - 1:
                tensor[4321] = poison
            fusedring.all_reduce(tensor, algorithm=algorithm, wire_dtype="bf16")
            assert torch.isnan(tensor[4321]) if poison != poison else torch.isinf(tensor[4321])
            assert torch.isfinite(tensor).sum() == 4999
    big = torch.full((64,), 1e5 if rank == 0 else 0.0)
    fusedring.all_reduce(big, wire_dtype="fp16")
    assert (big == float(torch.tensor(1e5 / world).half())).all()
    tensor = inputs[rank].clone()
    version = tensor._version
    works = [fusedring.all_reduce(tensor, async_op=True) for _ in range(3)]
    assert works[-1].wait(30)
    assert works[-1].wait(timedelta(seconds=30))
    assert all(work.is_completed() for work in works)
    assert works[0].result() is tensor
    assert tensor._version > version


def test_scale_poison_and_async():
    run_ranks(3, check_options)


def check_subgroup(rank: int, world: int) -> None:
    group = dist.new_group([0, 2])
    tensor = torch.full((100,), float(rank))
    if rank in (0, 2):
        fusedring.all_reduce(tensor, group=group, op="sum")
        assert (tensor == 2).all()
        assert (fusedring.all_reduce(fusedring.empty(7, group=group).fill_(1), group=group) == 1).all()
    else:
        with pytest.raises(ValueError, match="not a member"):
            fusedring.all_reduce(tensor, group=group)
    fusedring.all_reduce(tensor, op="sum")
    assert (tensor == 5).all()


def test_a_subset_of_the_ranks():
    run_ranks(3, check_subgroup)


def check_mismatch(rank: int, world: int) -> list[str]:
    texts = []
    tensor = torch.full((40,), float(rank))
    calls = (
        lambda: fusedring.all_reduce(tensor[: 40 - rank], timeout=20),
        lambda: fusedring.all_reduce(tensor.to(torch.float64 if rank else torch.float32), timeout=20),
        lambda: fusedring.all_reduce(tensor, algorithm="ring" if rank else "two_shot", timeout=20),
        lambda: fusedring.all_reduce(tensor, timeout=20) if rank else fusedring.all_gather(tensor, timeout=20),
        lambda: fusedring.all_reduce(tensor, scale=1.0 + rank, timeout=20),
        lambda: fusedring.empty(8, timeout=20) if rank else fusedring.all_reduce(tensor, timeout=20),
        lambda: fusedring.all_reduce(tensor[: 0 if rank else 5], timeout=20),
    )
    for call in calls:
        with pytest.raises(fusedring.MismatchError) as raised:
            call()
        assert (tensor == rank).all(), "a mismatch wrote something"
        texts.append(str(raised.value))
    fusedring.all_reduce(tensor, op="sum")
    assert (tensor == world * (world - 1) / 2).all()
    return texts


def test_ranks_that_differ_get_the_same_error_and_go_on():
    texts = run_ranks(3, check_mismatch)
    assert texts[0] == texts[1] == texts[2]
    assert "40 elements" in texts[0][0]
    assert "rank 0" in texts[0][1]


def check_late_rank(rank: int, world: int) -> str:
    if rank == 1:
        time.sleep(4)
    started = time.monotonic()
    with pytest.raises(fusedring.CollectiveTimeoutError) as raised:
        fusedring.all_reduce(torch.ones(4), timeout=1)
    assert time.monotonic() - started < 3
    return str(raised.value)


def test_a_rank_that_never_comes_is_named_when_the_workspace_opens():
    assert "rank(s) 1" in run_ranks(2, check_late_rank)[0]


def check_uneven_attempts(rank: int, world: int) -> None:
    """Ranks try to open the workspace several times, each out of step with the others, until all meet."""
    for _ in range(3 if rank == 0 else rank - 1):
        with pytest.raises(fusedring.CollectiveTimeoutError):
            fusedring.all_reduce(torch.ones(4), timeout=0.4)
    dist.barrier()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        tensor = torch.ones(4)
        fusedring.all_reduce(tensor, op="sum", timeout=20)
        assert (tensor == world).all()
        fusedring.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before, "a descriptor stays open"


def test_attempts_that_failed_leave_nothing_behind():
    run_ranks(3, check_uneven_attempts)


def check_forked(rank: int, world: int) -> None:
    model = fusedring.FusedRingDDP(torch.nn.Linear(2, 2), broadcast_buffers=False)
    for _ in range(2):  # before and after the communicator has a thread
        for call in (lambda: fusedring.all_reduce(torch.ones(3), timeout=1), lambda: model(torch.ones(1, 2))):
            child = os.fork() if rank == 0 else -1
            if child == 0:
                try:
                    call()
                except fusedring.FusedRingError as error:
                    os._exit(0 if "forked" in str(error) else 1)
                os._exit(2)
            if rank == 0:
                assert os.waitpid(child, 0)[1] == 0
        fusedring.all_reduce(torch.ones(3), timeout=20)
        model(torch.ones(1, 2)).sum().backward()


def test_a_forked_child_does_not_speak_for_its_parent():
    run_ranks(2, check_forked)


def check_late_launch(rank: int, world: int) -> str:
    tensor = torch.ones(4)
    fusedring.all_reduce(tensor)
    dist.barrier()
    if rank == 1:
        time.sleep(3)
    with pytest.raises(fusedring.CollectiveTimeoutError) as raised:
        fusedring.all_reduce(tensor, timeout=1)
    with pytest.raises(fusedring.FusedRingError):
        fusedring.all_reduce(tensor)
    dist.barrier()
    fusedring.close()
    fusedring.all_reduce(tensor, op="sum")
    assert (tensor == world).all()
    return str(raised.value)


def test_a_late_rank_times_out_on_all_ranks_and_close_starts_anew():
    texts = run_ranks(2, check_late_launch)
    assert "rank(s) 1" in texts[0]
    assert "rank 0 gave up waiting for rank 1" in texts[1]


def check_killed(rank: int, world: int, algorithm: str) -> str:
    fusedring.all_reduce(torch.ones(4))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), 9)
    started = time.monotonic()
    with pytest.raises(fusedring.PeerLostError) as raised:
        fusedring.all_reduce(torch.ones(300_000), algorithm=algorithm, timeout=60)
    assert time.monotonic() - started < 10
    return str(raised.value)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_killed_rank_is_noticed_at_once(algorithm):
    outcomes = start_ranks(3, check_killed, algorithm)
    assert outcomes[1] == ("died", -9)
    assert all(state == "returned" and "rank 1" in text for state, text in (outcomes[0], outcomes[2])), outcomes


def check_reuse(rank: int, world: int) -> None:
    for _ in range(20):
        tensor = fusedring.empty(1000, 10)
        tensor.fill_(rank)
        fusedring.all_reduce(tensor[10:20], op="sum")
        assert (tensor[10:20] == world * (world - 1) / 2).all()
        assert (tensor[:10] == rank).all()
        del tensor
    from fusedring.group.groups import communicator_of

    assert len(communicator_of()._workspace._arenas) <= 3, "released arenas stay mapped"
    with pytest.raises(fusedring.OutOfMemoryError, match=r"cannot reserve \d+ bytes"):
        fusedring.empty(1 << 45)
    fusedring.all_reduce(torch.ones(3))


def test_memory_is_given_back_and_running_out_is_an_error():
    run_ranks(2, check_reuse)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda t: fusedring.all_reduce(t, op="max"), "op must be one of avg, sum, got 'max'"),
        (lambda t: fusedring.all_reduce(t, algorithm="tree"), "algorithm must be one of auto, ring"),
        (lambda t: fusedring.all_reduce(t, wire_dtype="fp8"), "wire_dtype must be None, 'fp16', 'bf16'"),
        (lambda t: fusedring.all_reduce(t, engine="mpi"), "engine must be one of auto, host, triton"),
        (lambda t: fusedring.all_reduce(t, engine="triton"), "TRITON_INTERPRET=1"),
        (lambda t: fusedring.all_reduce(t, timeout=0), "timeout must be a positive number"),
        (lambda t: fusedring.all_reduce(t, timeout=float("inf")), "timeout must be a positive number"),
        (lambda t: fusedring.all_reduce(t.t()), "must be contiguous"),
        (lambda t: fusedring.all_reduce(t.int()), "dtype must be one of"),
        (lambda t: fusedring.all_reduce(t.to_sparse()), "must be dense"),
        (lambda t: fusedring.empty(-1), "size must not be negative"),
    ],
)
def test_wrong_arguments_name_the_choices(call, text):
    with pytest.raises(ValueError, match=text):
        call(torch.ones(2, 3))


def test_a_lone_process_needs_no_group_unless_it_was_started_as_one_of_many(monkeypatch):
    assert (fusedring.all_reduce(torch.ones(5), scale=2.0) == 2).all()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group"):
        fusedring.all_reduce(torch.ones(5))


def check_late_after_close(rank: int, world: int, elements: int, algorithm: str) -> None:
    tensor = fusedring.empty(elements).fill_(rank)
    fusedring.all_reduce(tensor)
    dist.barrier()
    tensor.fill_(rank)
    if rank == 0:
        with pytest.raises(fusedring.CollectiveTimeoutError):
            fusedring.all_reduce(tensor, timeout=0.5, algorithm=algorithm)
        fusedring.close()
        tensor.fill_(777)
    else:
        time.sleep(1.5)
        with pytest.raises(fusedring.FusedRingError):
            fusedring.all_reduce(tensor, timeout=5, algorithm=algorithm)
        assert (tensor == rank).all()
        fusedring.close()
    dist.barrier()
    assert (tensor == (777 if rank == 0 else rank)).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rank_that_comes_after_a_timeout_and_close_writes_nothing(algorithm):
    run_ranks(2, check_late_after_close, 100_000, algorithm)


def check_two_threads(rank: int, world: int) -> None:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    results = []

    def reduce(group) -> None:
        results.append(fusedring.all_reduce(torch.full((10,), float(rank)), op="sum", group=group, timeout=20))

    threads = [threading.Thread(target=reduce, args=(group,)) for group in (groups if rank == 0 else groups[::-1])]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join(30)
    assert len(results) == 2
    assert all((result == 1).all() for result in results)


def test_two_groups_may_open_in_two_threads():
    run_ranks(2, check_two_threads)
