"""What the host spends on the tile tables of one kernel launch."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from fusedring.communicator import communicator_of
from fusedring.launch import Launch, Source
from fusedring.triton_engine import TritonEngine


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """Medians in microseconds for one bucket.

    unchanged: its gradients lie where they lay last time. moved: they lie elsewhere. built: the bucket is new.
    """

    tensors: int
    bytes: int
    unchanged: float
    moved: float
    built: float


def launch_cost(*, elements: int, tensors: int, repeats: int = 200) -> LaunchCost:
    """Prepare launches of a bucket of `elements` float32 elements whose gradients are `tensors` tensors of one size."""
    communicator = communicator_of()
    first = Launch("all_reduce", "ring", 16, torch.float32, torch.float32, engine="triton")
    communicator.run(first, torch.zeros(16), timeout=60)
    engine = communicator._engines["triton"]
    assert isinstance(engine, TritonEngine)
    flat = torch.zeros(elements)
    size = elements // tensors // 16 * 16
    sets = [[Source(i * size, torch.zeros(size)) for i in range(tensors)] for _ in range(2)]
    launch = Launch("all_reduce", "ring", elements, torch.float32, torch.bfloat16)

    def prepare(sources: list[Source]) -> float:
        start = time.perf_counter()
        engine.windows.of(launch, flat, sources)
        return 1e6 * (time.perf_counter() - start)

    prepare(sets[0])
    unchanged = [prepare(sets[0]) for _ in range(repeats)]
    moved = [prepare(sets[turn % 2]) for turn in range(1, repeats)]
    built = []
    for _ in range(5):
        engine.windows.forget()
        built.append(prepare(sets[0]))
    return LaunchCost(tensors, 4 * elements, *map(statistics.median, (unchanged, moved, built)))
