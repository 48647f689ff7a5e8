"""The group's own backend on GPUs, where kernels of all ranks cannot reach each other's memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fusedring.config import accumulate_dtype, torch_dtype
from fusedring.engines.on_gpu import GpuEngine
from fusedring.kernels.region import Totals
from fusedring.plan.launch import Launch
from fusedring.plan.plan import split_evenly
from fusedring.transport.gpu import Gpu
from fusedring.transport.launch_log import LaunchLog
from fusedring.transport.source import Source
from fusedring.transport.workspace import Workspace


class BackendEngine(GpuEngine):
    """Launches by the group's own backend: scale, narrow, all_reduce, widen. Its bits differ from the kernels'."""

    name = "backend"
    tells_values = False

    def __init__(
        self, gpu: Gpu, workspace: Workspace, log: LaunchLog, group: dist.ProcessGroup, *, channels: int
    ) -> None:
        super().__init__(gpu, workspace, log, channels=channels)
        self.title = f"the group's backend ({dist.get_backend(group)})"
        self._group = group

    def close(self) -> None:
        """The group is not ours."""

    def _check_capture(self, launch: Launch, tensor: torch.Tensor, sources: Sequence[Source]) -> None:
        """The backend says itself what it cannot do."""

    def _look(self, label: str) -> None:
        self._log.compare()

    def _stop(self) -> None:
        """Its operations end by the group's own timeout."""

    def _give(self, launch: Launch, tensor: torch.Tensor, sources: Sequence[Source], timeout: float) -> list[Totals]:
        wire = torch_dtype(launch.wire)
        for source in sources:
            tensor[source.start : source.start + source.tensor.numel()].copy_(source.tensor)
        if launch.kind == "all_gather":
            start, stop = split_evenly(launch.elements, dist.get_world_size(self._group))[dist.get_rank(self._group)]
            mine = tensor.new_zeros(launch.elements, dtype=wire)
            mine[start:stop] = tensor[start:stop]
        else:
            mine = (tensor.to(accumulate_dtype(tensor.dtype)) * launch.factor).to(wire)
        dist.all_reduce(mine, group=self._group)
        tensor.copy_(mine)
        return []
