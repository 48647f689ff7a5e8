"""The triton engine on host memory: launches the kernels of fusedring/kernels under Triton's interpreter.

One process per rank (TRITON_INTERPRET=1), on shared memory: the same kernel source that a GPU runs, slowly, for tests
and for looking at. One kernel at a time in a process: the interpreter has global state.

The workspace's own meeting comes first, so that ranks which differ are found before any write.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from fusedring.engines.kernel_launches import KernelLaunch, KernelLaunches
from fusedring.engines.work import Work
from fusedring.errors import FusedRingError
from fusedring.kernels.layout import ABORT, EPOCHS, INTERPRETER, PROMPT, SIGNALS, STATUS_BYTES, region_bytes
from fusedring.kernels.region import Region
from fusedring.kernels.signals import wait_in_vain
from fusedring.kernels.tables import write_now
from fusedring.plan.launch import Launch, Outcome
from fusedring.plan.policy import Rule
from fusedring.transport import agreement
from fusedring.transport.gpu import Stream
from fusedring.transport.kernel_status import KernelStatus, Watch
from fusedring.transport.source import Source
from fusedring.transport.workspace import Workspace

PARITY_BYTES = 8 << 20
"""Slots of one parity, at each rank."""

CHANNELS = 2
"""Programs of a launch. The interpreter runs them one after another, so here they are only as many as tests need."""

_MOST_LOOKS = 1 << 62


class InterpreterEngine:
    """Runs launches on one workspace, one after another."""

    name = "triton"
    in_caller = True  # in another thread, Triton's interpreter would meet the caller's own kernels
    reads_in_place = True
    tells_values = True
    tells_more = True
    gpu = None

    def __init__(self, workspace: Workspace, rules: Sequence[Rule]) -> None:
        self.rules = rules
        self._workspace = workspace
        self._opened: _Opened | None = None

    def work(self, result: torch.Tensor, label: str) -> Work:
        """As `Engine.work`."""
        return Work(result, label)

    @torch.no_grad()
    def start(
        self,
        launch: Launch,
        tensor: torch.Tensor,
        *,
        timeout: float,
        sources: Sequence[Source] = (),
        after: Sequence[Stream] = (),
    ) -> Outcome:
        """Execute `launch` on this rank's `tensor`, in place: one-dimensional, contiguous, in host memory.

        sources: parts of the tensor that are read elsewhere; only the result is written to `tensor`.

        Returns when all ranks had come, and what the kernels learnt of the results.

        Raises MismatchError, with nothing written, if the ranks' launches differ; CollectiveTimeoutError naming rank
        and step if a rank makes no progress for about `timeout` seconds, or PeerLostError if it has ended, and then
        `tensor` is NaN; FusedRingError if a kernel of another group is running in this process.
        """
        headers = self._workspace.meet(agreement.pack(launch), timeout=timeout)
        started = time.perf_counter()
        agreement.agree(headers)
        if self._opened is None:  # on all ranks
            self._opened = _Opened(self._workspace, timeout)
        opened, squares, unbounded = self._opened, 0.0, False
        try:
            with _alone(launch, self._workspace.rank):
                for window in opened.kernels.of(launch, tensor, sources):
                    opened.run(launch, window, tensor, timeout)
                    squares += float(window.totals.squares.sum())
                    unbounded |= bool(window.totals.unbounded.any())
        except BaseException:
            opened.abort_all()  # peers wait in a kernel, where nothing else reaches them
            tensor.fill_(math.nan)  # some of it may be reduced, and some not
            raise
        return Outcome(started, squares, unbounded, agreement.anybody_has_more(headers))

    def settle(self) -> None:
        """What was started has ended."""

    def close(self) -> None:
        """As `Engine.close`."""
        self._opened = None

    def abandon(self) -> None:
        """The workspace tells the other ranks, and a kernel that waits for this one is stopped there."""


class _Opened:
    """The regions and status pages of all ranks. Making it is collective."""

    def __init__(self, workspace: Workspace, timeout: float) -> None:
        ranks = range(workspace.world_size)
        nbytes = region_bytes(workspace.world_size, PARITY_BYTES)
        self._memory = workspace.allocate(nbytes + STATUS_BYTES, timeout=timeout)
        location = workspace.locate(self._memory)
        assert location is not None
        lent = [workspace.bytes_at(rank, location, nbytes + STATUS_BYTES) for rank in ranks]
        self._regions = [memory[:nbytes] for memory in lent]
        self.status = KernelStatus(workspace.rank, [memory[nbytes:] for memory in lent], CHANNELS, workspace.is_lost)
        bases = [region.data_ptr() for region in self._regions]
        bases.append(lent[workspace.rank][nbytes:].data_ptr())
        self._region = Region(
            torch.tensor(bases), workspace.rank, workspace.world_size, PARITY_BYTES, CHANNELS, INTERPRETER
        )
        self.kernels = KernelLaunches(self._region, write_now)
        self._look_seconds = seconds_per_look()

    def run(self, launch: Launch, window: KernelLaunch, tensor: torch.Tensor, timeout: float) -> None:
        """Run one kernel to its end. Raises if it gave up."""
        ended, watch = self._epochs(), Watch(self.status)
        try:
            with np.errstate(all="ignore"):
                window.kernel.launch(tensor, looks_within(timeout, self._look_seconds))
        finally:
            watch.close()
        if not torch.equal(self._epochs(), ended + 1):  # a channel that is through has counted
            raise self.status.failure(launch.label, launch.algorithm, f"its timeout is {timeout:g} s")

    def abort_all(self) -> None:
        """Raise every rank's abort word."""
        for region in self._regions:
            region.view(torch.int32)[ABORT] = 1

    def _epochs(self) -> torch.Tensor:
        """How many launches each channel has finished."""
        words = self._regions[self._region.rank].view(torch.int32)
        return words[EPOCHS : EPOCHS + CHANNELS].clone()


@contextmanager
def _alone(launch: Launch, rank: int) -> Iterator[None]:
    """Refuse to run beside another kernel: waiting could be for ever, if ranks take their groups in other orders."""
    if not _interpreting.acquire(blocking=False):
        raise FusedRingError(
            f"{launch.label}: rank {rank} runs a kernel of another group, and Triton's interpreter runs one at a time "
            "in a process. Wait for it before launching on this group, or use engine='host'"
        )
    try:
        yield
    finally:
        _interpreting.release()


def seconds_per_look() -> float:
    """What one look of a waiting kernel takes here and now."""
    words = torch.zeros(SIGNALS + 1, dtype=torch.int32)
    status = torch.zeros(STATUS_BYTES // 4, dtype=torch.int32)
    times = []
    for _ in range(2):
        start = time.perf_counter()
        wait_in_vain[(1,)](words.data_ptr(), status.data_ptr(), 1)
        times.append(time.perf_counter() - start)
    return min(times) / PROMPT


def looks_within(timeout: float, look_seconds: float) -> int:
    """The patience of a wait that ends after about `timeout` seconds."""
    return max(1, min(_MOST_LOOKS, int(timeout / look_seconds) - PROMPT))


_interpreting = threading.Lock()
"""Triton's interpreter keeps its state in the process, so that only one kernel can run at a time."""
