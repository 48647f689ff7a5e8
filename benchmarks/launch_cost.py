"""What the host spends on one kernel launch of a bucket, up to the driver.

python benchmarks/launch_cost.py
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from fusedring.bench.clock import seconds_of
from fusedring.engines.kernel_launches import KernelLaunches
from fusedring.kernels.layout import NVIDIA
from fusedring.kernels.region import Region
from fusedring.kernels.tables import write_now
from fusedring.plan.launch import Launch
from fusedring.transport.source import Source

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.no_driver import no_driver


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """Medians in microseconds for one bucket.

    Preparing: its gradients lie where they lay last time (unchanged), elsewhere (moved), or the bucket is new (built).
    launch: from there to the driver; first_path: the same by Triton's own way, which each first launch takes.
    """

    tensors: int
    bytes: int
    unchanged: float
    moved: float
    built: float
    launch: float
    first_path: float


def launch_cost(*, elements: int, tensors: int, repeats: int = 200) -> LaunchCost:
    """Prepare launches of a bucket of `elements` float32 elements whose gradients are `tensors` tensors of one size.

    Launches go to a driver that does nothing; so this needs no GPU, and tables are written in host memory.
    """
    world, channels = 8, 12
    region = Region(torch.zeros(world + 1, dtype=torch.int64), 0, world, 64 << 20, channels, NVIDIA)
    windows = KernelLaunches(region, write_now)
    flat = torch.zeros(elements)
    size = elements // tensors // 16 * 16
    sets = [[Source(i * size, torch.zeros(size)) for i in range(tensors)] for _ in range(2)]
    launch = Launch("all_reduce", "ring", elements, "float32", "bfloat16")

    def prepare(turn: int) -> Callable[[], object]:
        return lambda: windows.of(launch, flat, sets[turn % 2])

    _microseconds(prepare(0))
    unchanged = [_microseconds(prepare(0)) for _ in range(repeats)]
    moved = [_microseconds(prepare(turn)) for turn in range(1, repeats)]
    built = []
    for _ in range(5):
        windows.forget()
        built.append(_microseconds(prepare(0)))
    kernel = windows.of(launch, flat, sets[0])[0].kernel
    with no_driver():
        kernel.launch(flat, 1)  # compiles
        launched = [_microseconds(lambda: kernel.launch(flat, 1)) for _ in range(repeats)]
        first_path = [_microseconds(lambda: kernel.launch_by_triton(flat, 1)) for _ in range(repeats)]
    return LaunchCost(tensors, 4 * elements, *map(statistics.median, (unchanged, moved, built, launched, first_path)))


def _microseconds(act: Callable[[], object]) -> float:
    return 1e6 * seconds_of(act)


def main() -> None:
    print(f"torch {torch.__version__}, triton {triton.__version__}; microseconds for one bucket, medians")
    print(f"{'':15} {'preparing, its gradients':^28} {'launching':^20}")
    print(f"{'MiB':>6} {'tensors':>8} {'unchanged':>10} {'moved':>8} {'built':>8} {'again':>8} {'by triton':>10}")
    for megabytes, tensors in ((1, 4), (4, 12), (25, 12), (25, 100)):
        cost = launch_cost(elements=megabytes << 18, tensors=tensors)
        print(
            f"{megabytes:6} {tensors:8} {cost.unchanged:10.1f} {cost.moved:8.1f} {cost.built:8.1f} {cost.launch:8.1f} "
            f"{cost.first_path:10.1f}"
        )


if __name__ == "__main__":
    main()
