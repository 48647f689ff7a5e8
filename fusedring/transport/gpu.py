"""What is asked of a GPU, and the one file that asks its driver, by way of torch.cuda.

Streams and events are opaque here: what one call returns, another takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch

from fusedring.errors import FusedRingError
from fusedring.kernels.layout import AMD, NVIDIA

Stream = Any
Event = Any


class Gpu(Protocol):
    """One GPU of this process.

    platform: NVIDIA or AMD of kernels/layout.py. comm: the stream of all communication on this GPU. There is one in
    the process, so that kernels of several groups run in the order in which they were launched: two that wait for their
    peers at the same time could wait for ever.
    """

    device: torch.device
    platform: int
    comm: Stream

    def current_stream(self) -> Stream:
        """The stream that torch's operators use now, in this thread."""
        ...

    def identity(self) -> str:
        """Which GPU of the world it is."""
        ...

    def new_stream(self) -> Stream:
        """A stream of its own."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Use `stream` for torch's operators and kernels."""
        ...

    def order(self, first: Stream, then: Stream) -> None:
        """What `then` is given from now on runs after what `first` has been given."""
        ...

    def mark(self, stream: Stream) -> Event:
        """A point in time: when `stream` has done what it has been given."""
        ...

    def after(self, event: Event, stream: Stream) -> None:
        """What `stream` is given from now on runs after `event`."""
        ...

    def has_passed(self, event: Event) -> bool:
        """Whether `event` lies in the past. Never asked while a graph is captured."""
        ...

    def wait(self, event: Event) -> None:
        """Let the host wait for `event`."""
        ...

    def seconds(self, first: Event, second: Event) -> float:
        """From one event to another. Waits for both."""
        ...

    def is_capturing(self) -> bool:
        """Whether what the current stream is given is captured into a graph."""
        ...

    def settle(self) -> None:
        """Wait until everything that `comm` has been given is done."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory, uint8, that copies to the GPU read without the host."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between pinned and device memory, in the order of the current stream."""
        ...

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Do not give the tensor's memory to others before `stream` has done what it has been given."""
        ...

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Device memory, uint8."""
        ...

    def register(self, memory: torch.Tensor) -> int:
        """Make host memory (whole pages) reachable for kernels; the address they use."""
        ...

    def unregister(self, memory: torch.Tensor) -> None:
        """Undo `register`."""
        ...

    def patience(self, seconds: float) -> int:
        """A time in the unit of the kernels' clock."""
        ...


class Cuda:
    """`Gpu` by way of torch.cuda (HIP where torch is built for it). Raises FusedRingError where there is none."""

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise FusedRingError(
                f"{device} was asked for, but torch finds no GPU here: use tensors in host memory, which the host "
                "engine reduces"
            )
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.platform = AMD if torch.version.hip else NVIDIA
        if self.device not in _comm_streams:
            # Of high priority: its few programs get their place as soon as some of backward's have ended.
            _comm_streams[self.device] = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self.comm = _comm_streams[self.device]

    def current_stream(self) -> Stream:
        return torch.cuda.current_stream(self.device)

    def identity(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def new_stream(self) -> Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        with torch.cuda.stream(stream):
            yield

    def order(self, first: Stream, then: Stream) -> None:
        then.wait_stream(first)

    def mark(self, stream: Stream) -> Event:
        return stream.record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def after(self, event: Event, stream: Stream) -> None:
        stream.wait_event(event)

    def has_passed(self, event: Event) -> bool:
        return bool(event.query())

    def wait(self, event: Event) -> None:
        event.synchronize()

    def seconds(self, first: Event, second: Event) -> float:
        first.synchronize()
        second.synchronize()
        return float(first.elapsed_time(second)) / 1e3

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def settle(self) -> None:
        self.comm.synchronize()

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)

    def zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def register(self, memory: torch.Tensor) -> int:
        with torch.cuda.device(self.device):
            code = int(_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE | _MAPPED))
            if code:
                self._drain()
            _check(code)
        return memory.data_ptr()  # the same address on the device: all that torch runs on have unified addresses

    def unregister(self, memory: torch.Tensor) -> None:
        _check(int(_runtime().cudaHostUnregister(memory.data_ptr())))

    def _drain(self) -> None:
        """The runtime keeps its last error until somebody asks for it; the next operator would take it for its own."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self.device)

    def patience(self, seconds: float) -> int:
        return min(int(1e9 * seconds), (1 << 62))


_PORTABLE, _MAPPED = 1, 2
"""Flags of cudaHostRegister: for every context, and reachable for kernels."""

_comm_streams: dict[torch.device, torch.cuda.Stream] = {}


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(code: int) -> None:
    if code != 0:
        raise FusedRingError(f"host memory cannot be made reachable for the GPU: {torch.cuda.CudaError(code)}")
