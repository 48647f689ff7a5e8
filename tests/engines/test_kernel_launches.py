"""How kernels reach a GPU's driver, seen by a driver that launches nothing: Triton compiles, and calls it.

After the first launch `Prepared` calls the compiled kernel itself. That must give the driver what Triton would give it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.no_driver import STREAM, NoDriver, no_driver
from fusedring.config import dtype_name
from fusedring.engines.kernel_launches import KernelLaunch, KernelLaunches
from fusedring.kernels.layout import NVIDIA
from fusedring.kernels.region import Region
from fusedring.kernels.tables import write_now
from fusedring.plan.launch import Launch
from fusedring.transport.source import Source

CHANNELS = 12


@pytest.fixture
def driver() -> Iterator[NoDriver]:
    with no_driver(records=True) as fake:
        yield fake


def windows_of(launch: Launch, x: torch.Tensor, rank: int = 0, sources: tuple[Source, ...] = ()) -> list[KernelLaunch]:
    region = Region(torch.zeros(5, dtype=torch.int64), rank, 4, 64 << 20, CHANNELS, NVIDIA)
    return KernelLaunches(region, write_now).of(launch, x, sources)


@pytest.mark.parametrize(
    ("kind", "algorithm", "dtype", "wire"),
    [
        ("all_reduce", "ring", torch.float32, torch.bfloat16),
        ("reduce_scatter", "two_shot", torch.bfloat16, torch.bfloat16),
        ("all_reduce", "one_shot", torch.float64, torch.float16),
        ("all_gather", "master", torch.float16, torch.float16),
    ],
)
def test_later_launches_give_the_driver_what_the_first_did(driver, kind, algorithm, dtype, wire):
    launch = Launch(kind, algorithm, 100_000, dtype_name(dtype), dtype_name(wire), 1 / 3, "triton")
    x = torch.zeros(100_000, dtype=dtype)
    (window,) = windows_of(launch, x)
    for _ in range(3):
        window.kernel.launch(x, 5)
    first, second, third = driver.launches
    assert first == second == third
    grid, stream, cooperative, warps, arguments = first
    assert grid == (CHANNELS, 1, 1)
    assert stream == STREAM
    assert cooperative  # all programs at once, or an error
    assert warps == 8
    assert x.data_ptr() in arguments
    assert window.table.tiles.data_ptr() in arguments
    window.kernel.launch(x, 600_000_000_000)
    changed = [(a, b) for a, b in zip(arguments, driver.launches[-1][-1], strict=True) if a != b]
    assert changed == [(5, 600_000_000_000)]


def test_ranks_patience_and_scale_do_not_compile_anew(driver):
    x = torch.zeros(50_000)
    for rank, factor, patience in ((0, 1.0, 1), (1, 0.25, 16), (3, -1e-30, 1 << 62)):
        launch = Launch("all_reduce", "two_shot", 50_000, "float32", "float16", factor, "triton")
        (window,) = windows_of(launch, x, rank)
        window.kernel.launch(x, patience)
    assert len(driver.launches) == 3
    assert driver.compiled == 1


def test_a_tensor_that_is_not_aligned_has_a_kernel_of_its_own(driver):
    launch = Launch("all_reduce", "ring", 50_000, "float32", "float32", 1.0, "triton")
    storage = torch.zeros(50_001)
    for x in (storage[:50_000], storage[1:]):
        (window,) = windows_of(launch, x)
        for _ in range(2):
            window.kernel.launch(x, 5)
    assert driver.compiled == 2
    assert [storage.data_ptr() in launched[-1] for launched in driver.launches] == [True, True, False, False]
