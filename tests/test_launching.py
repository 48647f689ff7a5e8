"""How kernels reach a GPU's driver, seen by a driver that launches nothing: Triton compiles, and calls it.

After the first launch `Prepared` calls the compiled kernel itself. That must give the driver what Triton would give it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fusedring.kernels import direct, ring
from fusedring.kernels.region import Region
from fusedring.kernels.signals import NVIDIA
from fusedring.kernels.tiles import write_now
from fusedring.launch import Launch, Source
from fusedring.windows import Window, Windows

CHANNELS, STREAM = 12, 7


class NoDriver:
    """What Triton asks of a driver, as if there were an sm_90 GPU. launches: what it was told to launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.compiled = 0
        self.utils = self
        self.launcher_cls = self._launcher

    def _launcher(self, source: Any, metadata: Any) -> Any:
        self.compiled += 1

        def launch(x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any) -> None:
            arguments = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in rest[3:]]
            self.launches.append(((x, y, z), stream, metadata.launch_cooperative_grid, metadata.num_warps, arguments))

        return launch

    def load_binary(self, *_: Any) -> tuple[int, ...]:
        return 0, 1, 128, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


@pytest.fixture
def no_driver() -> Iterator[NoDriver]:
    fake, real = NoDriver(), driver._active
    driver.set_active(fake)
    yield fake
    driver._active = real  # reset_active() fails where there is no GPU
    for kernel in (ring.ring, direct.direct):
        kernel.device_caches.clear()


def windows_of(launch: Launch, x: torch.Tensor, rank: int = 0, sources: tuple[Source, ...] = ()) -> list[Window]:
    region = Region(torch.zeros(5, dtype=torch.int64), rank, 4, 64 << 20, CHANNELS, NVIDIA.value)
    return Windows(region, write_now).of(launch, x, sources)


@pytest.mark.parametrize(
    ("kind", "algorithm", "dtype", "wire"),
    [
        ("all_reduce", "ring", torch.float32, torch.bfloat16),
        ("reduce_scatter", "two_shot", torch.bfloat16, torch.bfloat16),
        ("all_reduce", "one_shot", torch.float64, torch.float16),
        ("all_gather", "master", torch.float16, torch.float16),
    ],
)
def test_later_launches_give_the_driver_what_the_first_did(no_driver, kind, algorithm, dtype, wire):
    launch = Launch(kind, algorithm, 100_000, dtype, wire, 1 / 3, "triton")
    x = torch.zeros(100_000, dtype=dtype)
    (window,) = windows_of(launch, x)
    for _ in range(3):
        window.kernel.launch(x, 5)
    first, second, third = no_driver.launches
    assert first == second == third
    grid, stream, cooperative, warps, arguments = first
    assert grid == (CHANNELS, 1, 1)
    assert stream == STREAM
    assert cooperative  # all programs at once, or an error
    assert warps == 8
    assert x.data_ptr() in arguments
    assert window.table.tiles.data_ptr() in arguments
    window.kernel.launch(x, 600_000_000_000)
    changed = [(a, b) for a, b in zip(arguments, no_driver.launches[-1][-1], strict=True) if a != b]
    assert changed == [(5, 600_000_000_000)]


def test_ranks_patience_and_scale_do_not_compile_anew(no_driver):
    x = torch.zeros(50_000)
    for rank, factor, patience in ((0, 1.0, 1), (1, 0.25, 16), (3, -1e-30, 1 << 62)):
        launch = Launch("all_reduce", "two_shot", 50_000, torch.float32, torch.float16, factor, "triton")
        (window,) = windows_of(launch, x, rank)
        window.kernel.launch(x, patience)
    assert len(no_driver.launches) == 3
    assert no_driver.compiled == 1


def test_a_tensor_that_is_not_aligned_has_a_kernel_of_its_own(no_driver):
    launch = Launch("all_reduce", "ring", 50_000, torch.float32, torch.float32, 1.0, "triton")
    storage = torch.zeros(50_001)
    for x in (storage[:50_000], storage[1:]):
        (window,) = windows_of(launch, x)
        for _ in range(2):
            window.kernel.launch(x, 5)
    assert no_driver.compiled == 2
    assert [storage.data_ptr() in launched[-1] for launched in no_driver.launches] == [True, True, False, False]
