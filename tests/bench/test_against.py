"""Which other libraries take part, and what is said of those that cannot."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from fusedring.bench import symmetric_memory
from fusedring.bench.against import LIBRARIES, Case, Way, baseline, others, with_mpi, with_symmetric_memory
from fusedring.bench.place import Place
from tests.ranks import run_ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class FakeWorld:
    """MPI's communicator of two ranks, the other of which contributes the same."""

    def Allreduce(self, send: Any, receive: numpy.ndarray, op: Any) -> None:  # noqa: N802
        assert (send, op) == ("in place", "sum")
        receive *= 2


@pytest.fixture
def mpi(monkeypatch) -> FakeWorld:
    names = SimpleNamespace(IN_PLACE="in place", SUM="sum")
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=names))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", names)
    return FakeWorld()


def test_mpi_averages_in_place(mpi):
    way = with_mpi(Case(64, torch.float32, None), Place(CPU, 0, 2, None, mpi))
    way.tensor.copy_(torch.arange(16.0))
    assert way.act() is way.tensor
    assert way.tensor.tolist() == list(range(16))


@pytest.mark.parametrize(
    ("case", "with_it", "words"),
    [
        (Case(64, torch.float32, None), False, "did not start these ranks"),
        (Case(64, torch.bfloat16, None), True, "no narrower wire"),
        (Case(64, torch.float32, torch.float16), True, "no narrower wire"),
    ],
)
def test_where_mpi_cannot(mpi, case, with_it, words):
    assert words in with_mpi(case, Place(CPU, 0, 2, None, mpi if with_it else None))


def test_libraries_go_with_the_device():
    def make(case: Case, place: Place) -> Way:
        return Way(f"made on {place.device.type}", "", "ordinary", torch.empty(0), torch.Tensor)

    libraries = {"cpu": {"a": make, "b": lambda case, place: "not here"}, "cuda": {"c": make}}
    case = Case(64, torch.float32, None)
    ways, missing = others(case, Place(CPU, 0, 1), libraries)
    assert ([way.library for way in ways], missing) == (["made on cpu"], {"b": "not here"})
    ways, missing = others(case, Place(GPU, 0, 1), libraries)
    assert ([way.library for way in ways], missing) == (["made on cuda"], {})


def test_what_is_compared_on_each_device():
    assert [baseline(device) for device in ("cpu", "cuda")] == ["gloo", "NCCL"]
    assert list(LIBRARIES["cuda"]) == ["NCCL", *(f"torch {name}" for name in symmetric_memory.OPERATIONS)]


def check_symmetric(rank: int, world: int) -> None:
    """Of the real one there is none without GPUs; of the double there is one, but not on rank 1."""
    case, place = Case(64, torch.float32, None), Place(CPU, rank, world, dist.group.WORLD)
    assert isinstance(with_symmetric_memory("one_shot_all_reduce", case, place), str)
    real, torch.cuda.synchronize = torch.cuda.synchronize, lambda device: None

    def double(name: str, elements: int, dtype: torch.dtype, *_: Any) -> Any:
        if name == "fails on rank 1" and rank == 1:
            raise RuntimeError("no fabric\nand more lines")
        memory = torch.full((elements,), rank + 1.0, dtype=dtype)
        return memory, lambda: torch.full((elements,), 3.0)

    symmetric_memory.symmetric_all_reduce = double
    why = with_symmetric_memory("fails on rank 1", case, place)
    assert why == ("RuntimeError: no fabric" if rank == 1 else "it failed on another rank")
    way = with_symmetric_memory("works", case, place)
    assert (way.library, way.tensors) == ("torch works", "symmetric")
    assert way.act().tolist() == [1.5] * 16
    assert with_symmetric_memory("works", Case(64, torch.float32, torch.bfloat16), place) == "it has no narrower wire"
    torch.cuda.synchronize = real


def test_symmetric_memory_takes_part_on_all_ranks_or_on_none():
    run_ranks(2, check_symmetric)
