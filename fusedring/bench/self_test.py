"""A few seconds of all_reduce on this machine: is it right, and how fast is it?"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fusedring.bench.against_gloo import compare
from fusedring.config import ALGORITHMS, DTYPES
from fusedring.group.collectives import all_reduce, empty

ELEMENTS = 100_003
BANDWIDTH_BYTES = 25 << 20
TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class SelfTest:
    """wrong: elements that were not exact. gb_per_s: algorithm bandwidth of two_shot at BANDWIDTH_BYTES.

    times_gloo: how many times faster than gloo's all_reduce and division that is; times_copy: how many times as long as
    copying as many bytes on all ranks takes.
    """

    ranks: int
    seconds: float
    checked: int
    wrong: int
    gb_per_s: float
    times_gloo: float
    times_copy: float


def self_test() -> SelfTest:
    """Run on all ranks of the default group; all return the same but for `seconds`."""
    started = time.perf_counter()
    checked, wrong = _check()
    comparison = compare(BANDWIDTH_BYTES, repeats=8)
    two_shot = comparison.algorithms["two_shot"]
    totals = torch.tensor([checked, wrong])
    dist.all_reduce(totals)
    return SelfTest(
        dist.get_world_size(),
        time.perf_counter() - started,
        int(totals[0]),
        int(totals[1]) + comparison.wrong,
        BANDWIDTH_BYTES / two_shot / 1e9,
        comparison.gloo / two_shot,
        two_shot / comparison.copy,
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
