"""`fusedring demo` as a user starts it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

KEYS = {"loss_start", "loss_end", "step_ms", "tokens_per_s", "exposed_ms", "bytes_moved"}
DEMO = [sys.executable, "-m", "fusedring", "demo"]


def run_demo(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([*DEMO, *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_json_is_all_that_stdout_gets(tmp_path):
    done = run_demo("--steps", "4", "--wire", "bf16", "--json", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["ranks"], result["steps"], result["wire"]) == (2, 4, "bf16")
    assert set(result["fusedring"]) == set(result["torch_ddp"]) == KEYS
    assert result["fusedring"]["loss_start"] == result["torch_ddp"]["loss_start"]
    assert result["fusedring"]["loss_end"] < result["fusedring"]["loss_start"]
    assert result["fusedring"]["bytes_moved"] < 0.6 * result["torch_ddp"]["bytes_moved"]
    assert json.loads((tmp_path / "demo.json").read_text()) == result
    assert Path(result["plot"]).read_bytes().startswith(b"\x89PNG")
    events = json.loads(Path(result["trace"]).read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert sum(event["pid"] == 1 and event["name"].startswith("step ") for event in events) >= 4


@pytest.mark.slow
def test_one_rank_works_and_shows_a_table():
    done = run_demo("--ranks", "1", "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert "loss at end" in done.stdout


@pytest.mark.slow
def test_without_matplotlib_there_is_a_word_instead_of_a_plot(tmp_path):
    code = (
        "import importlib.util, sys; real = importlib.util.find_spec; "
        "importlib.util.find_spec = lambda name, *rest: None if name == 'matplotlib' else real(name, *rest); "
        "from fusedring.cli import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "demo", "--ranks", "1", "--steps", "2", "--out", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install matplotlib" in done.stderr
    result = json.loads(done.stdout)
    assert result["plot"] is None
    assert Path(result["trace"]).exists()


def test_wrong_arguments_exit_with_2():
    done = run_demo("--ranks", "0")
    assert done.returncode == 2
    assert "at least 1, got '0'" in done.stderr


def test_interrupt_leaves_no_process():
    demo = subprocess.Popen([*DEMO, "--steps", "100000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while len(_descendants(demo.pid)) < 2 and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(5)  # into the training
        children = _descendants(demo.pid)
        assert len(children) >= 2
        demo.send_signal(signal.SIGINT)
        assert demo.wait(40) == 130
        end = time.monotonic() + 10
        while any(map(_alive, children)) and time.monotonic() < end:
            time.sleep(0.1)
        assert not any(map(_alive, children))
    finally:
        demo.kill()
        demo.wait()


def _descendants(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _parent(int(entry.name)) == pid:
            found += [int(entry.name), *_descendants(int(entry.name))]
    return found


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
