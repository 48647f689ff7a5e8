"""What one run measures: cases and turns, and the ranks that are started for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedring.bench import measure as measuring
from fusedring.bench.against import Case
from fusedring.bench.measure import CROWD_SIZES, CROWDS, Results, Settings, measure
from fusedring.bench.memory import peak_bytes
from fusedring.bench.ranks import Mpi
from fusedring.bench.steps import FUSEDRING, TORCH
from tests.ranks import run_ranks

SETTINGS = Settings(
    ("all_reduce", "training", "goals"), (4096,), ("float32",), (None,), ("ring",), "cpu", quick=False, talks=False
)


def test_a_wire_that_is_the_dtype_is_none():
    settings = replace(SETTINGS, sizes=(64, 128), dtypes=("bfloat16", "float64"), wires=("bf16", None, "fp16"))
    half, bfloat, double = torch.float16, torch.bfloat16, torch.float64
    forms = [(bfloat, None), (bfloat, half), (double, bfloat), (double, None), (double, half)]
    assert settings.cases == [Case(nbytes, dtype, wire) for dtype, wire in forms for nbytes in (64, 128)]


@pytest.mark.parametrize("quick", [False, True])
def test_small_tensors_are_reduced_often_enough_for_a_percentile(quick):
    settings = replace(SETTINGS, quick=quick)
    turns = [settings.turns(nbytes) for nbytes in (64, 64 << 10, (1 << 20) - 1, 1 << 20, 25 << 20, 100 << 20, 1 << 30)]
    assert min(turns[:3]) >= 200
    assert turns == sorted(turns, reverse=True)
    assert turns[-1] >= 5


class Started:
    """In place of the ranks: what would have been started, and with what."""

    def __init__(self, monkeypatch: Any) -> None:
        self.runs: list[tuple[str, int, Any, Any]] = []
        monkeypatch.setattr(measuring, "run_ranks", self.run_ranks)

    def run_ranks(self, function: Any, ranks: int, argument: Any, mpi: Any = None) -> list[Any]:
        self.runs.append((function.__name__, ranks, argument, mpi))
        return [{"measure_here": Results(), "measure_crowd": ["crowd"], "peak_bytes": 7}[function.__name__]] * ranks


def test_goals_start_ranks_of_their_own(monkeypatch):
    started, mpi = Started(monkeypatch), Mpi("mpiexec", "MPICH 1")
    results = measure(SETTINGS, 2, mpi)
    assert started.runs == [
        ("measure_here", 2, SETTINGS, mpi),
        *(("measure_crowd", ranks, SETTINGS, None) for ranks in CROWDS),
        ("peak_bytes", 2, TORCH, None),
        ("peak_bytes", 2, FUSEDRING, None),
    ]
    assert (results.mpi, results.memory) == ("MPICH 1", {TORCH: 7, FUSEDRING: 7})
    assert results.crowds == {4: ["crowd"], 5: ["crowd"]}


@pytest.mark.parametrize("less", [{"quick": True}, {"parts": ("all_reduce", "training")}])
def test_less_is_measured_with_one_start(monkeypatch, less):
    started = Started(monkeypatch)
    settings = replace(SETTINGS, **less)
    assert measure(settings, 3, "not installed").mpi == "not installed"
    assert started.runs == [("measure_here", 3, settings, None)]


def measure_part(rank: int, world: int, part: str) -> Results:
    return measuring.measure_here(replace(SETTINGS, parts=(part,), quick=True))


def test_only_what_was_asked_for_is_measured():
    results = run_ranks(2, measure_part, "all_reduce")[0]
    assert [cell.nbytes for cell in results.cells] == 4 * [4096]
    assert (results.steps, results.latency, results.wrong) == ([], None, 0)


@pytest.mark.slow
def test_goals_need_both():
    results = run_ranks(2, measure_part, "goals")[0]
    assert results.measured
    assert results.latency is not None
    assert {step.way for step in results.steps} >= {TORCH, FUSEDRING}


def measure_peak(rank: int, world: int, wrapper: str) -> int:
    return peak_bytes(wrapper)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [TORCH, FUSEDRING])
def test_peak_memory_holds_parameters_and_gradients(wrapper):
    peaks = run_ranks(2, measure_peak, wrapper)
    assert peaks[0] == peaks[1]
    assert peaks[0] > 2 * 2 * 4 * 8_396_800


def measure_crowd(rank: int, world: int) -> Any:
    return measuring.measure_crowd(replace(SETTINGS, quick=True))


@pytest.mark.slow
def test_more_ranks_than_cores():
    crowd = run_ranks(4, measure_crowd)[0]
    assert [measured.cells[0].nbytes for measured in crowd] == list(CROWD_SIZES)
    assert all(cell.wrong == 0 and cell.timing for measured in crowd for cell in measured.cells)
