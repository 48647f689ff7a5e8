"""Traces and reports: what they hold, that it nests, and that it adds up."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedring
from fusedring import FusedRingDDP
from fusedring.observe.report import BucketReport, LaunchReport, StepReport
from fusedring.observe.tracing import Event, Track, _steps, recording
from tests.ranks import run_ranks

STEPS = 9


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))


def train_traced(rank: int, world: int, directory: str) -> list[float]:
    """Train a few steps; when each of them began and the last one ended."""
    model = FusedRingDDP(make_model(), bucket_cap_mb=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 256)
    model(x).sum().backward()
    times = []
    with fusedring.trace(directory):
        assert recording()
        for _ in range(STEPS):
            times.append(time.perf_counter())
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(x)
        times.append(time.perf_counter())
    assert not recording()
    return times


def load(directory: Path) -> list[dict]:
    return json.loads((directory / "trace.json").read_text())["traceEvents"]


def test_a_trace_holds_all_ranks_nests_and_adds_up(tmp_path):
    times = run_ranks(2, train_traced, str(tmp_path))
    events = load(tmp_path)
    assert {e["pid"] for e in events} == {0, 1}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["FusedRingDDP 0", "FusedRingDDP 0", "communication", "communication"]
    for rank in (0, 1):
        (track,) = (tid for (pid, tid), name in names.items() if (pid, name) == (rank, "FusedRingDDP 0"))
        (lane,) = (tid for (pid, tid), name in names.items() if (pid, name) == (rank, "communication"))
        mine = [e for e in events if e["pid"] == rank and e["ph"] == "X" and e["tid"] == track]
        assert_nests(mine)
        communication = [e for e in events if e["pid"] == rank and e["ph"] == "X" and e["tid"] == lane]
        assert_nests(communication)
        steps = [e for e in mine if e["name"].startswith("step ")]
        assert [e["name"] for e in steps] == [f"step {number}" for number in range(1, STEPS + 1)]
        measured = [1e6 * (b - a) for a, b in pairwise(times[rank])]
        # The last one ends with its wait. The median, since a process can lose its core between two readings.
        errors = [abs(step["dur"] / took - 1) for step, took in zip(steps[:-1], measured[:-1], strict=True)]
        assert statistics.median(errors) < 0.05
        for step in steps[:-1]:
            inner = [e for e in mine if within(e, step) and not e["name"].startswith("step ")]
            assert [e["name"] for e in inner] == ["forward", "loss", "backward", "wait", "optimizer and data"]
            assert sum(e["dur"] for e in inner) == pytest.approx(step["dur"], rel=1e-6)
        launches = [e for e in communication if e["name"].startswith("fusedring::all_reduce[bucket=")]
        buckets = {e["name"] for e in launches}
        assert len(buckets) > 1
        assert len(launches) == STEPS * len(buckets)
        assert all(e["args"]["algorithm"] in ("one_shot", "two_shot") and e["args"]["bytes"] > 0 for e in launches)
        marks = [e for e in events if e["pid"] == rank and e["name"] == "gradient ready"]
        assert len(marks) == STEPS * len(list(make_model().parameters()))
        assert all(any(within({**mark, "dur": 0}, e) for e in mine if e["name"] == "backward") for mark in marks)
        assert sum(e["name"] == "forward without gradients" for e in mine) == 1
    # One clock: the ranks' launches of one bucket overlap, since none ends before all have come.
    pairs = zip(*([e for e in events if e["pid"] == r and "bucket=0" in e["name"]] for r in (0, 1)), strict=True)
    assert all(a["ts"] < b["ts"] + b["dur"] and b["ts"] < a["ts"] + a["dur"] for a, b in pairs)


def within(inner: dict, outer: dict) -> bool:
    slack = 0.01  # microseconds, of rounding
    return outer["ts"] - slack <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + slack


def assert_nests(spans: list[dict]) -> None:
    """Spans of one track enclose each other or lie apart, as the viewers demand."""
    open_spans: list[dict] = []
    for span in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
        while open_spans and open_spans[-1]["ts"] + open_spans[-1]["dur"] <= span["ts"] + 0.01:
            open_spans.pop()
        assert not open_spans or within(span, open_spans[-1]), (span, open_spans[-1])
        open_spans.append(span)


def trace_twice(rank: int, world: int, directory: str) -> None:
    for size in (10, 20):
        with fusedring.trace(directory):
            fusedring.all_reduce(torch.ones(size))
        dist.barrier()


def test_a_later_trace_replaces_an_earlier_one(tmp_path):
    run_ranks(2, trace_twice, str(tmp_path))
    assert {e["args"]["bytes"] for e in load(tmp_path) if e["name"] == "fusedring::all_reduce"} == {80}
    stale = json.loads((tmp_path / "ranks" / "1.json").read_text())
    (tmp_path / "ranks" / "7.json").write_text(json.dumps({**stale, "rank": 7}))
    with fusedring.trace(tmp_path):
        fusedring.all_reduce(torch.ones(3))
    with fusedring.trace(tmp_path):
        pass
    assert not [e for e in load(tmp_path) if e["name"] == "fusedring::all_reduce"], "an empty block left the old trace"
    with fusedring.trace(tmp_path):
        fusedring.all_reduce(torch.ones(3))
    assert {e["pid"] for e in load(tmp_path)} == {0}, "a rank of an earlier run is in the trace"


def test_the_environment_variable_traces_the_whole_process(tmp_path):
    code = "import torch, fusedring; fusedring.all_reduce(torch.ones(5)); fusedring.all_reduce(torch.ones(5))"
    environment = {**os.environ, "FUSEDRING_TRACE": str(tmp_path / "out"), "RANK": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)
    assert sum(e["name"] == "fusedring::all_reduce" for e in load(tmp_path / "out")) == 2
    (tmp_path / "file").write_text("")
    environment["FUSEDRING_TRACE"] = str(tmp_path / "file")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, timeout=120, env=environment, capture_output=True, text=True)
    assert "the trace cannot be written" in done.stderr


def test_a_failure_in_the_block_still_leaves_a_trace(tmp_path):
    def fail() -> None:
        with fusedring.trace(tmp_path):
            fusedring.all_reduce(torch.ones(5))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not recording()
    assert load(tmp_path)


def test_a_directory_that_cannot_be_made_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"), fusedring.trace(tmp_path / "file"):
        pytest.fail("the block ran")
    assert not recording()


def test_a_step_with_accumulation_goes_from_its_first_forward_to_the_next_steps():
    track = Track("FusedRingDDP 0")
    names = ["forward", "forward", "backward", "wait", "forward", "backward", "wait"]
    events = [Event(track, name, 2.0 * at, 2.0 * at + 1, {"step": at // 4}) for at, name in enumerate(names)]
    derived = [(e.name, e.start, e.end) for e in _steps(events)]
    assert derived == [
        ("loss", 3, 4),
        ("optimizer and data", 7, 8),
        ("step 0", 0, 8),
        ("loss", 9, 10),
        ("step 1", 8, 13),
    ]


def profiled(rank: int, world: int) -> list[tuple[str, float]]:
    model = FusedRingDDP(make_model(), bucket_cap_mb=0.5)
    x = torch.randn(64, 256)
    model(x).sum().backward()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities):
        model(x).sum().backward()  # the profiler's own start is slow
    with torch.profiler.profile(activities=activities) as profile:
        model(x).sum().backward()
        fusedring.all_reduce(torch.ones(5))
    buckets = len(model.report().buckets)
    found = {e.name: e.time_range.elapsed_us() for e in profile.events() if e.name.startswith("fusedring::")}
    assert set(found) == {"fusedring::all_reduce", *(f"fusedring::all_reduce[bucket={b}]" for b in range(buckets))}
    for launch in model.report().launches:  # from the launch to the end of its transfer, by another clock
        assert found[f"fusedring::all_reduce[bucket={launch.bucket}]"] >= 0.9e6 * (launch.end - launch.start)


def test_launches_have_labels_in_torchs_profiler():
    run_ranks(2, profiled)


def test_a_report_prints_as_a_table():
    launches = (LaunchReport(0, 1 << 20, "ring", 10.02, 10.04), LaunchReport(1, 5 << 20, "ring", 10.09, 10.12))
    buckets = (BucketReport(1 << 20, ("b",)), BucketReport(5 << 20, ("a",)))
    text = str(StepReport(10.0, 10.1, buckets, launches, 0.02, 0.6))
    lines = [line.split("│")[1:-1] for line in text.splitlines() if "│" in line]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["0", "1,048,576", "20% of backward", "20.00 ms", "0.00 ms"],
        ["1", "5,242,880", "90% of backward", "30.00 ms", "20.00 ms"],
    ]
    assert "backward 100.0 ms, then waited 20.0 ms; 60% of the communication" in " ".join(text.split())
