"""What a measurement was made on, to be printed beside it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from fusedring.version import __version__


@dataclass(frozen=True, slots=True)
class Conditions:
    """processor: its model. cores: that this process may use. gpus: their names, of all that are used.

    threads: of torch, in each rank. load: the machine's load average of the last minute, before the ranks started.
    mpi: the library that took part, or why none did. bound: what `share of the bound` stands for.
    """

    processor: str
    cores: int
    gpus: tuple[str, ...]
    python: str
    torch: str
    fusedring: str
    ranks: int
    threads: int
    load: float
    mpi: str
    bound: str

    def __str__(self) -> str:
        where = ", ".join(self.gpus) if self.gpus else "host memory"
        lines = (
            f"{self.ranks} rank{'s' if self.ranks != 1 else ''} in {where}; {self.processor}, {self.cores} cores, "
            f"load {self.load:.2f} before the start",
            f"torch {self.torch} with {self.threads} thread in each rank, Python {self.python}, "
            f"fusedring {self.fusedring}; MPI: {self.mpi}",
            "seconds are of the slowest rank; all ways take turns; all ranks begin together",
            f"bound: {self.bound}",
        )
        return "\n".join(lines)


BOUNDS = {
    "cpu": "all ranks copy as many bytes at once, within host memory",
    "cuda": "every GPU copies as many bytes at once, within its own memory; links between GPUs are slower than that",
}


def conditions(*, ranks: int, device: str, mpi: str) -> Conditions:
    """Of this machine, now. device: 'cpu' or 'cuda'."""
    return Conditions(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        gpus=tuple(torch.cuda.get_device_name(gpu) for gpu in range(ranks)) if device == "cuda" else (),
        python=platform.python_version(),
        torch=torch.__version__,
        fusedring=__version__,
        ranks=ranks,
        threads=1,
        load=os.getloadavg()[0],
        mpi=mpi,
        bound=BOUNDS[device],
    )


def _processor() -> str:
    """As /proc/cpuinfo has it; the architecture where that has no names, as on ARM."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
