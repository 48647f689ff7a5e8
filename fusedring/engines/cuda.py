"""The triton engine on GPUs: the kernels of fusedring/kernels, one for each window of a launch.

In a CUDA graph the same things are captured. Signals are epochs counted in device memory, so replays need nothing more;
tables and buffers that a graph reads are kept, and changed no more, until the group's workspace is closed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedring.engines.kernel_launches import KernelLaunch, KernelLaunches
from fusedring.engines.on_gpu import GpuEngine
from fusedring.kernels.region import Totals
from fusedring.plan.launch import Launch
from fusedring.transport.gpu import Gpu
from fusedring.transport.gpu_memory import Lent
from fusedring.transport.kernel_status import Watch
from fusedring.transport.pinned import PinnedWrites
from fusedring.transport.source import Source
from fusedring.transport.workspace import Workspace

PARITY_BYTES = 64 << 20
"""Slots of one parity, at each rank: a float32 bucket of 25 MiB fits in one window for up to 8 ranks. Not measured."""

CHANNELS = 12
"""Programs of a launch: few, so that backward keeps its multiprocessors. Not measured."""


class CudaEngine(GpuEngine):
    """Launches by the kernels of fusedring/kernels, in the memory that was lent to them."""

    name = "triton"
    tells_values = True

    def __init__(self, gpu: Gpu, workspace: Workspace, lent: Lent) -> None:
        super().__init__(gpu, workspace, lent.pages.log, channels=lent.region.channels, full_mesh=lent.full_mesh)
        self.title = f"triton on {lent.way.name}"
        self._lent, self._status = lent, lent.pages.status
        self._writes = PinnedWrites(gpu)
        self._kernels = KernelLaunches(lent.region, self._writes.write)
        self._in_graphs: list[tuple[torch.Tensor, list[KernelLaunch]]] = []
        self._watch: Watch | None = None

    def close(self) -> None:
        """As `Engine.close`."""
        if self._watch is not None:
            self._watch.close()
        self._kernels.forget()
        self._in_graphs.clear()
        self._lent.close(self.gpu)

    def _check_capture(self, launch: Launch, tensor: torch.Tensor, sources: Sequence[Source]) -> None:
        if self.gpu.is_capturing() and launch.elements:
            tables = [window.table.on_device for window in self._kernels.known(launch, tensor, sources)]
            # A launch that has never run needs a compiler, too.
            self._writes.check_spares([t.nbytes for table in tables for t in table] or [1 << 62])

    def _give(self, launch: Launch, tensor: torch.Tensor, sources: Sequence[Source], timeout: float) -> list[Totals]:
        if self._watch is None:
            self._watch = Watch(self._status)
        if self.gpu.is_capturing():
            windows = self._kernels.build(launch, tensor, sources)
            self._in_graphs.append((tensor, windows))
        else:
            windows = self._kernels.of(launch, tensor, sources)
            self._writes.put_aside()
        patience = self.gpu.patience(timeout)
        for window in windows:
            window.kernel.launch(tensor, patience)
        return [window.totals for window in windows]

    def _look(self, label: str) -> None:
        if self._status.failed:
            raise self._status.failure(label, "a launch on the GPU", "its timeout has passed")
        self._log.compare()

    def _stop(self) -> None:
        self._status.stop()
        if self._watch is not None:
            self._watch.close()
