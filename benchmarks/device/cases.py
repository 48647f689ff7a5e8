"""Every kernel there is, the options of its launches, and launching each alone.

A *case* is what a kernel does, and for which dtypes; the *options* are how many programs do it and how they are
compiled. A case with other options is another kernel.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.device.sheet import Sheet
from benchmarks.device.units import MB, name_of
from fusedring.config import ALGORITHMS, DTYPES, KINDS
from fusedring.testing import VirtualRanks, virtual_ranks

TIMED_PAIRS: tuple[tuple[torch.dtype, torch.dtype], ...] = (
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
)
"""dtype and wire of what is timed."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel: what it does, and for which dtypes."""

    kind: str
    algorithm: str
    dtype: torch.dtype
    wire: torch.dtype

    @property
    def how(self) -> dict[str, Any]:
        """Its arguments of a collective."""
        return {"algorithm": self.algorithm, "wire_dtype": None if self.wire == self.dtype else self.wire}

    def __str__(self) -> str:
        return f"{self.algorithm} {self.kind} {name_of(self.dtype)}, wire {name_of(self.wire)}"


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How it is launched: see `virtual_ranks`, of which these are arguments."""

    channels: int
    stages: int = 1
    cooperative: bool = False

    def ranks(self, world: int, device: torch.device, parity_bytes: int) -> AbstractContextManager[VirtualRanks]:
        """Virtual ranks that launch with these options."""
        return virtual_ranks(
            world,
            device,
            channels=self.channels,
            parity_bytes=parity_bytes,
            cooperative=self.cooperative,
            stages=self.stages,
        )


def all_cases() -> list[Case]:
    """Algorithms, kinds, dtypes and wires, each with each."""
    wires = {dtype: dict.fromkeys((dtype, torch.float16, torch.bfloat16)) for dtype in DTYPES}
    pairs = [(dtype, wire) for dtype in DTYPES for wire in wires[dtype]]
    return [Case(kind, algorithm, *pair) for algorithm in ALGORITHMS for kind in KINDS for pair in pairs]


def launch_alone(device: torch.device, options: LaunchOptions, cases: Sequence[Case]) -> dict[Case, str]:
    """Launch each as a lone rank. What was wrong, for those that fail."""
    failures = {}
    with options.ranks(1, device, MB) as alone:
        for case in cases:
            try:
                alone.reset()  # of a failure of the case before
                x = torch.ones(17 if device.type == "cpu" else 5003, dtype=case.dtype, device=device)
                collective = alone.prepare(case.kind, [x], **case.how)
                collective.run()
                collective.check()
                if not bool((x == 1).all()):
                    failures[case] = "as a lone rank it changes ones"
            except Exception as error:
                failures[case] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return failures


def warmed_up(sheet: Sheet, device: torch.device, cases: Sequence[Case], counts: Sequence[int]) -> list[Case]:
    """The cases whose kernels work as a lone rank, with all these numbers of channels; a row tells of the others."""
    started = time.monotonic()
    compile_ahead(device, dict.fromkeys(map(LaunchOptions, counts), cases))
    failures: dict[Case, str] = {}
    launches = 0
    for channels in counts:
        working = [case for case in cases if case not in failures]
        launches += len(working)
        failures |= launch_alone(device, LaunchOptions(channels), working)
    for case, why in failures.items():
        sheet.row(f"{case}, W=1", verdict="failed", reason=why)
    sheet.expect(
        not failures,
        "every kernel as a lone rank (W=1)",
        f"{launches} launches in {time.monotonic() - started:.1f} s",
        "see the rows above",
    )
    return [case for case in cases if case not in failures]


def compile_ahead(device: torch.device, wanted: Mapping[LaunchOptions, Sequence[Case]]) -> None:
    """Fill Triton's cache from several processes: a kernel takes 2 s to compile (Triton 3.7.1), and there are many.

    What fails in them fails again in this process, which tells of it. Under the interpreter nothing is compiled.
    """
    workers = min(12, len(os.sched_getaffinity(0)) - 1, sum(map(len, wanted.values())) // 2)
    if device.type != "cuda" or workers < 2:
        return
    shares = [(options, cases[share::workers]) for share in range(workers) for options, cases in wanted.items()]
    with suppress(BrokenProcessPool), ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(launch_alone, device, options, share) for options, share in shares if share]:
            future.exception()
