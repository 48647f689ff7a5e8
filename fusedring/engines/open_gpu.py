"""Opening a GPU: the ways in which kernels of all ranks may reach each other, tried out before one is relied on.

Some machines claim peer access and drop what is written, so each way is probed at the start, with the kernels that will
use it, and every wait bounded. All ranks take the same way: each step's troubles are exchanged before the next step.
Where no way works, the group's own backend is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fusedring.config import dtype_name
from fusedring.engines.backend import BackendEngine
from fusedring.engines.cuda import CHANNELS, PARITY_BYTES, CudaEngine
from fusedring.engines.kernel_launches import KernelLaunches
from fusedring.engines.on_gpu import GpuEngine
from fusedring.errors import FusedRingError
from fusedring.kernels.layout import region_bytes
from fusedring.kernels.region import Region
from fusedring.kernels.tables import write_now
from fusedring.log import logger
from fusedring.plan.launch import Launch
from fusedring.transport import agreement
from fusedring.transport.agreement import Opening
from fusedring.transport.gpu import Gpu
from fusedring.transport.gpu_memory import Alone, HostPages, Lent, Peers, Pinned, Way
from fusedring.transport.kernel_status import KernelStatus
from fusedring.transport.rendezvous import Rendezvous
from fusedring.transport.workspace import Workspace

Exchange = Callable[[Any, str], list[Any]]
"""exchange(value, purpose): every rank's value, in rank order."""


@dataclass(frozen=True, slots=True)
class Probe:
    """How a way is tried: so many numbers are reduced, and a kernel waits so long for a peer."""

    elements: int = 1 << 20
    seconds: float = 10.0


def open_gpu(
    gpu: Gpu,
    group: dist.ProcessGroup | None,
    rendezvous: Rendezvous,
    workspace: Workspace,
    *,
    timeout: float,
    channels: int | None = None,
    parity_bytes: int = PARITY_BYTES,
    ways: Sequence[Way] | None = None,
    probe: Probe | None = None,
) -> GpuEngine:
    """What starts the group's launches on `gpu` (collective).

    channels: programs of each launch; None stands for CHANNELS. parity_bytes: slots of one parity, at each rank. ways:
    to be tried, in this order; None stands for all that there are.

    Raises MismatchError if ranks ask for different numbers of channels, FusedRingError if a lone process cannot run
    kernels.
    """
    channels = channels or CHANNELS
    agreement.agree(workspace.meet(agreement.pack(Opening(channels)), timeout=timeout))

    def exchange(value: Any, purpose: str) -> list[Any]:
        return rendezvous.exchange(value, timeout=timeout, purpose=purpose)

    pages = HostPages(workspace, channels, timeout)
    if ways is None:
        ways = ways_between_ranks(gpu, group, workspace, exchange, timeout=timeout)
    lent = lend(
        gpu, workspace, pages, ways, exchange, channels=channels, parity_bytes=parity_bytes, probe=probe or Probe()
    )
    if isinstance(lent, Lent):
        engine: GpuEngine = CudaEngine(gpu, workspace, lent)
        if lent.why_not:
            logger.warning("%s: %s, since %s", gpu.device, engine.title, "; ".join(lent.why_not))
        logger.info("%s: %s, %d channels", gpu.device, engine.title, channels)
        return engine
    if group is None:
        raise FusedRingError(f"kernels cannot run on {gpu.device}: {'; '.join(lent)}")
    engine = BackendEngine(gpu, workspace, pages.log, group, channels=channels)
    logger.warning(
        "%s: reducing with %s, whose bits differ from those of fusedring's kernels, since %s",
        gpu.device,
        engine.title,
        "; ".join(lent),
    )
    return engine


def ways_between_ranks(
    gpu: Gpu, group: dist.ProcessGroup | None, workspace: Workspace, exchange: Exchange, *, timeout: float
) -> list[Way]:
    """All ways that there are, the fastest first (collective)."""
    if group is None or workspace.world_size == 1:
        return [Alone(gpu)]
    gpus = exchange([gpu.identity(), gpu.device.index], "tell each other their GPUs")
    identities, indices = zip(*gpus, strict=True)
    if len(set(identities)) < len(gpus):
        logger.warning("several ranks use the same GPU (%s): their kernels take turns", ", ".join(identities))
    same_index = len(set(indices)) < len(set(identities))
    return [Peers(gpu, group, same_index=same_index), Pinned(gpu, workspace, timeout)]


def lend(
    gpu: Gpu,
    workspace: Workspace,
    pages: HostPages,
    ways: Sequence[Way],
    exchange: Exchange,
    *,
    channels: int,
    parity_bytes: int,
    probe: Probe,
) -> Lent | list[str]:
    """Open the first of `ways` that works on all ranks (collective). If none does: why, for each of them."""
    registered: list[int] = []
    troubles = _troubles(exchange, "register a page of host memory", lambda: registered.append(gpu.register(pages.own)))
    if not troubles:
        for way in ways:
            attempt = _Attempt(gpu, workspace, way, pages.status, registered[0], channels, parity_bytes, probe)
            found = attempt.open(exchange)
            if isinstance(found, Region):
                meshes = exchange("yes" if way.is_full_mesh() else "", "agree on algorithms")
                return Lent(way, found, pages, all(meshes), tuple(troubles))
            troubles.append(found)
            gpu.settle()
            way.close()
            pages.status.clear()
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
        status: KernelStatus,
        status_address: int,
        channels: int,
        parity_bytes: int,
        probe: Probe,
    ) -> None:
        self._gpu, self._workspace, self._way, self._status = gpu, workspace, way, status
        self._status_address, self._channels, self._parity_bytes = status_address, channels, parity_bytes
        self._limits = probe

    def open(self, exchange: Exchange) -> Region | str:
        """This rank's view of all regions, if the way works on all ranks; else what stood in the way on one."""
        memory: list[torch.Tensor] = []
        mapped: list[Region] = []
        steps: dict[str, Callable[[], object]] = {
            "allocate": lambda: memory.append(self._allocate()),
            "map what the peers have": lambda: mapped.append(self._map(*memory)),
            "compile the probe": self._compile,
        }
        for algorithm in _PROBED:
            steps[f"probe with {algorithm}"] = partial(self._probe, mapped, algorithm)
        for what, step in steps.items():
            found = _troubles(exchange, f"{what} ({self._way.name})", step)
            if found:
                return found[0]
        return mapped[0]

    def _allocate(self) -> torch.Tensor:
        memory = self._way.allocate(region_bytes(self._workspace.world_size, self._parity_bytes)).zero_()
        self._gpu.order(self._gpu.current_stream(), self._gpu.comm)
        self._gpu.settle()
        return memory

    def _map(self, memory: torch.Tensor) -> Region:
        return self._region(self._way.map(memory), self._workspace.rank, self._parity_bytes)

    def _compile(self) -> None:
        """Run the probe's kernels as a lone rank, so that nobody's compiler keeps the others' kernels waiting."""
        parity_bytes = 1 << 20
        alone = self._gpu.zeros(region_bytes(1, parity_bytes))
        region = self._region([alone.data_ptr()], 0, parity_bytes)
        for algorithm in _PROBED:
            self._reduce(region, algorithm, torch.ones(16, device=self._gpu.device))

    def _probe(self, mapped: Sequence[Region], algorithm: str) -> None:
        """Reduce several megabytes, and look at every number: data first, then the flag that says it is there."""
        (region,) = mapped
        world, elements = region.world, self._limits.elements
        x = (torch.arange(elements, device=self._gpu.device) % 1009).float()
        want = x * world + world * (world - 1) // 2
        x += region.rank
        self._reduce(region, algorithm, x)
        if self._status.failed:
            raise FusedRingError(f"no answer within {self._limits.seconds:g} s")
        if wrong := int((x != want).sum()):
            raise FusedRingError(f"{wrong} of {elements} numbers did not arrive")

    def _region(self, addresses: list[int], rank: int, parity_bytes: int) -> Region:
        bases = torch.tensor([*addresses, self._status_address]).to(self._gpu.device)
        return Region(bases, rank, len(addresses), parity_bytes, self._channels, self._gpu.platform)

    def _reduce(self, region: Region, algorithm: str, x: torch.Tensor) -> None:
        """Run one kernel to its end."""
        gpu, dtype = self._gpu, dtype_name(x.dtype)
        launch = Launch("all_reduce", algorithm, x.numel(), dtype, dtype)
        gpu.order(gpu.current_stream(), gpu.comm)
        with gpu.on(gpu.comm):
            for window in KernelLaunches(region, write_now).build(launch, x, ()):
                window.kernel.launch(x, gpu.patience(self._limits.seconds))
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
