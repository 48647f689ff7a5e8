"""Part g: compute-sanitizer looks at all accesses of a launch of every kernel as a lone rank."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.device.cases import LaunchOptions, all_cases, launch_alone
from benchmarks.device.machine import device_of
from benchmarks.device.runner import part_command
from benchmarks.device.sheet import NotRunError, Sheet


def memcheck(sheet: Sheet) -> None:
    """The part: a process of its own under compute-sanitizer."""
    if sheet.dry:
        raise NotRunError("compute-sanitizer has nothing to look at under the interpreter")
    device_of(sheet)
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        raise NotRunError("no compute-sanitizer on PATH")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        seconds = sheet.seconds_left - 3
        command = part_command(
            "benchmarks.device.memcheck:launch_every_kernel", path, deadline=time.monotonic() + seconds, dry=False
        )
        try:
            done = subprocess.run(
                [sanitizer, "--tool", "memcheck", *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds,
                check=False,
                # It looks at all code that is loaded, and a lone rank does not mind if that is late.
                env={**os.environ, "CUDA_MODULE_LOADING": "LAZY"},
            )
        except subprocess.TimeoutExpired:
            raise NotRunError(f"compute-sanitizer did not come to an end in {seconds:.0f} s") from None
        launched = path.exists() and '"verdict": "ok"' in path.read_text()
    summary = re.search(r"ERROR SUMMARY: (\d+) error", done.stdout)
    if summary is None:
        raise NotRunError(f"compute-sanitizer gave no summary: {done.stdout.strip()[-200:]}")
    errors = int(summary[1])
    sheet.expect(
        errors == 0 and launched,
        "compute-sanitizer memcheck, every kernel, W=1",
        f"{errors} errors",
        f"{errors} errors" if errors else "a kernel failed",
        errors=errors,
    )


def launch_every_kernel(sheet: Sheet) -> None:
    """What memcheck looks at."""
    device = device_of(sheet)
    cases = [case for case in all_cases() if (case.dtype, case.wire) == (torch.float32, torch.bfloat16)]
    failures = launch_alone(device, LaunchOptions(8), cases)
    sheet.expect(not failures, "every kernel as a lone rank", f"{len(cases)} launches", str(failures))
