"""A driver that launches nothing, as if there were an sm_90 GPU: what Triton gives to a driver, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

STREAM = 7


class NoDriver:
    """What Triton asks of a driver. launches: grid, stream, cooperative, warps and arguments of each, if recorded."""

    def __init__(self, *, records: bool) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.compiled = 0
        self.utils = self
        self.launcher_cls = self._launcher
        self._records = records

    def _launcher(self, source: Any, metadata: Any) -> Any:
        self.compiled += 1

        def launch(x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any) -> None:
            if self._records:
                arguments = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in rest[3:]]
                self.launches.append(
                    ((x, y, z), stream, metadata.launch_cooperative_grid, metadata.num_warps, arguments)
                )

        return launch

    def load_binary(self, *_: Any) -> tuple[int, ...]:
        """Module, function, registers, spills, most threads."""
        return 0, 1, 128, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Those of an H100, as far as Triton asks."""
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def get_current_target(self) -> Any:
        """What to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Any."""
        return STREAM

    def get_active_torch_device(self) -> torch.device:
        """Never used: nothing is timed by Triton."""
        return torch.device("cuda", 0)


@contextmanager
def no_driver(*, records: bool = False) -> Iterator[NoDriver]:
    """Have Triton use such a driver; not under its interpreter."""
    from triton.runtime import driver

    from fusedring.kernels import direct, ring

    fake, real = NoDriver(records=records), driver._active
    driver.set_active(fake)
    try:
        yield fake
    finally:
        driver._active = real  # reset_active() fails where there is no GPU
        for kernel in (ring.ring, direct.direct):
            kernel.device_caches.clear()
