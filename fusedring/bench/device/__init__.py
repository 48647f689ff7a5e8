"""What a GPU has to show: the parts of benchmarks/device_check.py, one module for each.

    a  correctness   every kernel on virtual ranks, to the bit and against float64
    b  stress        thousands of epochs with delays, and a rank that never comes
    c  speed         of all_reduce, against the bytes that it must move
    d  slowdown      of matmuls beside it
    e  training      the wrapper in a lone process
    f  several_gpus  several processes on several GPUs, against NCCL
    g  memcheck      compute-sanitizer on every kernel

With `sheet.dry` the same code runs on the CPU under Triton's interpreter, with tiny sizes; speed is not measured then.
Every part first launches each kernel that it will use as a lone rank: a kernel that is loaded while another waits for
it would wait for ever.
"""

from __future__ import annotations

import importlib
import platform
import subprocess
from typing import Any

import torch

from fusedring.bench.parts import Part

PARTS = (
    Part("a", "correctness", "fusedring.bench.device.correctness:correctness", 100),
    Part("b", "stress", "fusedring.bench.device.stress:stress", 45),
    Part("c", "speed", "fusedring.bench.device.speed:speed", 125),
    Part("d", "slowdown of matmuls", "fusedring.bench.device.slowdown:slowdown", 35),
    Part("e", "training", "fusedring.bench.device.training:training", 70),
    Part("f", "several GPUs", "fusedring.bench.device.several_gpus:several_gpus", 60),
    Part("g", "memcheck", "fusedring.bench.device.memcheck:memcheck", 40),
)
"""Their deadlines add up to less than 8 minutes."""

_ADVISED = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Virtual ranks wait for each other, so none may queue behind another; cuBLAS then gives the same bits every time."""


def environment(*, dry: bool) -> dict[str, str | None]:
    """Variables for the processes of the parts, set before CUDA or Triton starts."""
    if dry:
        return {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return {**_ADVISED, "TRITON_INTERPRET": None}


def versions() -> dict[str, Any]:
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
