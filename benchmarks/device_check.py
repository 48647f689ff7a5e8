"""Check and measure everything on the GPUs of this machine, in at most 8 minutes, and print one table.

PYTHONPATH=. python3 benchmarks/device_check.py [--interpret] [--json PATH] [--parts abcdefg] [--list]

It needs torch, triton and numpy, and no installation. The exit code is 0 if all that was looked at is right, whether or
not it is as fast as it should be, and 1 if something was wrong or did not end in time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device.runner import Part, as_json, exit_code, run_parts, table

PARTS = (
    Part("a", "correctness", "benchmarks.device.correctness:correctness", 100),
    Part("b", "stress", "benchmarks.device.stress:stress", 45),
    Part("c", "speed", "benchmarks.device.speed:speed", 125),
    Part("d", "slowdown of matmuls", "benchmarks.device.slowdown:slowdown", 35),
    Part("e", "training", "benchmarks.device.training:training", 70),
    Part("f", "several GPUs", "benchmarks.device.several_gpus:several_gpus", 60),
    Part("g", "memcheck", "benchmarks.device.memcheck:memcheck", 40),
)
"""Their deadlines add up to less than 8 minutes."""

_ADVISED = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Virtual ranks wait for each other, so none may queue behind another; cuBLAS then gives the same bits every time."""


def main() -> int:
    letters = "".join(part.letter for part in PARTS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpret", action="store_true", help="on the CPU, under Triton's interpreter, tiny sizes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything that was found there")
    parser.add_argument("--parts", default=letters, metavar=letters, help="only these")
    parser.add_argument("--list", action="store_true", help="say what the parts are, and end")
    arguments = parser.parse_args()
    if not arguments.parts or set(arguments.parts) - set(letters):
        parser.error(f"--parts must be some of {letters}, got {arguments.parts!r}")
    chosen = [part for part in PARTS if part.letter in arguments.parts]
    if arguments.list:
        for part in chosen:
            print(f"{part.letter}  {part.title}, at most {part.seconds:.0f} s")
        return 0
    try:
        output = arguments.json.open("w") if arguments.json is not None else None
    except OSError as error:  # found now, not after minutes of measuring
        parser.error(f"--json {arguments.json}: {error.strerror}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the parts' processes must not outlive this one
    found: dict[str, Any] = {"date": datetime.now().astimezone().isoformat(timespec="seconds"), **_versions()}
    results = run_parts(
        chosen,
        dry=arguments.interpret,
        environment=_environment(dry=arguments.interpret),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    for result in results:
        found |= result.facts
    found |= {"interpreted": arguments.interpret, "parts": as_json(results)}
    print(", ".join(f"{name} {value}" for name, value in found.items() if name != "parts"))
    print(table(results))
    if output is not None:
        with output:
            output.write(json.dumps(found, indent=1) + "\n")
    return exit_code(results)


def _environment(*, dry: bool) -> dict[str, str | None]:
    """Variables for the processes of the parts, set before CUDA or Triton starts."""
    if dry:
        return {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return {**_ADVISED, "TRITON_INTERPRET": None}


def _versions() -> dict[str, Any]:
    """What runs here, without asking the GPU through torch."""
    try:
        triton = importlib.import_module("triton").__version__
    except ImportError:
        triton = None
    return {"python": platform.python_version(), "torch": torch.__version__, "triton": triton, "driver": _driver()}


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip()


if __name__ == "__main__":
    sys.exit(main())
