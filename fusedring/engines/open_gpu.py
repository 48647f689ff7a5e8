"""Opening a GPU: the ways in which kernels of all ranks may reach each other, tried out before one is relied on.

Some machines claim peer access and drop what is written, so each way is probed at the start, with the kernels that will
use it, and every wait bounded. All ranks take the same way: each step's troubles are exchanged before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from fusedring.config import dtype_name
from fusedring.engines.kernel_launches import Windows
from fusedring.errors import FusedRingError
from fusedring.plan.launch import Launch
from fusedring.transport.gpu import Gpu
from fusedring.transport.gpu_memory import Lent, Pages, Way
from fusedring.transport.kernel_status import Boards
from fusedring.transport.workspace import Workspace

if TYPE_CHECKING:
    from fusedring.kernels.region import Region

PROBE_SECONDS = 10.0
"""How long a kernel of the probe waits for a peer."""

PROBE_ELEMENTS = 1 << 20

Exchange = Callable[[str, str], list[str]]
"""exchange(text, purpose): every rank's text, in rank order."""


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

        gpu, dtype = self._gpu, dtype_name(x.dtype)
        launch = Launch("all_reduce", algorithm, x.numel(), dtype, dtype)
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
