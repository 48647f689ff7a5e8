"""`fusedring bench` as a user starts it, and what it prints of results that were made up."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedring.bench.all_reduce import Cell, Measured
from fusedring.bench.clock import Timing
from fusedring.bench.measure import Results, Settings
from fusedring.bench.steps import FUSEDRING, ONE_RANK, TORCH, Step
from fusedring.cli import bench, main
from fusedring.group.spawn import RanksFailedError

BENCH = [sys.executable, "-m", "fusedring", "bench"]


def run_bench(*arguments: str, deadline: float = 120) -> subprocess.CompletedProcess:
    return subprocess.run([*BENCH, *arguments], capture_output=True, text=True, timeout=deadline, check=False)


def test_json_is_all_that_stdout_gets(tmp_path):
    """Takes over two seconds, as three processes import torch, and one matplotlib."""
    plot, before = tmp_path / "busbw.png", set(Path("/dev/shm").iterdir())
    options = ("--only", "all_reduce", "--quick", "--sizes", "1K,16K", "--wires", "none", "--algorithms", "ring")
    done = run_bench("--json", "--plot", str(plot), *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["wrong"] == 0
    assert result["baseline"] == "gloo"
    assert result["training"] == result["goals"] == []
    ours = [("fusedring", "ring", "workspace"), ("fusedring", "ring", "ordinary")]
    for nbytes in (1024, 16384):
        cells = [cell for cell in result["all_reduce"] if cell["nbytes"] == nbytes]
        ways = [(cell["library"], cell["algorithm"], cell["tensors"]) for cell in cells if cell["library"] != "MPI"]
        assert ways == [("copy", "", "ordinary"), ("gloo", "", "ordinary"), *ours]
        for cell in cells:
            assert cell["timing"]["repeats"] == 200
            assert 0 < cell["timing"]["median"] <= cell["timing"]["p99"]
            assert cell["busbw"] == pytest.approx(nbytes / cell["timing"]["median"])  # of two ranks: 2(2-1)/2 = 1
    conditions = result["conditions"]
    assert (conditions["ranks"], conditions["threads"], conditions["gpus"]) == (2, 1, [])
    assert conditions["torch"] == torch.__version__
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert set(Path("/dev/shm").iterdir()) <= before


@pytest.mark.slow
def test_a_quick_run_is_quick_and_covers_everything():
    """A minute."""
    done = run_bench("--quick", "--json", deadline=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {cell["nbytes"] for cell in result["all_reduce"]} == {64 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20}
    assert {step["way"] for step in result["training"]} == {ONE_RANK, TORCH, FUSEDRING}
    verdicts = {goal["work"]: goal["verdict"] for goal in result["goals"]}
    if result["not_judged"] is None:
        assert verdicts["auto, 64 KiB to 100 MiB: speed / gloo's"] in ("met", "missed")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "12"], "a multiple of 8, got '12'"),
        (["--sizes", "64K,x"], "must be bytes, as 4096, 64K or 25M, and a multiple of 8, got 'x'"),
        (["--sizes", "-8"], "got '-8'"),
        (["--sizes", "0"], "got '0'"),
        (["--dtypes", "float32,int8"], "must be of float32, float64, float16, bfloat16, got 'int8'"),
        (["--wires", "bfloat16"], "must be of none, fp16, bf16, got 'bfloat16'"),
        (["--algorithms", "tree"], "must be of auto, ring, two_shot, one_shot, master, got 'tree'"),
        (["--only", ""], "must be of all_reduce, training, goals, got ''"),
        (["--ranks", "17"], "must be at most 16, got '17'"),
        (["--ranks", "0"], "at least 1, got '0'"),
    ],
)
def test_wrong_arguments_exit_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "goals", "--ranks", "3"], "--only goals: the goals are for 2 ranks on 2 cores or more"),
        (["--only", "training", "--plot", "x.png"], "which --only training leaves out"),
        (["--plot", "/nowhere/x.png"], "/nowhere is not a folder"),
        (["--device", "cuda", "--ranks", "3"], "--ranks 3 needs as many GPUs, and torch can use 0 here"),
    ],
)
def test_what_does_not_go_together_exits_with_2(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure", pytest.fail)
    monkeypatch.setattr(bench, "_gpus", lambda: 0)
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


class Double:
    """In place of the ranks: keeps what they are told, and gives what it was given."""

    def __init__(self, monkeypatch: Any, results: Results | BaseException) -> None:
        self.results = results
        self.told: tuple[Settings, int, Any] | None = None
        monkeypatch.setattr(bench, "measure", self.measure)
        monkeypatch.setattr(bench, "find_mpi", lambda ranks: "not installed")
        monkeypatch.setattr(bench, "_gpus", lambda: 0)

    def measure(self, *told: Any) -> Results:
        self.told = told  # type: ignore[assignment]
        if isinstance(self.results, BaseException):
            raise self.results
        return self.results


RIGHT = Cell(
    1 << 20, "float32", None, "fusedring", "ring", "workspace", 0, Timing((1e-3, 2e-3, 3e-3)), 5e8, 6e8, 0.5, 7.25
)
GLOO = replace(RIGHT, library="gloo", algorithm="", tensors="ordinary", times_baseline=1.0)
WRONG = replace(RIGHT, wrong=3, timing=None, algbw=None, busbw=None, share=None, times_baseline=None)


def results_of(*cells: Cell) -> Results:
    steps = [
        Step("model", ONE_RANK, 10, 0, Timing((0.01,)), None, None, None),
        Step("model", TORCH, 10, 0, Timing((0.03,)), Timing((0.01,)), 0.02, None),
        Step("model", FUSEDRING, 10, 0, Timing((0.015,)), Timing((0.01,)), 0.005, 0.8),
    ]
    return Results([Measured(cells, {"MPI": "did not start these ranks"})], steps, mpi="not installed")


def words(line: str) -> list[str]:
    return line.split()


def lines_with(text: str, *parts: str) -> list[list[str]]:
    return [words(line) for line in text.splitlines() if all(part in line for part in parts)]


def test_the_tables(monkeypatch, capsys):
    double = Double(monkeypatch, results_of(GLOO, RIGHT))
    assert main(["bench"]) == 0
    text = capsys.readouterr().out
    assert lines_with(text, "fusedring", "ring", "workspace")[0][-7:] == words("2,000.0 3,000.0 0.50 0.60 50% 7.25 0")
    assert lines_with(text, "without MPI") == [["without", "MPI:", "not", "installed"]]
    assert lines_with(text, "torch DDP", "30.00")[0][-8:] == words("30.00 30.00 10.00 20.00 - 1.00 1.00 0")
    assert lines_with(text, FUSEDRING)[0][-8:] == words("15.00 15.00 10.00 5.00 80% 2.00 0.25 0")
    assert "load " in text
    assert "1 thread in each rank" in text
    if bench.why_not_judged(2, "cpu") is None:
        assert lines_with(text, "64 KiB to 100 MiB", "ordinary")[0][-9:-5] == [">=", "5", "x", "-"]
    settings, ranks, mpi = double.told
    assert (ranks, mpi, settings.device, settings.quick) == (2, "not installed", "cpu", False)
    assert [str(case) for case in settings.cases[::5]] == [
        "65,536 bytes of float32",
        "65,536 bytes of float32, wire bfloat16",
        "65,536 bytes of bfloat16",
    ]


def test_what_is_wrong_has_no_speed_and_exits_with_1(monkeypatch, capsys):
    Double(monkeypatch, results_of(GLOO, WRONG))
    assert main(["bench"]) == 1
    out, err = capsys.readouterr()
    assert lines_with(out, "fusedring", "ring", "workspace")[0][-7:] == words("refused - - - - - 3")
    assert "3 elements were wrong" in err
    assert main(["bench", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["wrong"] == 3
    assert result["all_reduce"][1]["timing"] is None


def test_a_missed_goal_is_no_error(monkeypatch, capsys):
    slow = replace(GLOO, nbytes=100 << 20, library="copy", timing=Timing((1e-3,)))
    ours = replace(RIGHT, nbytes=100 << 20, algorithm="auto", timing=Timing((2e-3,)))
    Double(monkeypatch, results_of(slow, ours))
    if bench.why_not_judged(2, "cpu") is not None:
        pytest.skip("goals are not judged on one core")
    assert main(["bench", "--only", "goals"]) == 0
    text = capsys.readouterr().out
    assert lines_with(text, "100 MiB: time")[0][-6:] == ["<=", "1.1", "x", "2.00", "x", "missed"]
    assert "all_reduce, mean" not in text


def test_other_numbers_of_ranks_get_no_verdicts(monkeypatch, capsys):
    double = Double(monkeypatch, results_of(GLOO, RIGHT))
    assert main(["bench", "--ranks", "3"]) == 0
    text = capsys.readouterr().out
    assert "no verdicts: the goals are for 2 ranks" in text
    assert not re.search(r"\b(met|missed)\b", text)
    assert double.told[0].parts == ("all_reduce", "training")
    assert main(["bench", "--ranks", "3", "--json"]) == 0
    assert "2 ranks" in json.loads(capsys.readouterr().out)["not_judged"]


def test_gpus_are_taken_where_there_are_some(monkeypatch, capsys):
    double = Double(monkeypatch, results_of(replace(GLOO, library="NCCL"), RIGHT))
    monkeypatch.setattr(bench, "_gpus", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: f"GPU {gpu}")
    assert main(["bench"]) == 0
    settings, ranks, mpi = double.told
    assert (settings.device, ranks, mpi) == ("cuda", 4, "not used")
    assert settings.parts == ("all_reduce", "training")
    text = capsys.readouterr().out
    assert "4 ranks in GPU 0, GPU 1, GPU 2, GPU 3" in text
    assert "x NCCL" in text
    assert "links between GPUs are slower" in text


@pytest.mark.parametrize(
    ("ends", "code", "message"),
    [(KeyboardInterrupt(), 130, "interrupted"), (RanksFailedError("rank 1: lost"), 1, "rank 1: lost")],
)
def test_how_it_ends_otherwise(monkeypatch, capsys, ends, code, message):
    Double(monkeypatch, ends)
    assert main(["bench", "--json"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_the_plot_has_a_panel_for_each_form_with_the_bound(monkeypatch, tmp_path):
    drawn: list[Any] = []
    monkeypatch.setattr(bench, "draw_bandwidths", lambda panels, conditions, path: drawn.extend([panels, path]))
    copy = replace(RIGHT, library="copy", algorithm="", tensors="ordinary", busbw=9e8)
    ordinary = replace(RIGHT, tensors="ordinary")
    other = replace(RIGHT, wire="bfloat16")
    Double(monkeypatch, results_of(copy, RIGHT, ordinary, WRONG, other, replace(RIGHT, nbytes=64, busbw=1.0)))
    main(["bench", "--plot", str(tmp_path / "x.png")])
    (first, second), path = drawn
    assert path == tmp_path / "x.png"
    assert (first.title, first.bound) == ("float32", {1 << 20: 9e8})
    assert first.ways == {"fusedring ring": {1 << 20: 6e8, 64: 1.0}}
    assert (second.title, second.ways) == ("float32, wire bfloat16", {"fusedring ring": {1 << 20: 6e8}})


def test_without_matplotlib_nothing_is_measured_in_vain(monkeypatch, capsys):
    monkeypatch.setattr(bench, "measure", pytest.fail)
    monkeypatch.setattr(bench, "has_matplotlib", lambda: False)
    assert main(["bench", "--plot", str(Path.cwd() / "x.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
