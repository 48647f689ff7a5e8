"""The measurement of all_reduce: every way is verified, then timed, and compared as nccl-tests does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusedring
from fusedring.bench.against import Case, Way, others
from fusedring.bench.all_reduce import Measured, latency, measure_case
from fusedring.bench.place import Place, take_place
from fusedring.config import ALGORITHMS
from tests.ranks import run_ranks

TURNS = 3


def measured(rank: int, world: int, case: Case, *algorithms: str) -> Measured:
    return measure_case(case, take_place("cpu"), algorithms, turns=TURNS)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_way_is_right_and_timed(world):
    case = Case(4096, torch.float32, None)
    results = run_ranks(world, measured, case, "auto", *ALGORITHMS)
    assert all(result == results[0] for result in results), "ranks must agree"
    cells = results[0].cells
    ours = [("fusedring auto", "workspace"), *((f"fusedring {name}", "workspace") for name in ALGORITHMS)]
    names = [(cell.name, cell.tensors) for cell in cells]
    assert names == [("copy", "ordinary"), ("gloo", "ordinary"), *ours, ("fusedring auto", "ordinary")]
    copy, gloo = cells[:2]
    for cell in cells:
        assert cell.wrong == 0
        assert cell.timing.repeats == TURNS
        median = cell.timing.median
        assert 0 < median <= cell.timing.p99
        assert cell.algbw == 4096 / median
        assert cell.busbw == pytest.approx(2 * (world - 1) / world * 4096 / median)
        assert cell.share == copy.timing.median / median
        assert cell.times_baseline == (gloo.timing.median / median if cell is not copy else None)
    assert set(results[0].missing) == {"MPI"}


@pytest.mark.parametrize(
    ("dtype", "wire"), [(torch.float32, torch.bfloat16), (torch.bfloat16, None), (torch.float64, torch.float16)]
)
def test_dtypes_and_wires(dtype, wire):
    result = run_ranks(2, measured, Case(4096, dtype, wire), "ring")[0]
    assert [cell.wrong for cell in result.cells] == [0, 0, 0, 0]
    assert {(cell.dtype, cell.wire) for cell in result.cells} == {
        (str(dtype)[len("torch.") :], str(wire)[len("torch.") :] if wire else None)
    }


def measured_beside_a_wrong_one(rank: int, world: int, last_rank_only: bool) -> tuple[Measured, int]:
    calls = [0]

    def makers(case: Case, place: Place) -> tuple[list[Way], dict[str, str]]:
        tensor = torch.empty(case.elements)

        def act() -> torch.Tensor:
            calls[0] += 1
            fusedring.all_reduce(tensor)
            if rank == world - 1 or not last_rank_only:
                tensor[5] += 1
            return tensor

        return [Way("hasty", "", "ordinary", tensor, act), *others(case, place)[0]], {}

    result = measure_case(Case(4096, torch.float32, None), take_place("cpu"), ("ring",), turns=TURNS, makers=makers)
    return result, calls[0]


@pytest.mark.parametrize("last_rank_only", [True, False])
def test_what_is_wrong_is_counted_and_not_timed(last_rank_only):
    for result, calls in run_ranks(2, measured_beside_a_wrong_one, last_rank_only):
        hasty, gloo = result.cells[1:3]
        assert hasty.wrong == (1 if last_rank_only else 2)
        assert (hasty.timing, hasty.algbw, hasty.busbw, hasty.share, hasty.times_baseline) == (None,) * 5
        assert calls == 1, "timed though it was wrong"
        assert gloo.times_baseline == 1.0, "what is wrong is no baseline"
        assert result.timing_of("hasty", "ordinary") is None
        assert result.timing_of("fusedring ring", "workspace").repeats == TURNS


def measured_latency(rank: int, world: int) -> Any:
    return latency(take_place("cpu"), nbytes=64, rounds=2)


def test_latency_is_of_one_call():
    timing = run_ranks(2, measured_latency)[0]
    assert timing.repeats == 2
    assert 0 < timing.median < 0.05, "that would be the time of all calls together"
