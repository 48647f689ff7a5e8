"""How much memory all ranks take together while they train, at its peak, under one wrapper."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from fusedring.bench.models import linears
from fusedring.bench.place import take_place, total
from fusedring.bench.steps import FUSEDRING, TORCH
from fusedring.data_parallel.ddp import FusedRingDDP

STATED_SLOTS = 2 * (2 << 20)
"""Bytes at each rank that the library says it takes beside the buckets: two staging slots."""

_STEPS = 12
_BETWEEN_LOOKS = 0.003
"""Seconds; a step of the model takes at least ten times as long."""


def peak_bytes(wrapper: str) -> int:
    """On every rank of a fresh group: the most bytes that each held while training 8 x Linear(1024), summed.

    wrapper: FUSEDRING, or TORCH with gradient_as_bucket_view, which keeps gradients in one place only, as FusedRingDDP
    does. Memory that ranks share counts once: each page is divided by the number of processes that have it (PSS).
    """
    place = take_place("cpu")
    torch.manual_seed(0)
    assert wrapper in (FUSEDRING, TORCH)
    if wrapper == FUSEDRING:
        model: torch.nn.Module = FusedRingDDP(linears())
    else:
        model = torch.nn.parallel.DistributedDataParallel(linears(), gradient_as_bucket_view=True)
    x = torch.randn(32, 1024)
    peak, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(_BETWEEN_LOOKS):
            peak[0] = max(peak[0], _proportional_bytes())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(_STEPS):
            model(x).square().mean().backward()
            model.zero_grad()
    finally:
        over.set()
        looking.join()
    assert place.world > 0
    return total(peak[0])


def _proportional_bytes() -> int:
    """PSS of this process, from the kernel."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("the kernel tells no Pss in /proc/self/smaps_rollup")
