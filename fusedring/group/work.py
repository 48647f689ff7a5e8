"""Collectives under way: what a program holds while one of its collectives runs elsewhere."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from fusedring.config import check_timeout
from fusedring.engines.cuda import CudaEngine, Pending
from fusedring.errors import CollectiveTimeoutError
from fusedring.plan.launch import Outcome


@dataclass(slots=True)
class Batch:
    """Launches that belong together: after one of them failed, the others are not run."""

    error: BaseException | None = None


class Work:
    """A collective under way, as `torch.distributed.Work`."""

    def __init__(self, tensor: torch.Tensor, label: str) -> None:
        self._tensor = tensor
        self._label = label
        self._finished = False
        self._finishing = threading.Lock()
        self._awaited: threading.Event | None = None  # made by who waits: most works have ended before anybody does
        self._futures: list[torch.futures.Future[list[torch.Tensor]]] = []
        self._error: BaseException | None = None
        self._value: Any = None
        self._ended = 0.0

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._finished

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait for the end, then True. timeout: seconds, or a timedelta as torch.distributed has it.

        Raises what went wrong, or CollectiveTimeoutError if it has not ended after `timeout`; it goes on then.
        """
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        check_timeout(timeout)
        if not self._finished and not self._end().wait(timeout):
            raise CollectiveTimeoutError(
                f"{self._label} has not ended after {timeout:g} s; it goes on: wait again, or with a longer timeout"
            )
        if self._error is not None:
            raise self._error
        return True

    def result(self) -> torch.Tensor:
        """The tensor that the collective gives, once it has ended. Raises what `wait` raises."""
        self.wait()
        return self._tensor

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of [result()], as `torch.distributed.Work` has it; waiting for it raises what `wait` raises.

        What was added with `then` runs in the thread that ends the collective, and must not wait for another one.
        """
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        with self._finishing:
            if not self._finished:
                self._futures.append(future)
                return future
        self._complete(future)
        return future

    @property
    def outcome(self) -> Outcome:
        """When the transfer began, and what the engine learnt of its results; after a successful wait."""
        assert isinstance(self._value, Outcome)
        return self._value

    @property
    def ended(self) -> float:
        """time.perf_counter() at the end."""
        return self._ended

    def _finish(self) -> None:
        """It has ended: tell those who wait."""
        with self._finishing:
            self._finished = True
            if self._awaited is not None:
                self._awaited.set()
        for future in self._futures:
            self._complete(future)

    def _end(self) -> threading.Event:
        """What is set at the end."""
        with self._finishing:
            if self._awaited is None:
                self._awaited = threading.Event()
            if self._finished:
                self._awaited.set()
            return self._awaited

    def _complete(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        if self._error is None:
            future.set_result([self._tensor])
        else:
            future.set_exception(self._error)  # type: ignore[arg-type]


class GpuWork(Work):
    """A collective on a GPU: `wait` makes the current stream wait, not the host."""

    def __init__(self, tensor: torch.Tensor, label: str, engine: CudaEngine) -> None:
        super().__init__(tensor, label)
        self._engine = engine

    def is_completed(self) -> bool:
        """Whether the GPU is through with it, well or not."""
        return self._error is not None or self._engine.gpu.has_passed(self.pending.done)

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """What the current stream is given from now on runs after it. With a timeout the host waits, too.

        Raises what is known by now to have gone wrong, in this collective or an earlier one.
        """
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        check_timeout(timeout)
        if self._error is not None:
            raise self._error
        if timeout is not None and not self._passes_within(timeout):
            raise CollectiveTimeoutError(
                f"{self._label} has not ended after {timeout:g} s; it goes on: wait again, or with a longer timeout"
            )
        self._engine.join(self.pending, self._label)
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """As `Work.get_future`; it is completed, and waiting for it makes the current stream wait, not the host.

        It tells what was known to have gone wrong when this collective was started.
        """
        gpu = self._engine.gpu
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(
            devices=[gpu.device] if gpu.device.type == "cuda" else None
        )
        with gpu.on(gpu.comm):  # a future waits for what the stream in which it is completed was given so far
            self._complete(future)
        return future

    @property
    def started(self) -> bool:
        """Whether it was given to the GPU: not, if an earlier failure was known."""
        return isinstance(self._value, Pending)

    @property
    def pending(self) -> Pending:
        """Its events on the GPU, if it was started."""
        assert isinstance(self._value, Pending)
        return self._value

    def _passes_within(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while not self._engine.gpu.has_passed(self.pending.done):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True
