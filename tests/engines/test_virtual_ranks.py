"""Virtual ranks on the CPU: all ranks of a group in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusedring
from fusedring.config import ALGORITHMS
from fusedring.plan.plan import split_evenly
from fusedring.testing import virtual_ranks
from tests import reference
from tests.kernels.test_kernels import same_bits
from tests.ranks import run_ranks


def in_interpreter(check: Callable[..., Any], *args: Any) -> Any:
    return run_ranks(1, _interpreted, check, args)[0]


def _interpreted(rank: int, world: int, check: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ["TRITON_INTERPRET"] = "1"
    return check(*args)


def inputs(world: int, elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(elements, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]


def check_collectives(world: int, dtype: torch.dtype, wire: str | None) -> None:
    with virtual_ranks(world, "cpu", parity_bytes=64 << 10) as ranks:
        for algorithm in ALGORITHMS:
            xs = inputs(world, 9001, dtype)
            torch_wire = {None: None, "bf16": torch.bfloat16}[wire]
            want = reference.all_reduce(xs, algorithm, torch_wire, scale=2.0)
            whole, halves = [x.clone() for x in xs], [x.clone() for x in xs]
            ranks.all_reduce(whole, algorithm=algorithm, wire_dtype=wire, scale=2.0)
            ranks.reduce_scatter(halves, algorithm=algorithm, wire_dtype=wire, scale=2.0)
            for rank, (start, stop) in enumerate(split_evenly(9001, world)):
                assert same_bits(halves[rank][start:stop], want[start:stop])
                halves[rank][:start] = halves[rank][stop:] = float("nan")
            ranks.all_gather(halves, algorithm=algorithm, wire_dtype=wire)
            for result in (*whole, *halves):
                assert same_bits(result, want), (world, dtype, algorithm)


@pytest.mark.parametrize(
    ("world", "dtype", "wire"),
    [
        (1, torch.float32, None),
        (2, torch.bfloat16, None),  # some seconds: kernels run under the interpreter
        pytest.param(3, torch.float32, "bf16", marks=pytest.mark.slow),
    ],
)
def test_collectives_give_the_reference_bits(world, dtype, wire):
    in_interpreter(check_collectives, world, dtype, wire)


def check_absent() -> str:
    with virtual_ranks(3, "cpu") as ranks:
        xs = [torch.ones(5003) for _ in range(3)]
        collective = ranks.prepare("all_reduce", xs, algorithm="ring", op="sum")
        started = time.monotonic()
        collective.run(ranks=[0, 2], timeout=1.0)
        with pytest.raises(fusedring.CollectiveTimeoutError) as raised:
            collective.check()
        assert time.monotonic() - started < 20
        assert xs[0].isnan().all()
        assert xs[2].isnan().all()
        assert (xs[1] == 1).all()
        with pytest.raises(fusedring.FusedRingError):  # a failure stays
            ranks.all_reduce([torch.ones(16) for _ in range(3)], timeout=20.0)
        ranks.reset()
        late = []
        xs[0].fill_(1), xs[2].fill_(1)
        collective.run(before=lambda rank: (late.append(rank), time.sleep(0.2 * rank)))
        collective.check()
        assert all((x == 3).all() for x in xs)
    return str(raised.value)


def test_a_virtual_rank_that_does_not_come_is_named():
    assert "rank 2 waited for rank 1 at step 1" in in_interpreter(check_absent)


def check_failing() -> None:
    with virtual_ranks(2, "cpu") as ranks:
        xs = [torch.ones(100) for _ in range(2)]

        def fail(rank: int) -> None:
            if rank == 1:
                raise ZeroDivisionError

        with pytest.raises(fusedring.FusedRingError, match="virtual rank 1 raised"):
            ranks.prepare("all_reduce", xs).run(before=fail)
        ranks.reset()
        ranks.all_reduce(xs)
        started = time.monotonic()
        with pytest.raises(fusedring.FusedRingError, match="did not end in time"):
            ranks.prepare("all_reduce", xs).run(before=lambda rank: time.sleep(1000 * rank), timeout=0.5)
        assert time.monotonic() - started < 30
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)  # no child is left
        fork = os.fork

        def fork_once() -> int:
            os.fork = refuse
            return fork()

        def refuse() -> int:
            raise BlockingIOError

        os.fork = fork_once
        ranks.reset()
        with pytest.raises(BlockingIOError):
            ranks.all_reduce(xs)
        os.fork = fork
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        ranks.reset()
        ranks.all_reduce([x.requires_grad_() for x in xs])


def test_a_virtual_rank_that_raises():
    in_interpreter(check_failing)


def check_arguments() -> None:
    for wrong, match in (
        ({"world_size": 0}, "world_size must be at least 1"),
        ({"world_size": 2, "channels": 0}, "channels must lie between"),
        ({"world_size": 2, "parity_bytes": 100}, "multiple of 256"),
        ({"world_size": 2, "parity_bytes": 256}, "at least 2048"),
        ({"world_size": True}, "world_size must be at least 1"),
        ({"world_size": 2, "stages": 0}, "stages must lie between"),
        ({"world_size": 2, "device": "meta"}, "cuda or cpu"),
    ):
        with pytest.raises(ValueError, match=match), virtual_ranks(**{"device": "cpu", **wrong}):
            pass
    with virtual_ranks(2, "cpu") as ranks:
        good = [torch.ones(8), torch.ones(8)]
        for tensors, how, match in (
            (good[:1], {}, "a tensor for each of 2 ranks"),
            ([good[0], torch.ones(9)], {}, "one size and dtype"),
            ([good[0], torch.ones(8).half()], {}, "one size and dtype"),
            ([x.view(2, 4) for x in good], {}, "flat, contiguous tensors"),
            (good, {"algorithm": "tree"}, "algorithm must be one of"),
            (good, {"wire_dtype": "fp8"}, "wire_dtype"),
            ([x.int() for x in good], {}, "dtype must be one of"),
        ):
            with pytest.raises(ValueError, match=match):
                ranks.prepare("all_reduce", tensors, **how)
        with pytest.raises(ValueError, match="kind must be one of"):
            ranks.prepare("broadcast", good)


def test_arguments_that_cannot_be():
    in_interpreter(check_arguments)


def test_without_an_interpreter_or_a_gpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"), virtual_ranks(2, "cpu"):
        pass
    if not torch.cuda.is_available():
        with pytest.raises(fusedring.FusedRingError, match="no GPU here"), virtual_ranks(2):
            pass
