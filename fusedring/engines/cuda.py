"""The triton engine on GPUs: starts launches on the communication stream, and does not wait for them.

What the host does for a launch: look at the board whether an earlier one failed, write its header into the ledger, let
the communication stream wait for the streams that produced the tensor, and launch one kernel for each window. What goes
wrong on the GPU is found at a later call, when parameters may be one bad step old.

In a CUDA graph the same things are captured. Signals are epochs counted in device memory, so replays need nothing more;
tables and buffers that a graph reads are kept, and changed no more, until the group's workspace is closed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from fusedring.engines.kernel_launches import Window, Windows
from fusedring.errors import FusedRingError
from fusedring.plan.launch import Launch
from fusedring.transport import agreement as launching
from fusedring.transport.gpu import Event, Gpu, Stream
from fusedring.transport.gpu_memory import Lent
from fusedring.transport.kernel_status import Watch
from fusedring.transport.launch_log import Ledger
from fusedring.transport.pinned import Staging
from fusedring.transport.source import Source
from fusedring.transport.workspace import Workspace

if TYPE_CHECKING:
    from fusedring.kernels.region import Totals

PARITY_BYTES = 64 << 20
"""Slots of one parity, at each rank: a float32 bucket of 25 MiB fits in one window for up to 8 ranks. Not measured."""

CHANNELS = 12
"""Programs of a launch: few, so that backward keeps its multiprocessors. Not measured."""


LEAVE_SECONDS = 5.0
"""How long a rank that ends without close() waits for its last launches, before it makes them leave."""


@dataclass(slots=True)
class Pending:
    """A launch that was started: when it begins and is done, and what its kernels learn meanwhile."""

    begun: Event
    done: Event
    totals: list[Totals] = field(default_factory=list)


class CudaEngine:
    """Starts the launches of one process group on this rank's GPU, one after another.

    Raises, in `start` and `check`, what an earlier launch met: CollectiveTimeoutError or PeerLostError that names rank
    and step, MismatchError if ranks have launched different things; the results since then are NaN or wrong.

    full_mesh: whether every two ranks have a link of their own.
    """

    def __init__(self, gpu: Gpu, workspace: Workspace, executor: Executor, *, full_mesh: bool = False) -> None:
        self.gpu, self.full_mesh = gpu, full_mesh
        self.executor = executor
        self._workspace = workspace
        self._failure: FusedRingError | None = None
        self._last: Event | None = None
        self._checks_each = os.environ.get("FUSEDRING_DEBUG") == "1"

    @torch.no_grad()
    def start(
        self,
        launch: Launch,
        tensor: torch.Tensor,
        *,
        timeout: float,
        sources: Sequence[Source] = (),
        after: Sequence[Stream] = (),
    ) -> Pending:
        """Give `launch` on the flat `tensor` to the communication stream, after what the streams `after` do.

        after: those that produce the tensor and its sources; none means the current one, and then the tensor's memory
        is kept from reuse until the launch is done.
        """
        gpu = self.gpu
        self.check(launch.label)
        header = launching.pack(launch, None)
        if self._checks_each and not gpu.is_capturing():
            launching.agree(self._workspace.meet(header, timeout=timeout))
        self.executor.check_capture(launch, tensor, sources)
        self.executor.ledger.enter(header)
        for stream in after or (gpu.current_stream(),):
            gpu.order(stream, gpu.comm)
        with gpu.on(gpu.comm):
            begun = gpu.mark(gpu.comm)
            totals = self.executor.run(launch, tensor, sources, timeout)
            done = gpu.mark(gpu.comm)
        if not after:
            gpu.keep(tensor, gpu.comm)
        if not gpu.is_capturing():
            self._last = done
        return Pending(begun, done, totals)

    def join(self, pending: Pending, label: str) -> None:
        """What the current stream is given from now on runs after the launch. Raises as the class says."""
        self.gpu.after(pending.done, self.gpu.current_stream())
        self.check(label)

    def check(self, label: str) -> None:
        """Raise what earlier launches met, as far as it is known by now; without asking the GPU."""
        if self._failure is None:
            try:
                self.executor.check(label)
            except FusedRingError as error:
                self._failure = error
                self._workspace.fail(error)
                raise
        else:
            raise type(self._failure)(str(self._failure))

    def close(self) -> None:
        """Wait for what was started, which is bounded, and let go of the memory."""
        try:
            self.gpu.settle()
        finally:
            self.executor.close()

    def abandon(self) -> None:
        """Close without waiting for long: kernels that wait in vain are made to leave."""
        for give_up in (False, True):
            if give_up:
                self.executor.stop()
            if self._is_through_within(LEAVE_SECONDS):
                self.executor.close()
                return
        # Something else keeps the GPU busy: then its memory stays, as long as the process.

    def _is_through_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._last is not None:
            try:
                if self.gpu.has_passed(self._last):
                    break
            except RuntimeError:  # the GPU is lost, or being captured
                return False
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True


class Executor(Protocol):
    """What carries a launch out, on the current stream."""

    name: str
    ledger: Ledger

    def check_capture(self, launch: Launch, tensor: torch.Tensor, sources: Sequence[Source]) -> None:
        """Raises NotCapturedError if a graph is being captured and the launch cannot be."""
        ...

    def run(self, launch: Launch, tensor: torch.Tensor, sources: Sequence[Source], timeout: float) -> list[Totals]:
        """Give the launch to the current stream."""
        ...

    def check(self, label: str) -> None:
        """Raise what earlier launches met, as far as it is known."""
        ...

    def stop(self) -> None:
        """Make kernels leave."""
        ...

    def close(self) -> None:
        """Let go of the memory. Nothing runs any more."""
        ...


class Kernels:
    """Launches by the kernels of fusedring/kernels."""

    def __init__(self, gpu: Gpu, lent: Lent) -> None:
        self.name, self.ledger = f"triton on {lent.way.name}", lent.pages.ledger
        self._gpu, self._lent, self._boards = gpu, lent, lent.pages.boards
        self._staging = Staging(gpu)
        self._windows = Windows(lent.region, self._staging.write)
        self._in_graphs: list[tuple[torch.Tensor, list[Window]]] = []
        self._watch: Watch | None = None

    def check_capture(self, launch: Launch, tensor: torch.Tensor, sources: Sequence[Source]) -> None:
        if self._gpu.is_capturing() and launch.elements:
            tables = [window.table.on_device for window in self._windows.known(launch, tensor, sources)]
            # A launch that has never run needs a compiler, too.
            self._staging.check_spares([t.nbytes for table in tables for t in table] or [1 << 62])

    def run(self, launch: Launch, tensor: torch.Tensor, sources: Sequence[Source], timeout: float) -> list[Totals]:
        if self._watch is None:
            self._watch = Watch(self._boards)
        if self._gpu.is_capturing():
            windows = self._windows.build(launch, tensor, sources)
            self._in_graphs.append((tensor, windows))
        else:
            windows = self._windows.of(launch, tensor, sources)
            self._staging.put_aside()
        patience = self._gpu.patience(timeout)
        for window in windows:
            window.kernel.launch(tensor, patience)
        return [window.totals for window in windows]

    def check(self, label: str) -> None:
        if self._boards.failed:
            raise self._boards.failure(label, "a launch on the GPU", "its timeout has passed")
        self.ledger.compare()

    def stop(self) -> None:
        self._boards.stop()
        if self._watch is not None:
            self._watch.close()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._windows.forget()
        self._in_graphs.clear()
        self._lent.close(self._gpu)
