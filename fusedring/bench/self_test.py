"""A few seconds of all_reduce on this machine: is it right, and how fast is it?"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fusedring.bench.against import Case
from fusedring.bench.all_reduce import measure_case
from fusedring.bench.place import take_place, total
from fusedring.config import ALGORITHMS, DTYPES
from fusedring.group.collectives import all_reduce, empty

ELEMENTS = 100_003
BANDWIDTH_BYTES = 25 << 20
TURNS = 7
WAYS = (("copy", "ordinary"), ("gloo", "ordinary"), ("fusedring two_shot", "workspace"))
TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class SelfTest:
    """wrong: elements that were not exact. gb_per_s: algorithm bandwidth of two_shot at BANDWIDTH_BYTES.

    times_gloo: how many times faster than gloo's all_reduce and division that is; times_copy: how many times as long as
    copying as many bytes on all ranks takes. None where a way was wrong.
    """

    ranks: int
    seconds: float
    checked: int
    wrong: int
    gb_per_s: float | None
    times_gloo: float | None
    times_copy: float | None


def self_test() -> SelfTest:
    """Run on all ranks of the default group; all return the same but for `seconds`."""
    started = time.perf_counter()
    place = take_place("cpu")
    checked, wrong = _check()
    measured = measure_case(Case(BANDWIDTH_BYTES, torch.float32, None), place, ("two_shot",), turns=TURNS)
    copy, gloo, two_shot = (measured.timing_of(*way) for way in WAYS)
    return SelfTest(
        place.world,
        time.perf_counter() - started,
        total(checked),
        total(wrong) + sum(cell.wrong for cell in measured.cells),
        BANDWIDTH_BYTES / two_shot.median / 1e9 if two_shot else None,
        gloo.median / two_shot.median if gloo and two_shot else None,
        two_shot.median / copy.median if two_shot and copy else None,
    )


def _check() -> tuple[int, int]:
    """Sums of small whole numbers are exact in every dtype: how many elements were looked at, and how many wrong."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pattern = torch.arange(ELEMENTS) % 13
    checked = wrong = 0
    for dtype in DTYPES:
        shared, ordinary = empty(ELEMENTS, dtype=dtype), torch.empty(ELEMENTS, dtype=dtype)
        for algorithm in ALGORITHMS:
            for tensor in (shared, ordinary):
                tensor.copy_(pattern + rank)
                all_reduce(tensor, op="sum", algorithm=algorithm)
                checked += ELEMENTS
                wrong += int((tensor != pattern * world + world * (world - 1) // 2).sum())
    return checked, wrong
