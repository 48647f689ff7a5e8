"""Collectives under way: what a program holds while one of its collectives runs elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from fusedring.config import check_timeout
from fusedring.errors import CollectiveTimeoutError
from fusedring.kernels.region import Totals
from fusedring.plan.launch import Outcome
from fusedring.transport.gpu import Event, Gpu

Learnt = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Batch:
    """Launches that belong together: after one of them failed, the others are not run."""

    error: BaseException | None = None


@dataclass(slots=True)
class Pending:
    """A launch that a GPU was given: when it begins and is done, and what its kernels learn meanwhile."""

    begun: Event
    done: Event
    totals: list[Totals] = field(default_factory=list)


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
        seconds = _seconds(timeout)
        if not self._finished and not self._end().wait(seconds):
            raise self._goes_on(seconds)
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

    def heard_more(self) -> bool:
        """Whether some rank said with this launch that it has more to tell. Waits for the end; False if it failed."""
        if not self._finished:
            self._end().wait()
        return isinstance(self._value, Outcome) and bool(self._value.more)

    def learnt(self) -> Learnt | None:
        """Of the results that this rank completed, once it has ended; None if it failed, or nobody has looked at them.

        The sum of their squares, and how many channels met one that is inf or NaN: float32 without dimensions.
        """
        if self._error is not None or not isinstance(self._value, Outcome) or self._value.squares is None:
            return None
        values = torch.tensor([self._value.squares, float(self._value.unbounded or 0)], dtype=torch.float32)
        return values[0], values[1]

    @property
    def ended(self) -> float:
        """time.perf_counter() at the end."""
        return self._ended

    def _finish(self, value: Any = None, error: BaseException | None = None) -> None:
        """It has ended, and gave `value`, or ended with `error`: tell those who wait."""
        self._value, self._error, self._ended = value, error, time.perf_counter()
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

    def _goes_on(self, seconds: float | None) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"{self._label} has not ended after {seconds:g} s; it goes on: wait again, or with a longer timeout"
        )

    def _complete(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        if self._error is None:
            future.set_result([self._tensor])
        else:
            future.set_exception(self._error)  # type: ignore[arg-type]


class GpuWork(Work):
    """A collective on a GPU: `wait` makes the current stream wait, not the host.

    check: called with the label, raises what is known by now to have gone wrong on the GPU.
    """

    def __init__(self, tensor: torch.Tensor, label: str, gpu: Gpu, check: Callable[[str], None]) -> None:
        super().__init__(tensor, label)
        self._gpu, self._check = gpu, check

    def is_completed(self) -> bool:
        """Whether the GPU is through with it, well or not."""
        return self._error is not None or self._gpu.has_passed(self.pending.done)

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """What the current stream is given from now on runs after it. With a timeout the host waits, too.

        Raises what is known by now to have gone wrong, in this collective or an earlier one.
        """
        seconds = _seconds(timeout)
        if self._error is not None:
            raise self._error
        if seconds is not None and not self._passes_within(seconds):
            raise self._goes_on(seconds)
        self._gpu.after(self.pending.done, self._gpu.current_stream())
        self._check(self._label)
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """As `Work.get_future`; it is completed, and waiting for it makes the current stream wait, not the host.

        It tells what was known to have gone wrong when this collective was started.
        """
        gpu = self._gpu
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(
            devices=[gpu.device] if gpu.device.type == "cuda" else None
        )
        with gpu.on(gpu.comm):  # a future waits for what the stream in which it is completed was given so far
            self._complete(future)
        return future

    def learnt(self) -> Learnt | None:
        """As `Work.learnt`, but it need not have ended: in the current stream, which must be that of the launch."""
        if not self.started:
            return None
        totals = self.pending.totals
        if not totals:
            nothing = torch.zeros((), dtype=torch.float32, device=self._tensor.device)
            return nothing, nothing
        squares, unbounded = torch.cat([t.squares for t in totals]), torch.cat([t.unbounded for t in totals])
        return squares.sum(), unbounded.sum().float()

    @property
    def started(self) -> bool:
        """Whether it was given to the GPU: not, if an earlier failure was known."""
        return isinstance(self._value, Pending)

    @property
    def pending(self) -> Pending:
        """Its events on the GPU, if it was started."""
        assert isinstance(self._value, Pending)
        return self._value

    def _passes_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._gpu.has_passed(self.pending.done):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True


def _seconds(timeout: float | timedelta | None) -> float | None:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    check_timeout(seconds)
    return seconds
