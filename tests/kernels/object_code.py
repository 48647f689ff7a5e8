"""Object code of the compiled functions for host memory, made as for use: in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "fusedring" / "kernels" / "host_object.py"


def object_code(what: str, folder: Path, *options: str) -> Path:
    file = folder / f"{what}.o"
    subprocess.run([sys.executable, "-P", str(PROGRAM), what, str(file), *options], check=True, timeout=120)
    return file
