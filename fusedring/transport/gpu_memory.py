"""Memory that the kernels of all ranks can reach: regions, and the pages of host memory beside them.

    peer     memory of the GPUs, mapped into each other (torch.distributed._symmetric_memory)
    pinned   the same layout in shared host memory, registered with every GPU: where GPUs cannot reach each other

torch.distributed._symmetric_memory is an alpha API; the kernels' memory comes from it here only. Its signal pads are
not used: they must be zero after use, and groups share them. A mapping keeps a peer's memory alive, so what a peer
still writes when this rank has closed does no harm.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fusedring.kernels.layout import STATUS_BYTES
from fusedring.kernels.region import Region
from fusedring.torch_internals import nvlinks
from fusedring.transport.gpu import Gpu
from fusedring.transport.kernel_status import KernelStatus
from fusedring.transport.launch_log import LOG_BYTES, LaunchLog
from fusedring.transport.workspace import Workspace


class Way(Protocol):
    """A way to lend memory to all ranks' kernels. Each call is made on all ranks."""

    name: str

    def allocate(self, nbytes: int) -> torch.Tensor:
        """This rank's region, uint8."""
        ...

    def map(self, memory: torch.Tensor) -> list[int]:
        """The addresses of all ranks' regions, for this rank's kernels, from now to `close`. memory: this rank's."""
        ...

    def is_full_mesh(self) -> bool:
        """Whether this rank has a link of its own to every other, so that using all at once is faster than a ring."""
        ...

    def close(self) -> None:
        """Let go of it. No kernel of this rank runs any more."""
        ...


class HostPages:
    """Every rank's status page and launch log, in shared host memory. Making it is collective."""

    def __init__(self, workspace: Workspace, channels: int, timeout: float) -> None:
        nbytes = STATUS_BYTES + LOG_BYTES
        self.own = workspace.allocate(nbytes, timeout=timeout)
        location = workspace.locate(self.own)
        assert location is not None
        pages = [workspace.bytes_at(rank, location, nbytes) for rank in range(workspace.world_size)]
        self.status = KernelStatus(workspace.rank, [page[:STATUS_BYTES] for page in pages], channels, workspace.is_lost)
        self.log = LaunchLog(workspace.rank, [page[STATUS_BYTES:] for page in pages])


@dataclass(frozen=True, slots=True)
class Lent:
    """What kernels need of all ranks' GPUs.

    full_mesh: whether every two ranks have a link of their own. why_not: what stood in the way of other ways.
    """

    way: Way
    region: Region
    pages: HostPages
    full_mesh: bool
    why_not: tuple[str, ...]

    def close(self, gpu: Gpu) -> None:
        """Let go of the memory. No kernel of this rank runs any more."""
        self.way.close()
        gpu.unregister(self.pages.own)


class Peers:
    """GPUs' memory, mapped into each other by torch. group: of more than one rank.

    same_index: whether ranks use different GPUs that have the same index in their processes, as where each process sees
    one GPU only. torch takes them for one GPU then, unless it is told that this is meant.
    """

    name = "peer memory"

    def __init__(self, gpu: Gpu, group: dist.ProcessGroup, *, same_index: bool) -> None:
        self._gpu, self._group, self._same_index = gpu, group, same_index
        self._mapped: tuple[torch.Tensor, Any] | None = None

    def allocate(self, nbytes: int) -> torch.Tensor:
        from torch.distributed import _symmetric_memory

        return _symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self._gpu.device)

    def map(self, memory: torch.Tensor) -> list[int]:
        from torch.distributed import _symmetric_memory

        if self._same_index:
            os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        handle = _symmetric_memory.rendezvous(memory, self._group)
        self._mapped = memory, handle
        # The pointers are those of whole allocations; a tensor begins at the same offset in all of them.
        rank = dist.get_rank(self._group)
        offset = memory.data_ptr() - handle.buffer_ptrs[rank]
        return [pointer + offset for pointer in handle.buffer_ptrs]

    def is_full_mesh(self) -> bool:
        if self._same_index:
            return False  # the links to GPUs that this process does not see are not known
        matrix = nvlinks()
        if matrix is None:
            return False
        mine = self._gpu.device.index
        others = [links for device, links in enumerate(matrix[mine]) if device != mine]
        return len(others) >= dist.get_world_size(self._group) - 1 and all(links > 0 for links in others)

    def close(self) -> None:
        self._mapped = None


class Pinned:
    """Shared host memory, registered with every rank's GPU."""

    name = "pinned host memory"

    def __init__(self, gpu: Gpu, workspace: Workspace, timeout: float) -> None:
        self._gpu, self._workspace, self._timeout = gpu, workspace, timeout
        self._mapped: torch.Tensor | None = None
        self._registered: list[torch.Tensor] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        return self._workspace.allocate(nbytes, timeout=self._timeout)

    def map(self, memory: torch.Tensor) -> list[int]:
        self._mapped, location = memory, self._workspace.locate(memory)
        assert location is not None
        addresses = []
        for rank in range(self._workspace.world_size):
            region = self._workspace.bytes_at(rank, location, memory.nbytes)
            addresses.append(self._gpu.register(region))
            self._registered.append(region)
        return addresses

    def is_full_mesh(self) -> bool:
        return True  # all ranks are as far away

    def close(self) -> None:
        while self._registered:
            self._gpu.unregister(self._registered.pop())
        self._mapped = None


class Alone:
    """What a lone rank needs: nobody else's memory."""

    name = "its own memory"

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._mapped: torch.Tensor | None = None

    def allocate(self, nbytes: int) -> torch.Tensor:
        return self._gpu.zeros(nbytes)

    def map(self, memory: torch.Tensor) -> list[int]:
        self._mapped = memory
        return [memory.data_ptr()]

    def is_full_mesh(self) -> bool:
        return True

    def close(self) -> None:
        self._mapped = None
