"""Virtual ranks: all ranks of a group in one process, so that one GPU checks the protocol and measures the kernels.

On a GPU each virtual rank has a stream of its own, and its region and status page are ordinary memory: the kernels run
next to each other, and wait for each other, as those of several GPUs do. All programs must find their place at once,
which is checked at the start. On the CPU each virtual rank is a forked child for as long as a collective takes, under
Triton's interpreter.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

from fusedring.config import (
    ALGORITHMS,
    KINDS,
    WireDtype,
    check_dtype,
    check_engine,
    check_timeout,
    check_wire_dtype,
    dtype_name,
    scale_factor,
)
from fusedring.errors import FusedRingError
from fusedring.kernels.layout import INTERPRETER, MOST_CHANNELS, STATUS_BYTES, region_bytes
from fusedring.kernels.region import Region
from fusedring.kernels.tables import write_now
from fusedring.plan.launch import Launch
from fusedring.transport.gpu import Cuda, Event, Stream
from fusedring.transport.kernel_status import KernelStatus

PARITY_BYTES = 8 << 20
"""Slots of one parity, at each virtual rank."""

CHANNELS = {"cuda": 8, "cpu": 2}
"""Programs of each virtual rank, by type of device."""

_STREAMS = 32
"""torch has no more streams of one priority, and two virtual ranks in one stream would wait for each other."""

_LEAVE_SECONDS = 10.0
"""How long after its timeout a process of a virtual rank is left alive."""

Before = Callable[[int], None]
"""before(rank): what a virtual rank does before it launches, on its stream."""


@contextmanager
def virtual_ranks(
    world_size: int,
    device: torch.device | str = "cuda",
    *,
    channels: int | None = None,
    parity_bytes: int = PARITY_BYTES,
    cooperative: bool = False,
    stages: int = 1,
) -> Iterator[VirtualRanks]:
    """`world_size` ranks on one device. channels: programs of each; parity_bytes: of slots, a multiple of 256.

    stages: tiles that a program has on their way at once, 1 to 8.

    cooperative: launch as between several GPUs. Off by default, since a driver may not run two such kernels next to
    each other; that all programs find their place is checked here.

    Raises ValueError for arguments that cannot be, or where the GPU has no room for all programs at once,
    FusedRingError where there is no GPU.
    """
    device = torch.device(device)
    if isinstance(world_size, bool) or world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if device.type not in CHANNELS:
        raise ValueError(f"device must be cuda or cpu, got {device}")
    least = 256 * max(1, 2 * world_size) * world_size
    if parity_bytes < least or parity_bytes % 256:
        raise ValueError(f"parity_bytes must be a multiple of 256, at least {least}, got {parity_bytes}")
    if not 1 <= stages <= 8:
        raise ValueError(f"stages must lie between 1 and 8, got {stages}")
    channels = CHANNELS[device.type] if channels is None else channels
    if not 1 <= channels <= MOST_CHANNELS:
        raise ValueError(f"channels must lie between 1 and {MOST_CHANNELS}, got {channels}")
    if device.type == "cpu":
        check_engine("triton", device)
        place: _Place = _Processes()
    else:
        place = _Streams(device, world_size, channels)
    ranks = VirtualRanks(place, world_size, channels, parity_bytes, cooperative=cooperative, stages=stages)
    try:
        yield ranks
    finally:
        place.settle()


class VirtualRanks:
    """Made by `virtual_ranks`. Collectives take one tensor per rank, in rank order, and work in place.

    To be used by one thread at a time.

    device: where the tensors must lie.
    """

    def __init__(
        self, place: _Place, world_size: int, channels: int, parity_bytes: int, *, cooperative: bool, stages: int
    ) -> None:
        self.world_size, self.channels, self.device = world_size, channels, place.device
        self._place, self._cooperative, self._stages = place, cooperative, stages
        ranks = range(world_size)
        self._memory = [place.device_bytes(region_bytes(world_size, parity_bytes)) for _ in ranks]
        self._pages = [place.host_bytes(STATUS_BYTES) for _ in ranks]
        bases = [memory.data_ptr() for memory in self._memory]
        self._status = [KernelStatus(rank, self._pages, channels, lambda _: False) for rank in ranks]
        self._regions = [self._region([*bases, self._pages[rank].data_ptr()], rank, parity_bytes) for rank in ranks]

    def all_reduce(self, tensors: Sequence[torch.Tensor], **how: Any) -> None:
        """As fusedring.all_reduce on every rank; see `prepare` for the arguments."""
        self._run("all_reduce", tensors, how)

    def reduce_scatter(self, tensors: Sequence[torch.Tensor], **how: Any) -> None:
        """As fusedring.reduce_scatter on every rank."""
        self._run("reduce_scatter", tensors, how)

    def all_gather(self, tensors: Sequence[torch.Tensor], **how: Any) -> None:
        """As fusedring.all_gather on every rank."""
        self._run("all_gather", tensors, how)

    def prepare(
        self,
        kind: str,
        tensors: Sequence[torch.Tensor],
        *,
        algorithm: str = "ring",
        wire_dtype: WireDtype = None,
        op: str = "avg",
        scale: float | None = None,
    ) -> VirtualCollective:
        """A collective on these tensors (flat, contiguous, alike), to be run as often as one likes.

        kind: 'all_reduce', 'reduce_scatter' or 'all_gather'. The rest as for fusedring.all_reduce.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
        if len(tensors) != self.world_size:
            raise ValueError(f"expected a tensor for each of {self.world_size} ranks, got {len(tensors)}")
        first = tensors[0]
        for rank, tensor in enumerate(tensors):
            alike = tensor.shape == first.shape and tensor.dtype == first.dtype
            if not alike or tensor.dim() != 1 or not tensor.is_contiguous():
                raise ValueError(
                    f"expected flat, contiguous tensors of one size and dtype, got {tuple(tensor.shape)} of "
                    f"{tensor.dtype} at rank {rank} and {tuple(first.shape)} of {first.dtype} at rank 0"
                )
        check_dtype(first.dtype)
        wire = check_wire_dtype(wire_dtype)
        assert wire is None or isinstance(wire, torch.dtype)
        factor = scale_factor(op, scale, self.world_size, first.dtype)
        launch = Launch(
            kind, algorithm, first.numel(), dtype_name(first.dtype), dtype_name(wire or first.dtype), factor, "triton"
        )
        detached = [tensor.detach() for tensor in tensors]
        return VirtualCollective(self._place, self._regions, self._status, launch, detached)

    def reset(self) -> None:
        """Forget a failure: all words of all regions and status pages are zero again. Nothing runs."""
        self._place.settle()
        for memory in (*self._memory, *self._pages):
            memory.zero_()

    def _region(self, bases: list[int], rank: int, parity_bytes: int) -> Region:
        table = torch.tensor(bases).to(self._place.device)
        return Region(
            table,
            rank,
            self.world_size,
            parity_bytes,
            self.channels,
            self._place.platform,
            cooperative=self._cooperative,
            stages=self._stages,
        )

    def _run(self, kind: str, tensors: Sequence[torch.Tensor], how: dict[str, Any]) -> None:
        timeout = how.pop("timeout", 60.0)
        collective = self.prepare(kind, tensors, **how)
        collective.run(timeout=timeout)
        collective.check()


class VirtualCollective:
    """Made by `VirtualRanks.prepare`."""

    def __init__(
        self,
        place: _Place,
        regions: Sequence[Region],
        statuses: Sequence[KernelStatus],
        launch: Launch,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        # Here, since kernels are made for the interpreter or not when they are imported, and this file may be before.
        from fusedring.engines.kernel_launches import KernelLaunches

        self._place, self._regions, self._status, self._launch = place, regions, statuses, launch
        self._tensors = tensors
        self._reachable = [place.reachable(tensor) for tensor in tensors]
        self._windows = [
            KernelLaunches(region, write_now).build(launch, tensor, ())
            for region, tensor in zip(regions, self._reachable, strict=True)
        ]

    def run(
        self, *, timeout: float = 60.0, before: Before | None = None, ranks: Sequence[int] | None = None
    ) -> tuple[Event, Event] | None:
        """Run it once on all ranks (or, to see what the others do, on `ranks` only).

        On a GPU it is started only, after what the current stream does, and the current stream waits for it; the events
        say when it began and was done. timeout: of one wait, in seconds.
        """
        check_timeout(timeout)
        for tensor, reachable in zip(self._tensors, self._reachable, strict=True):
            if tensor is not reachable:
                reachable.copy_(tensor)
        chosen = range(len(self._regions)) if ranks is None else ranks

        def launch_one(rank: int) -> None:
            if before is not None:
                before(rank)
            for window in self._windows[rank]:
                window.kernel.launch(self._reachable[rank], self._place.patience(timeout))

        events = self._place.run(chosen, launch_one, self._status, timeout)
        for tensor, reachable in zip(self._tensors, self._reachable, strict=True):
            if tensor is not reachable:
                tensor.copy_(reachable)
        return events

    def check(self) -> None:
        """Wait for what was run. Raises CollectiveTimeoutError or FusedRingError if a rank gave up."""
        self._place.settle()
        for status in self._status:
            if status.failed:
                raise status.failure(self._launch.label, self._launch.algorithm, "its timeout has passed")


class _Place(Protocol):
    """Where virtual ranks run."""

    device: torch.device
    platform: int

    def device_bytes(self, nbytes: int) -> torch.Tensor: ...
    def host_bytes(self, nbytes: int) -> torch.Tensor: ...
    def reachable(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def patience(self, timeout: float) -> int: ...
    def settle(self) -> None: ...
    def run(
        self, ranks: Sequence[int], act: Before, statuses: Sequence[KernelStatus], timeout: float
    ) -> tuple[Event, Event] | None: ...


class _Streams:
    """A GPU, on which each virtual rank has a stream."""

    def __init__(self, device: torch.device, world_size: int, channels: int) -> None:
        self._gpu = Cuda(device)
        self.device, self.platform = self._gpu.device, self._gpu.platform
        if world_size > _STREAMS:
            raise ValueError(f"world_size must be at most {_STREAMS} on a GPU, got {world_size}")
        places = torch.cuda.get_device_properties(self.device).multi_processor_count
        if world_size * channels > places:
            raise ValueError(
                f"{world_size} virtual ranks of {channels} channels each do not fit on {places} multiprocessors at "
                "once: use fewer channels"
            )
        self._streams: list[Stream] = [self._gpu.new_stream() for _ in range(world_size)]

    def device_bytes(self, nbytes: int) -> torch.Tensor:
        return self._gpu.zeros(nbytes)

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        return self._gpu.pinned(nbytes).zero_()

    def reachable(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device != self.device:
            raise ValueError(f"the tensor is on {tensor.device}, and these virtual ranks are on {self.device}")
        return tensor

    def patience(self, timeout: float) -> int:
        return self._gpu.patience(timeout)

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def run(
        self, ranks: Sequence[int], act: Before, statuses: Sequence[KernelStatus], timeout: float
    ) -> tuple[Event, Event] | None:
        gpu, current = self._gpu, self._gpu.current_stream()
        begun = gpu.mark(current)
        for rank in ranks:
            gpu.after(begun, self._streams[rank])
            with gpu.on(self._streams[rank]):
                act(rank)
        for rank in ranks:
            gpu.order(self._streams[rank], current)
        return begun, gpu.mark(current)


class _Processes:
    """The CPU, on which each virtual rank is a forked child that runs its kernel under Triton's interpreter."""

    def __init__(self) -> None:
        self.device, self.platform = torch.device("cpu"), INTERPRETER

    def device_bytes(self, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        return self.device_bytes(nbytes)

    def reachable(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device != self.device:
            raise ValueError(f"the tensor is on {tensor.device}, and these virtual ranks are on the CPU")
        return self.device_bytes(tensor.nbytes).view(tensor.dtype)

    def patience(self, timeout: float) -> int:
        return 1 << 62  # looks; `run` keeps the time

    def settle(self) -> None:
        pass

    def run(
        self, ranks: Sequence[int], act: Before, statuses: Sequence[KernelStatus], timeout: float
    ) -> tuple[Event, Event] | None:
        children: dict[int, int] = {}
        failed: list[int] = []
        try:
            for rank in ranks:
                children[_fork(act, rank)] = rank
            deadline, late = time.monotonic() + timeout, False
            while children:
                for child in list(children):
                    ended, status = os.waitpid(child, os.WNOHANG)
                    if ended:
                        rank = children.pop(child)
                        failed += [rank] if status else []
                if (failed or time.monotonic() > deadline) and not late:
                    late = True
                    for each in statuses:
                        each.stop()
                if time.monotonic() > deadline + _LEAVE_SECONDS:
                    failed += children.values()
                    break
                time.sleep(0.002)
        finally:
            for child in children:
                with suppress(ProcessLookupError, ChildProcessError):
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
        if failed:
            raise FusedRingError(f"virtual rank {failed[0]} raised (see its traceback above), or did not end in time")
        return None


def _fork(act: Before, rank: int) -> int:
    """The process id of a child that does `act(rank)`."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.set_num_threads(1)  # the pool of threads stayed with the parent
        act(rank)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
