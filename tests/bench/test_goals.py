"""Goals: met, missed or not measured, from results that were made up."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from fusedring.bench import goals
from fusedring.bench.all_reduce import Cell, Measured
from fusedring.bench.clock import Timing
from fusedring.bench.goals import GOALS, Goal, judge, size_in_words, why_not_judged
from fusedring.bench.measure import CROWD_SIZES, CROWDS, SIZES, Results
from fusedring.bench.memory import STATED_SLOTS
from fusedring.bench.models import MODELS
from fusedring.bench.steps import FUSEDRING, TORCH, Step


def times(*seconds: float) -> Timing:
    return Timing(seconds)


def with_tail(median: float) -> Timing:
    """Of 200 times the last three take three times the median."""
    return Timing((median,) * 197 + (3 * median,) * 3)


def cell(nbytes: int, library: str, algorithm: str, tensors: str, timing: Timing | None, wire=None, wrong=0) -> Cell:
    return Cell(nbytes, "float32", wire, library, algorithm, tensors, wrong, timing)


def case(nbytes: int, ours: float, *, wire: str | None = None, speed: float) -> Measured:
    """Ours takes `ours` seconds, gloo `speed` times as long, MPI half of that; ring and ordinary tensors twice ours."""
    cells = [
        cell(nbytes, "copy", "", "ordinary", times(ours / 1.05), wire),
        cell(nbytes, "gloo", "", "ordinary", times(ours * speed), wire),
        cell(nbytes, "fusedring", "auto", "workspace", times(ours), wire),
        cell(nbytes, "fusedring", "ring", "workspace", times(2 * ours), wire),
        cell(nbytes, "fusedring", "auto", "ordinary", times(2 * ours), wire),
    ]
    if wire is None:
        cells.append(cell(nbytes, "MPI", "", "ordinary", times(ours * speed / 2)))
    return Measured(tuple(cells), {})


def results_of(speed: float) -> Results:
    """All that a full run measures, with a library that is `speed` times as fast as the others."""
    measured = [case(nbytes, 1e-6 * nbytes, wire=wire, speed=speed) for wire in (None, "bfloat16") for nbytes in SIZES]
    steps = []
    for model in MODELS:
        steps.append(Step(model.name, TORCH, 1, 0, times(0.01 * (speed + 1)), times(0.01), 0.01 * speed, None))
        steps.append(Step(model.name, FUSEDRING, 1, 0, times(0.02), times(0.01), 0.01, 0.5))
    crowds = {}
    for ranks in CROWDS:
        crowds[ranks] = [case(nbytes, 1e-6 * nbytes, speed=speed) for nbytes in CROWD_SIZES]
        first = crowds[ranks][0]
        tail = replace(first.cells[2], timing=with_tail(first.cells[2].timing.median))
        crowds[ranks][0] = replace(first, cells=(*first.cells[:2], tail, *first.cells[3:]))
    memory = {TORCH: 100 << 20, FUSEDRING: (100 << 20) + 2 * STATED_SLOTS}
    return Results(measured, steps, times(20e-6), crowds, memory, {"cold": 3.0, "warm": 1.0}, "MPICH 1")


def verdicts(results: Results) -> dict[str, goals.Verdict]:
    found = judge(results)
    assert [verdict.work for verdict in found] == [goal.work for goal in GOALS], "every goal keeps its row"
    return {verdict.work: verdict for verdict in found}


def test_a_library_that_reaches_all_goals():
    for verdict in verdicts(results_of(speed=24.0)).values():
        wanted = "met" if "first launch" not in verdict.work else "not judged"
        assert (verdict.verdict, verdict.reason) == (wanted, ""), verdict


def test_what_is_reached():
    found = verdicts(results_of(speed=12.0))
    reached = {work: (verdict.reached, verdict.verdict) for work, verdict in found.items()}
    assert reached["auto, 64 KiB to 100 MiB: speed / gloo's"] == (pytest.approx(12), "missed")
    assert reached["ring, 64 KiB to 100 MiB: speed / gloo's"] == (pytest.approx(6), "missed")
    assert reached["auto, bf16 wire, 64 KiB to 100 MiB: speed / torch's bf16 hook over gloo's"][0] == pytest.approx(12)
    assert reached["auto, ordinary tensors, 64 KiB to 100 MiB: speed / gloo's"] == (pytest.approx(6), "met")
    assert reached["auto, 100 MiB: time / concurrent copy's"] == (pytest.approx(1.05), "met")
    assert reached["auto, 100 MiB: speed / MPI's"] == (pytest.approx(6), "met")
    assert reached["auto, 64 bytes, call after call: latency"] == (pytest.approx(20), "met")
    for model in ("GPT of 3 million", "8 x Linear(1024)"):
        assert reached[f"{model}: exposed communication / torch DDP's"] == (pytest.approx(1 / 12), "met")
    assert reached["8 x Linear(1024): speed of a step / torch DDP's"] == (pytest.approx(6.5), "met")
    assert reached["auto, 4 ranks: 99th percentile / median"] == (pytest.approx(3), "met")
    assert reached["8 x Linear(1024): peak memory / (torch DDP's + slots)"] == (1.0, "met")
    assert reached["import and first launch, cold cache"] == (3.0, "not judged")


def test_limits_are_met_from_both_sides(monkeypatch):
    limits = [Goal("at least", 2.0, True, "x", lambda results: 2.0), Goal("at most", 2.0, False, "x", lambda _: 2.0)]
    beyond = [
        replace(limits[0], reached=lambda _: 1.99, reason="counted"),
        replace(limits[1], reached=lambda _: 2.01, reason="known"),
    ]
    monkeypatch.setattr(goals, "GOALS", (*limits, *beyond))
    found = judge(Results())
    assert [verdict.verdict for verdict in found] == ["met", "met", "missed", "missed"]
    assert [verdict.goal for verdict in found] == [">= 2 x", "<= 2 x", ">= 2 x", "<= 2 x"]
    assert [verdict.reason for verdict in found] == ["", "", "counted", "known"]


def test_nothing_is_judged_that_was_not_measured():
    found = verdicts(Results(mpi="not installed"))
    assert {verdict.verdict for verdict in found.values()} == {"not measured"}
    for work, verdict in found.items():
        assert verdict.reached is None
        assert verdict.reason == ("MPI: not installed" if "MPI" in work else "not measured in this run")


def test_what_is_wrong_meets_no_goal():
    results = results_of(speed=24.0)
    first = results.measured[0]
    bad = replace(first.cells[2], timing=None, wrong=1234)
    results.measured[0] = replace(first, cells=(*first.cells[:2], bad, *first.cells[3:]))
    results.steps[1] = replace(results.steps[1], wrong=7, step=None, no_sync=None, exposed=None)
    assert results.wrong == 1241
    found = verdicts(results)
    for work in ("auto, 64 KiB to 100 MiB: speed / gloo's", "auto, 64 KiB: speed / MPI's"):
        assert (found[work].verdict, found[work].reason) == ("not measured", "1,234 wrong elements")
    assert found["8 x Linear(1024): speed of a step / torch DDP's"].reason == "7 wrong elements"
    assert found["ring, 64 KiB to 100 MiB: speed / gloo's"].verdict == "met"


def test_noise_is_not_divided_by():
    results = results_of(speed=24.0)
    results.steps[0] = replace(results.steps[0], exposed=-0.001)
    results.steps[3] = replace(results.steps[3], exposed=-0.001)
    found = verdicts(results)
    work = f"{MODELS[0].name}: exposed communication / torch DDP's"
    assert (found[work].verdict, "noise" in found[work].reason) == ("not measured", True)
    work = f"{MODELS[1].name}: exposed communication / torch DDP's"
    assert (found[work].verdict, found[work].reached) == ("met", 0.0)


def test_goals_belong_to_two_ranks_with_cores_of_their_own(monkeypatch):
    for cores, ranks, device, judged in (
        (2, 2, "cpu", True),
        (8, 2, "cpu", True),
        (1, 2, "cpu", False),
        (8, 3, "cpu", False),
        (8, 2, "cuda", False),
    ):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert (why_not_judged(ranks, device) is None) is judged


def test_sizes_in_words():
    assert [size_in_words(n) for n in (64, 1000, 1 << 10, 64 << 10, 3 << 19, 25 << 20)] == [
        "64 B",
        "1,000 B",
        "1 KiB",
        "64 KiB",
        "1536 KiB",
        "25 MiB",
    ]
