"""A GPU that writes down what it is asked, in host memory: what the CUDA engine does, without a GPU.

Streams are names. Copies and kernels run at once (kernels under Triton's interpreter), so results can be compared as
well as the order of calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fusedring.engines import interpreter, open_gpu


@dataclass(frozen=True)
class Mark:
    number: int
    stream: str


class RecordingGpu:
    """`Gpu` on the CPU. calls: what was asked, in order. capturing: set it to pretend a capture."""

    def __init__(self) -> None:
        from fusedring.kernels.signals import INTERPRETER

        self.device, self.platform, self.comm = torch.device("cpu"), INTERPRETER.value, "comm"
        self.calls: list[tuple[Any, ...]] = []
        self.capturing = False
        self.pending: set[Mark] = set()
        self.registered: set[int] = set()
        self._current = ["main"]
        self._marks = 0
        self._look_seconds = interpreter.seconds_per_look()

    def note(self, *call: Any) -> None:
        self.calls.append(call)

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def current_stream(self) -> str:
        return self._current[-1]

    def new_stream(self) -> str:
        return f"stream {self._marks}"

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def order(self, first: str, then: str) -> None:
        self.note("order", first, then)

    def mark(self, stream: str) -> Mark:
        self._marks += 1
        self.note("mark", stream)
        return Mark(self._marks, stream)

    def after(self, event: Mark, stream: str) -> None:
        self.note("after", event.stream, stream)

    def has_passed(self, event: Mark) -> bool:
        assert not self.capturing, "events cannot be asked while a graph is captured"
        return event not in self.pending

    def seconds(self, first: Mark, second: Mark) -> float:
        assert not self.capturing
        return 0.001 * (second.number - first.number)

    def is_capturing(self) -> bool:
        return self.capturing

    def identity(self) -> str:
        return f"pretended GPU of process {os.getpid()}"

    def settle(self) -> None:
        assert not self.capturing, "a capture cannot wait"
        self.note("settle")

    def pinned(self, nbytes: int) -> torch.Tensor:
        assert not self.capturing, "no pinned memory during a capture"
        self.note("pinned", nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.note("copy", self.current_stream(), source.nbytes)
        target.copy_(source)

    def keep(self, tensor: torch.Tensor, stream: str) -> None:
        self.note("keep", stream)

    def zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def register(self, memory: torch.Tensor) -> int:
        self.registered.add(memory.data_ptr())
        return memory.data_ptr()

    def unregister(self, memory: torch.Tensor) -> None:
        self.registered.remove(memory.data_ptr())

    def patience(self, seconds: float) -> int:
        return interpreter.looks_within(seconds, self._look_seconds)


def record_kernels(gpu: RecordingGpu) -> None:
    """Have kernel launches written down, too."""
    from fusedring.kernels.region import Prepared

    real = Prepared.launch

    def noted(self: Prepared, output: torch.Tensor, patience: int) -> None:
        gpu.note("kernel", self._kernel.fn.__name__, gpu.current_stream())
        real(self, output, patience)

    Prepared.launch = noted


def pretend(communicator: Any, gpu: RecordingGpu, *, channels: int = 2, limit: float = 60.0) -> Any:
    """Let the communicator take host memory for that of `gpu`, shared as a real GPU's would be (collective)."""
    from fusedring.group import communicator as module

    module.Peers = NoPeers
    module.PARITY_BYTES = 256 << 10
    open_gpu.PROBE_ELEMENTS = 4096
    record_kernels(gpu)
    communicator._in_order(lambda: communicator._open_gpu(gpu, channels, limit))
    engine = communicator.gpu_engine(gpu.device)
    assert engine.executor.name.startswith("triton on"), engine.executor.name
    return engine


class NoPeers:
    """A machine whose GPUs do not reach each other."""

    name = "peer memory"

    def __init__(self, gpu: Any, group: Any, *, same_index: bool = False) -> None:
        pass

    def allocate(self, nbytes: int) -> torch.Tensor:
        raise RuntimeError("peer access is not supported between these two devices\nand more that nobody reads")

    def map(self) -> list[int]:
        raise AssertionError("never mapped")

    def is_full_mesh(self) -> bool:
        return False

    def close(self) -> None:
        pass
