"""What engines on a GPU share: they start launches on the communication stream, and do not wait for them.

What the host does for a launch: look whether an earlier one has failed, write its header down where the other ranks
compare it, let the communication stream wait for the streams that produced the tensor, and give it the launch. What
goes wrong on the GPU is found at a later call, when parameters may be one bad step old.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from fusedring.engines.work import GpuWork, Pending
from fusedring.errors import FusedRingError
from fusedring.kernels.region import Totals
from fusedring.plan.launch import Launch
from fusedring.plan.policy import Rule, rules_on_gpus
from fusedring.transport import agreement
from fusedring.transport.gpu import Event, Gpu, Stream
from fusedring.transport.launch_log import LaunchLog
from fusedring.transport.source import Source
from fusedring.transport.workspace import Workspace

LEAVE_SECONDS = 5.0
"""How long a rank that ends without close() waits for its last launches, before it makes them leave."""


class GpuEngine(ABC):
    """Starts the launches of one process group on this rank's GPU.

    Raises, in `start` and `check`, what an earlier launch met: CollectiveTimeoutError or PeerLostError that names rank
    and step, MismatchError if ranks have launched different things; the results since then are NaN or wrong.

    title: the engine and how it reaches the other ranks, for people. channels: programs of each launch. full_mesh:
    whether every two ranks have a link of their own.
    """

    name: str
    title: str
    in_caller = True
    reads_in_place = True
    tells_values: bool
    tells_more = False

    def __init__(
        self, gpu: Gpu, workspace: Workspace, log: LaunchLog, *, channels: int, full_mesh: bool = False
    ) -> None:
        self.gpu, self.channels = gpu, channels
        self.rules: Sequence[Rule] = rules_on_gpus(workspace.world_size, full_mesh=full_mesh)
        self._workspace, self._log = workspace, log
        self._failure: FusedRingError | None = None
        self._last: Event | None = None
        self._checks_each = os.environ.get("FUSEDRING_DEBUG") == "1"

    def work(self, result: torch.Tensor, label: str) -> GpuWork:
        """As `Engine.work`."""
        return GpuWork(result, label, self.gpu, self.check)

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
        header = agreement.pack(launch)
        if self._checks_each and not gpu.is_capturing():
            agreement.agree(self._workspace.meet(header, timeout=timeout))
        self._check_capture(launch, tensor, sources)
        self._log.enter(header)
        for stream in after or (gpu.current_stream(),):
            gpu.order(stream, gpu.comm)
        with gpu.on(gpu.comm):
            begun = gpu.mark(gpu.comm)
            totals = self._give(launch, tensor, sources, timeout)
            done = gpu.mark(gpu.comm)
        if not after:
            gpu.keep(tensor, gpu.comm)
        if not gpu.is_capturing():
            self._last = done
        return Pending(begun, done, totals)

    def check(self, label: str) -> None:
        """Raise what earlier launches met, as far as it is known by now; without asking the GPU."""
        if self._failure is None:
            try:
                self._look(label)
            except FusedRingError as error:
                self._failure = error
                self._workspace.fail(error)
                raise
        else:
            raise type(self._failure)(str(self._failure))

    def settle(self) -> None:
        """As `Engine.settle`."""
        self.gpu.settle()

    def abandon(self) -> None:
        """Close without waiting for long: kernels that wait in vain are made to leave."""
        for give_up in (False, True):
            if give_up:
                self._stop()
            if self._is_through_within(LEAVE_SECONDS):
                self.close()
                return
        # Something else keeps the GPU busy: then its memory stays, as long as the process.

    @abstractmethod
    def close(self) -> None:
        """As `Engine.close`."""

    @abstractmethod
    def _give(self, launch: Launch, tensor: torch.Tensor, sources: Sequence[Source], timeout: float) -> list[Totals]:
        """Give the launch to the current stream."""

    @abstractmethod
    def _check_capture(self, launch: Launch, tensor: torch.Tensor, sources: Sequence[Source]) -> None:
        """Raises NotCapturedError if a graph is being captured and the launch cannot be."""

    @abstractmethod
    def _look(self, label: str) -> None:
        """Raise what earlier launches met, as far as it is known."""

    @abstractmethod
    def _stop(self) -> None:
        """Make what runs leave."""

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
