"""Start ranks that measure: by MPI where it is installed, so that it can take its turn, otherwise by `spawn`."""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedring.group.spawn import RanksFailedError, spawn

TIMEOUT_SECONDS = 120.0
"""Of a collective of the default group."""

SHARED_FILES = "/dev/shm/"

_PROBE_SECONDS = 60
_PROBE = "from mpi4py import MPI; print(MPI.COMM_WORLD.size, MPI.Get_library_version().split(chr(10))[0], sep=chr(9))"


@dataclass(frozen=True, slots=True)
class Mpi:
    """An MPI that works here: the program that starts ranks, and the library's name and version."""

    mpiexec: str
    library: str


def find_mpi(ranks: int) -> Mpi | str:
    """An MPI that starts `ranks` ranks here, with mpi4py, or why there is none."""
    if importlib.util.find_spec("mpi4py") is None:
        return "not installed"
    beside = _beside_python()
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        return "mpi4py is installed, but there is no mpiexec"
    command = [mpiexec, "-n", str(ranks), sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{mpiexec} does not work: {error}"
    size, _, library = done.stdout.partition("\n")[0].partition("\t")
    if done.returncode != 0:
        return f"{mpiexec} does not work: {done.stderr.strip().partition(chr(10))[0]}"
    if size != str(ranks):
        return f"{mpiexec} and mpi4py do not belong together"
    return Mpi(mpiexec, " ".join(library.replace("Version:", " ").split()))


def run_ranks(function: Callable[..., Any], ranks: int, *arguments: Any, mpi: Mpi | None = None) -> list[Any]:
    """What `function(*arguments)` returns on each rank, as `spawn`, which it is where `mpi` is None.

    Every rank has a default group over gloo. Raises RanksFailedError and KeyboardInterrupt, as `spawn` does.
    """
    if mpi is None:
        return spawn(function, ranks, *arguments, timeout=TIMEOUT_SECONDS)
    with tempfile.TemporaryDirectory(prefix="fusedring-bench-") as folder:
        (Path(folder) / "task").write_bytes(pickle.dumps((function, arguments)))
        command = [mpi.mpiexec, "-n", str(ranks), sys.executable, "-m", "fusedring.bench.mpi_rank", folder]
        # Nothing but the result may go to standard output, so what ranks print goes where errors go.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            process.wait()
        finally:
            _end(process)
            _remove_shared_files(Path(folder))
        return _results(Path(folder), ranks, process.returncode)


def _beside_python() -> Path:
    """Where a package from PyPI puts mpiexec, whether or not the virtual environment is activated."""
    return Path(sys.executable).parent / "mpiexec"


def mpi_world() -> Any:
    """MPI's communicator of all ranks, if MPI has started this one, else None."""
    module = sys.modules.get("mpi4py.MPI")
    return module.COMM_WORLD if module is not None else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """mpiexec ends its ranks when it is told to end."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def write_shared_files(folder: Path, rank: int) -> None:
    """Note the files in /dev/shm that this rank has mapped, for the one who started it."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = {line[line.index(SHARED_FILES) :] for line in lines if SHARED_FILES in line}
    (folder / f"shared-{rank}").write_text("\n".join(names))


def _remove_shared_files(folder: Path) -> None:
    """MPI leaves its files in /dev/shm where ranks are ended before they are through."""
    for noted in folder.glob("shared-*"):
        for name in noted.read_text().splitlines():
            Path(name).unlink(missing_ok=True)


def _results(folder: Path, ranks: int, exit_code: int) -> list[Any]:
    """Of all ranks, or the error of the one that failed first: the others may have failed because of it."""
    errors = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        first, text = errors[0].name.partition("-")[2], errors[0].read_text()
        failed = RanksFailedError(f"rank {first}: {text.strip().rpartition(chr(10))[2]}")
        failed.add_note(f"On rank {first}:\n{text.rstrip()}")
        raise failed
    results = [folder / f"result-{rank}" for rank in range(ranks)]
    for rank, result in enumerate(results):
        if not result.exists():
            raise RanksFailedError(f"rank {rank}: ended without a result; mpiexec's exit code is {exit_code}")
    return [pickle.loads(result.read_bytes()) for result in results]
