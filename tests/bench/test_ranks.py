"""Ranks that MPI starts: with a double of mpiexec and mpi4py, and with the real ones where they are installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusedring.bench import ranks
from fusedring.bench.against import Case
from fusedring.bench.all_reduce import Measured, measure_case
from fusedring.bench.place import take_place
from fusedring.bench.ranks import Mpi, find_mpi, mpi_world, run_ranks
from fusedring.group.spawn import RanksFailedError

MPIEXEC = """\
    #!/bin/sh
    # mpiexec -n COUNT COMMAND...: ranks are ended together, as by MPI.
    count=$2; shift 2; rank=0
    trap 'kill $pids 2>/dev/null' TERM EXIT
    while [ $rank -lt ${SIZE:-$count} ]; do
        FAKE_RANK=$rank FAKE_SIZE=${SIZE:-$count} "$@" & pids="$pids $!"; rank=$((rank + 1))
    done
    for pid in $pids; do wait $pid || exit 7; done
"""

MPI4PY = """\
    import mmap, os
    import torch, torch.distributed as dist

    if "FAKE_SHARED_FILE" in os.environ:
        with open(os.environ["FAKE_SHARED_FILE"], "wb+") as file:
            file.truncate(4096)
            mapped = mmap.mmap(file.fileno(), 4096)

    IN_PLACE, SUM = "in place", "sum"

    def Get_library_version():
        return "FakeMPI Version:      1.2\\nmore"

    class COMM_WORLD:
        rank, size = int(os.environ["FAKE_RANK"]), int(os.environ["FAKE_SIZE"])

        @staticmethod
        def Allreduce(send, receive, op):
            dist.all_reduce(torch.from_numpy(receive))

        @staticmethod
        def Abort(code):
            os._exit(code)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch) -> str:
    """The path of a double of mpiexec; its ranks find a double of mpi4py."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: pass\n")
    (tmp_path / "mpi4py" / "MPI.py").write_text(textwrap.dedent(MPI4PY))
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text(textwrap.dedent(MPIEXEC))
    mpiexec.chmod(0o755)
    here = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), here, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(ranks, "_beside_python", lambda: mpiexec)
    return str(mpiexec)


def measured() -> tuple[Measured, int]:
    place = take_place("cpu")
    assert place.mpi is mpi_world()
    assert torch.get_num_threads() == 1
    return measure_case(Case(4096, torch.float32, None), place, ("ring",), turns=2), dist.get_rank()


def check_measured(mpi: Mpi) -> None:
    outcomes = run_ranks(measured, 2, mpi=mpi)
    assert [rank for _, rank in outcomes] == [0, 1]
    for result, _ in outcomes:
        assert [(cell.name, cell.wrong) for cell in result.cells[:3]] == [("copy", 0), ("gloo", 0), ("MPI", 0)]
        assert result.missing == {}


def test_mpi_takes_its_turn(fake):
    """Takes over two seconds, as three processes import torch."""
    found = find_mpi(2)
    assert found == Mpi(fake, "FakeMPI 1.2")
    check_measured(found)


def fails_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such thing")
    dist.barrier()


def test_a_failing_rank_is_named_and_all_end(fake):
    """Takes over two seconds, as two processes import torch."""
    start = time.monotonic()
    with pytest.raises(RanksFailedError, match="rank 1: ValueError: no such thing") as failure:
        run_ranks(fails_on_rank_1, 2, mpi=Mpi(fake, ""))
    assert "fails_on_rank_1" in failure.value.__notes__[0]
    assert time.monotonic() - start < 60


def dies() -> None:
    os._exit(3)


def test_a_rank_that_leaves_no_word(fake):
    """Takes over two seconds, as two processes import torch."""
    with pytest.raises(RanksFailedError, match="rank 0: ended without a result; mpiexec's exit code is 7"):
        run_ranks(dies, 2, mpi=Mpi(fake, ""))


def sleeps(begun: Path) -> None:
    begun.touch()
    time.sleep(600)


def test_an_interrupt_ends_all_ranks_and_leaves_nothing(fake, tmp_path, monkeypatch):
    """Takes over two seconds, as two processes import torch."""
    begun, shared = tmp_path / "begun", Path(f"/dev/shm/fusedring_test_{os.getpid()}")
    monkeypatch.setenv("FAKE_SHARED_FILE", str(shared))
    started: list[Any] = []

    class Interrupted(subprocess.Popen):
        def wait(self, timeout=None):
            if not started:
                started.append(self)
                end = time.monotonic() + 60
                while not begun.exists() and time.monotonic() < end:
                    time.sleep(0.05)
                assert shared.exists()
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(ranks.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(sleeps, 2, begun, mpi=Mpi(fake, ""))
    assert started[0].returncode is not None
    assert not shared.exists()


def test_why_there_is_no_mpi(fake, monkeypatch):
    monkeypatch.setenv("SIZE", "1")
    assert "do not belong together" in find_mpi(2)
    Path(fake).write_text("#!/bin/sh\necho 'may not run as root' >&2; exit 1\n")
    assert find_mpi(2) == f"{fake} does not work: may not run as root"
    Path(fake).chmod(0o644)
    assert find_mpi(2).startswith(f"{fake} does not work: ")
    monkeypatch.setattr(ranks, "_beside_python", lambda: Path("/nowhere"))
    monkeypatch.setenv("PATH", "")
    assert find_mpi(2) == "mpi4py is installed, but there is no mpiexec"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find_mpi(2) == "not installed"


def test_the_real_mpi():
    """Takes over two seconds, as three processes import torch."""
    pytest.importorskip("mpi4py")
    found = find_mpi(2)
    assert isinstance(found, Mpi), found
    check_measured(found)
