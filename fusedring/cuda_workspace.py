"""The workspace on GPUs: regions that the kernels of all ranks can reach, tried out before they are relied on.

    peer     memory of the GPUs, mapped into each other (torch.distributed._symmetric_memory)
    pinned   the same layout in shared host memory, registered with every GPU: where GPUs cannot reach each other

Some machines claim peer access and drop what is written, so each way is probed at the start, with the kernels that will
use it, and every wait bounded. All ranks take the same way: each step's troubles are exchanged before the next step.

torch.distributed._symmetric_memory is an alpha API, and used in this file only. Its signal pads are not used: they must
be zero after use, and groups share them. A mapping keeps a peer's memory alive, so what a peer still writes when this
rank has closed does no harm.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from fusedring.boards import Boards
from fusedring.errors import FusedRingError
from fusedring.gpu import Gpu
from fusedring.launches import Launch
from fusedring.ledger import LEDGER_BYTES, Ledger
from fusedring.windows import Windows
from fusedring.workspace import Workspace

if TYPE_CHECKING:
    from fusedring.kernels.region import Region

PROBE_SECONDS = 10.0
"""How long a kernel of the probe waits for a peer."""

PROBE_ELEMENTS = 1 << 20

Exchange = Callable[[str, str], list[str]]
"""exchange(text, purpose): every rank's text, in rank order."""


class Way(Protocol):
    """A way to lend memory to all ranks' kernels. Each call is made on all ranks."""

    name: str

    def allocate(self, nbytes: int) -> torch.Tensor:
        """This rank's region, uint8."""
        ...

    def map(self) -> list[int]:
        """The addresses of all ranks' regions, for this rank's kernels."""
        ...

    def is_full_mesh(self) -> bool:
        """Whether this rank has a link of its own to every other, so that using all at once is faster than a ring."""
        ...

    def close(self) -> None:
        """Let go of it. No kernel of this rank runs any more."""
        ...


class Pages:
    """Every rank's board and ledger, in shared host memory. Making it is collective."""

    def __init__(self, workspace: Workspace, channels: int, timeout: float) -> None:
        from fusedring.kernels.signals import BOARD_BYTES

        nbytes = BOARD_BYTES + LEDGER_BYTES
        self.own = workspace.allocate(nbytes, timeout=timeout)
        location = workspace.locate(self.own)
        assert location is not None
        pages = [workspace.bytes_at(rank, location, nbytes) for rank in range(workspace.world_size)]
        self.boards = Boards(workspace.rank, [page[:BOARD_BYTES] for page in pages], channels, workspace.is_lost)
        self.ledger = Ledger(workspace.rank, [page[BOARD_BYTES:] for page in pages])


@dataclass(frozen=True, slots=True)
class Lent:
    """What kernels need of all ranks' GPUs.

    full_mesh: whether every two ranks have a link of their own. why_not: what stood in the way of other ways.
    """

    way: Way
    region: Region
    pages: Pages
    full_mesh: bool
    why_not: tuple[str, ...]

    def close(self, gpu: Gpu) -> None:
        """Let go of the memory. No kernel of this rank runs any more."""
        self.way.close()
        gpu.unregister(self.pages.own)


def lend(
    gpu: Gpu,
    workspace: Workspace,
    pages: Pages,
    ways: Sequence[Way],
    exchange: Exchange,
    *,
    channels: int,
    parity_bytes: int,
) -> Lent | list[str]:
    """Open the first of `ways` that works on all ranks (collective). If none does: why, for each of them."""
    registered: list[int] = []
    troubles = _troubles(exchange, "register a page of host memory", lambda: registered.append(gpu.register(pages.own)))
    if not troubles:
        for way in ways:
            attempt = _Attempt(gpu, workspace, way, pages.boards, registered[0], channels, parity_bytes)
            found = attempt.troubles(exchange)
            if not found:
                assert attempt.region is not None
                meshes = exchange("yes" if way.is_full_mesh() else "", "agree on algorithms")
                return Lent(way, attempt.region, pages, all(meshes), tuple(troubles))
            troubles.append(found)
            gpu.settle()
            way.close()
            pages.boards.clear()
            exchange("", "go on to the next way")  # nobody's kernel may find the failure that another has yet to clear
    if registered:
        gpu.unregister(pages.own)
    return troubles


class _Attempt:
    """One way, tried step by step."""

    def __init__(
        self,
        gpu: Gpu,
        workspace: Workspace,
        way: Way,
        boards: Boards,
        board_address: int,
        channels: int,
        parity_bytes: int,
    ) -> None:
        self._gpu, self._workspace, self._way, self._boards = gpu, workspace, way, boards
        self._board_address, self._channels, self._parity_bytes = board_address, channels, parity_bytes
        self.region: Region | None = None

    def troubles(self, exchange: Exchange) -> str:
        """What stood in the way on some rank; nothing if it works on all."""
        steps: dict[str, Callable[[], None]] = {
            "allocate": self._allocate,
            "map what the peers have": self._map,
            "compile the probe": self._compile,
        }
        for algorithm in _PROBED:
            steps[f"probe with {algorithm}"] = partial(self._probe, algorithm)
        for what, step in steps.items():
            found = _troubles(exchange, f"{what} ({self._way.name})", step)
            if found:
                return found[0]
        return ""

    def _allocate(self) -> None:
        from fusedring.kernels.region import region_bytes

        self._way.allocate(region_bytes(self._workspace.world_size, self._parity_bytes)).zero_()
        self._gpu.order(self._gpu.current_stream(), self._gpu.comm)
        self._gpu.settle()

    def _map(self) -> None:
        self.region = self._region([*self._way.map()], self._workspace.rank, self._parity_bytes)

    def _compile(self) -> None:
        """Run the probe's kernels as a lone rank, so that nobody's compiler keeps the others' kernels waiting."""
        from fusedring.kernels.region import region_bytes

        parity_bytes = 1 << 20
        alone = self._gpu.zeros(region_bytes(1, parity_bytes))
        region = self._region([alone.data_ptr()], 0, parity_bytes)
        for algorithm in _PROBED:
            self._reduce(region, algorithm, torch.ones(16, device=self._gpu.device))

    def _probe(self, algorithm: str) -> None:
        """Reduce several megabytes, and look at every number: data first, then the flag that says it is there."""
        assert self.region is not None
        world, rank = self.region.world, self.region.rank
        x = (torch.arange(PROBE_ELEMENTS, device=self._gpu.device) % 1009).float()
        want = x * world + world * (world - 1) // 2
        x += rank
        self._reduce(self.region, algorithm, x)
        if self._boards.failed:
            raise FusedRingError(f"no answer within {PROBE_SECONDS:g} s")
        if wrong := int((x != want).sum()):
            raise FusedRingError(f"{wrong} of {PROBE_ELEMENTS} numbers did not arrive")

    def _region(self, addresses: list[int], rank: int, parity_bytes: int) -> Region:
        from fusedring.kernels.region import Region

        bases = torch.tensor([*addresses, self._board_address]).to(self._gpu.device)
        return Region(bases, rank, len(addresses), parity_bytes, self._channels, self._gpu.platform)

    def _reduce(self, region: Region, algorithm: str, x: torch.Tensor) -> None:
        """Run one kernel to its end."""
        from fusedring.kernels.tiles import write_now

        gpu, launch = self._gpu, Launch("all_reduce", algorithm, x.numel(), x.dtype, x.dtype)
        gpu.order(gpu.current_stream(), gpu.comm)
        with gpu.on(gpu.comm):
            for window in Windows(region, write_now).build(launch, x, ()):
                window.kernel.launch(x, gpu.patience(PROBE_SECONDS))
        gpu.settle()


_PROBED = ("two_shot", "ring")
"""Between every two ranks, and around."""


def _troubles(exchange: Exchange, what: str, act: Callable[[], object]) -> list[str]:
    """Why `act` raised, on each rank where it did."""
    try:
        act()
        trouble = ""
    except Exception as error:  # whatever stands in the way of this way, there may be another
        trouble = f"cannot {what}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return [f"rank {rank} {text}" for rank, text in enumerate(exchange(trouble, what)) if text]


class Peers:
    """GPUs' memory, mapped into each other by torch. group: of more than one rank.

    same_index: whether ranks use different GPUs that have the same index in their processes, as where each process sees
    one GPU only. torch takes them for one GPU then, unless it is told that this is meant.
    """

    name = "peer memory"

    def __init__(self, gpu: Gpu, group: dist.ProcessGroup, *, same_index: bool) -> None:
        self._gpu, self._group, self._same_index = gpu, group, same_index
        self._memory: torch.Tensor | None = None
        self._handle: Any = None

    def allocate(self, nbytes: int) -> torch.Tensor:
        from torch.distributed import _symmetric_memory

        self._memory = _symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self._gpu.device)
        return self._memory

    def map(self) -> list[int]:
        from torch.distributed import _symmetric_memory

        assert self._memory is not None
        if self._same_index:
            os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        self._handle = _symmetric_memory.rendezvous(self._memory, self._group)
        # The pointers are those of whole allocations; a tensor begins at the same offset in all of them.
        rank = dist.get_rank(self._group)
        offset = self._memory.data_ptr() - self._handle.buffer_ptrs[rank]
        return [pointer + offset for pointer in self._handle.buffer_ptrs]

    def is_full_mesh(self) -> bool:
        from torch._C import _autograd, _distributed_c10d

        if self._same_index:
            return False  # the links to GPUs that this process does not see are not known
        try:
            detect = _distributed_c10d._detect_dma_connectivity  # type: ignore[attr-defined]
            matrix = detect(_autograd.DeviceType.CUDA, "nvlink").matrix
        except (RuntimeError, AttributeError):  # not on this platform
            return False
        mine = self._gpu.device.index
        others = [links for device, links in enumerate(matrix[mine]) if device != mine]
        return len(others) >= dist.get_world_size(self._group) - 1 and all(links > 0 for links in others)

    def close(self) -> None:
        self._handle = self._memory = None


class Pinned:
    """Shared host memory, registered with every rank's GPU."""

    name = "pinned host memory"

    def __init__(self, gpu: Gpu, workspace: Workspace, timeout: float) -> None:
        self._gpu, self._workspace, self._timeout = gpu, workspace, timeout
        self._memory: torch.Tensor | None = None
        self._registered: list[torch.Tensor] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._memory = self._workspace.allocate(nbytes, timeout=self._timeout)
        return self._memory

    def map(self) -> list[int]:
        assert self._memory is not None
        location = self._workspace.locate(self._memory)
        assert location is not None
        addresses = []
        for rank in range(self._workspace.world_size):
            region = self._workspace.bytes_at(rank, location, self._memory.nbytes)
            addresses.append(self._gpu.register(region))
            self._registered.append(region)
        return addresses

    def is_full_mesh(self) -> bool:
        return True  # all ranks are as far away

    def close(self) -> None:
        while self._registered:
            self._gpu.unregister(self._registered.pop())
        self._memory = None


class Alone:
    """What a lone rank needs: nobody else's memory."""

    name = "its own memory"

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._memory: torch.Tensor | None = None

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._memory = self._gpu.zeros(nbytes)
        return self._memory

    def map(self) -> list[int]:
        assert self._memory is not None
        return [self._memory.data_ptr()]

    def is_full_mesh(self) -> bool:
        return True

    def close(self) -> None:
        self._memory = None
