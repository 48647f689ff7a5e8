"""The check of GPUs: its dry mode as a whole, the runner of parts, and whether it would notice what it looks for."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.device.cases import Case
from benchmarks.device.correctness import check_case
from benchmarks.device.reference import different_bits, error_bound, exact, gathered, reduced
from benchmarks.device.runner import Part, PartResult, exit_code, run_parts, table
from benchmarks.device.setting import Setting
from benchmarks.device.sheet import NotRunError, Row, Sheet
from benchmarks.device_check import PARTS
from fusedring.config import ALGORITHMS, DTYPES, scale_factor
from fusedring.plan.plan import split_evenly
from tests import reference

ROOT = Path(__file__).resolve().parents[2]
CHECK = [sys.executable, "benchmarks/device_check.py"]


# Toy parts, which the runner starts by name


def works(sheet: Sheet) -> None:
    sheet.fact(gpu="none at all")
    sheet.row("two and two", "4", measured_in=1)


def hangs(sheet: Sheet) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    sheet.row("its child", str(child.pid))
    time.sleep(100)


def is_wrong(sheet: Sheet) -> None:
    sheet.expect(False, "two and two", "5", "it should be 4")


def is_slow(sheet: Sheet) -> None:
    sheet.row("two and two", "4 after a while", "at once", "missed")


def crashes(sheet: Sheet) -> None:
    sheet.row("two and two", "4")
    os.kill(os.getpid(), signal.SIGSEGV)


def raises(sheet: Sheet) -> None:
    with sheet.attempt("first"):
        raise ZeroDivisionError("one")
    raise ZeroDivisionError("two")


def cannot(sheet: Sheet) -> None:
    with sheet.attempt("first"):
        raise NotRunError("no abacus")
    raise NotRunError("no slide rule")


def says_nothing(sheet: Sheet) -> None:
    pass


def run_toys(*names: str, seconds: float = 60) -> list[PartResult]:
    parts = [Part(name[0], name, f"tests.benchmarks.test_device_check:{name}", seconds) for name in names]
    return run_parts(parts, dry=True, environment={}, say=lambda line: None)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


@pytest.mark.slow
def test_the_dry_mode_looks_at_everything_and_says_what_it_could_not(tmp_path):
    path = tmp_path / "found.json"
    command = [*CHECK, "--interpret", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["torch"] == torch.__version__
    assert found["gpus"] == 0
    assert [part["part"] for part in found["parts"]] == [part.letter for part in PARTS]
    rows = {part["part"]: part["rows"] for part in found["parts"]}
    assert all(rows.values())
    assert all(row["reason"] for part in rows.values() for row in part if row["verdict"] != "ok")
    assert all(row["verdict"] in ("ok", "not run") for part in rows.values() for row in part)
    for letter in "abcef":
        assert any(row["verdict"] == "ok" and row["value"] for row in rows[letter]), letter
    for letter in "bcdefg":
        assert any(row["verdict"] == "not run" for row in rows[letter]), letter
    lines = done.stdout.splitlines()
    assert sum("not measured under the interpreter" in line for line in lines) == 4
    assert any(line.startswith("g ") and "compute-sanitizer" in line for line in lines)
    assert "not run" in lines[-1]


def test_without_a_gpu_and_without_rich_nothing_is_claimed(tmp_path):
    code = (
        "import sys, runpy; sys.modules['rich'] = None; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, "benchmarks/device_check.py", "--parts", "ag"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("not run: no GPU") == 2
    assert " ok" not in done.stdout


@pytest.mark.slow  # waits until the part's time is over
def test_a_part_that_hangs_is_killed_with_its_children_and_the_rest_goes_on():
    started = time.monotonic()
    hanging, working = run_toys("hangs", "works", seconds=15)
    assert time.monotonic() - started < 40
    assert [row.verdict for row in hanging.rows] == ["ok", "timed out"]
    assert "in hangs" in hanging.error  # where it was when it was killed
    assert ends(int(hanging.rows[0].value))
    assert [row.value for row in working.rows] == ["4"]
    assert working.facts == {"gpu": "none at all"}
    assert exit_code([hanging, working]) == 1
    assert "timed out: killed after 15 s" in table([hanging, working])


def test_what_is_wrong_makes_the_exit_code_1_and_what_is_slow_does_not():
    slow, unable, wrong, raising, crashing, silent = run_toys(
        "is_slow", "cannot", "is_wrong", "raises", "crashes", "says_nothing"
    )
    assert exit_code([slow, unable]) == 0
    assert [(row.verdict, row.reason) for row in unable.rows] == [
        ("not run", "no abacus"),
        ("not run", "no slide rule"),
    ]
    for outcome in (wrong, raising, crashing, silent):
        assert exit_code([slow, outcome]) == 1
    assert wrong.rows[0].reason == "it should be 4"
    assert [row.reason for row in raising.rows] == [
        "ZeroDivisionError: one",
        "ended with code 1: ZeroDivisionError: two",
    ]
    assert [row.verdict for row in crashing.rows] == ["ok", "failed"]
    assert "signal 11" in crashing.rows[1].reason
    assert " ".join(table([slow]).splitlines()[1].split()) == "i two and two 4 after a while at once missed"


def test_interrupt_kills_the_part_that_runs_and_still_shows_the_table():
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "from tests.benchmarks.test_device_check import exit_code, run_toys, table\n"
        "outcomes = run_toys('hangs', 'works')\n"
        "print(table(outcomes))\n"
        "sys.exit(exit_code(outcomes))\n"
    )
    program = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while len(below := descendants(program.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(below) == 2
        time.sleep(0.5)
        program.send_signal(signal.SIGINT)
        text, _ = program.communicate(timeout=20)
    finally:
        program.kill()
        program.wait()
    assert program.returncode == 130
    assert all(ends(pid) for pid in below)
    assert "its child" in text
    assert text.count("not run: interrupted") == 2


def descendants(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == pid:
                found += [int(entry.name), *descendants(int(entry.name))]
    return found


def random_inputs(world: int, elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(world)
    return [torch.randn(elements, generator=generator, dtype=torch.float64).to(dtype) for _ in range(world)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_that_of_the_other_tests_and_within_its_bound(dtype):
    for world, algorithm in itertools.product((1, 2, 3, 8), ALGORITHMS):
        for wire in dict.fromkeys((dtype, torch.float16, torch.bfloat16)):
            inputs = random_inputs(world, 3001, dtype)
            factor = scale_factor("avg", None, world, dtype)
            found = reduced(inputs, algorithm, wire, factor)
            assert different_bits(found, reference.all_reduce(inputs, algorithm, wire)) == 0
            error = (found.double() - exact(inputs, factor)).abs()
            bound = error_bound(inputs, algorithm, wire, factor)
            assert (error <= bound).all()
            if world > 1 and wire != torch.float64:  # there the exact sum is rounded just as often
                assert error.max() > 0.02 * bound.max(), "the bound says nothing"


class Ranks:
    """Virtual ranks that do what the reference says, but for what `spoil` then does to the tensors."""

    world_size = 4

    def __init__(self, spoil):
        self.spoil = spoil

    def prepare(self, kind, tensors, *, algorithm, wire_dtype):
        self.kind, self.tensors, self.algorithm = kind, tensors, algorithm
        self.wire = wire_dtype or tensors[0].dtype
        return self

    def run(self):
        factor = scale_factor("avg", None, self.world_size, self.tensors[0].dtype)
        if self.kind == "all_gather":
            result = gathered(self.tensors, self.wire)
        else:
            result = reduced(self.tensors, self.algorithm, self.wire, factor)
        for tensor, (start, stop) in zip(self.tensors, split_evenly(len(result), self.world_size), strict=True):
            if self.kind == "reduce_scatter":
                tensor[start:stop] = result[start:stop]
            else:
                tensor.copy_(result)
        self.spoil(self.tensors)

    def check(self):
        pass


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_one_wrong_bit_on_one_rank_is_noticed(kind):
    case = Case(kind, "two_shot", torch.float32, torch.bfloat16)

    def check(spoil):
        return check_case(Ranks(spoil), torch.device("cpu"), case, 1001, seed=1)

    def flip(tensors):
        tensors[3].view(torch.int32)[1000] ^= 1

    differ, worst = check(lambda tensors: None)
    assert differ == 0
    assert worst <= 1
    assert check(flip)[0] == 1


def test_least_bytes_are_those_of_the_formulas():
    world, elements = 4, 1 << 20
    for algorithm, sent in (("ring", 1.5), ("two_shot", 1.5), ("master", 1.5), ("one_shot", 3)):
        setting = Setting(world, 4 * elements, algorithm, torch.float32, torch.bfloat16)
        assert setting.least_bytes == world * (elements * 2 * 4 + 2 * sent * elements * 2)


def test_verdicts_are_checked():
    with pytest.raises(AssertionError):
        Row("two and two", verdict="fine")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "z"], "--parts must be some of"),
        pytest.param(["--parts", ""], "--parts must be", marks=pytest.mark.slow),
        pytest.param(["--json", "/"], "--json /", marks=pytest.mark.slow),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_anything_runs(arguments, said):
    command = [*CHECK, "--interpret", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100, check=False)
    assert done.returncode == 2
    assert said in done.stderr
