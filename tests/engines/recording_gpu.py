"""A GPU that writes down what it is asked, in host memory: what the CUDA engine does, without a GPU.

Streams are names. Copies and kernels run at once (kernels under Triton's interpreter), so results can be compared as
well as the order of calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fusedring.engines.cuda import CudaEngine
    from fusedring.engines.on_gpu import GpuEngine
    from fusedring.group.communicator import Communicator

PARITY_BYTES = 256 << 10
"""Slots of one parity: few, so that small tensors take several windows, too."""


@dataclass(frozen=True)
class Mark:
    number: int
    stream: str


class RecordingGpu:
    """`Gpu` on the CPU. calls: what was asked, in order. capturing: set it to pretend a capture."""

    def __init__(self) -> None:
        # Here and below, since whoever imports this file may not have set TRITON_INTERPRET yet.
        from fusedring.engines.interpreter import seconds_per_look
        from fusedring.kernels.layout import INTERPRETER

        self.device, self.platform, self.comm = torch.device("cpu"), INTERPRETER, "comm"
        self.calls: list[tuple[Any, ...]] = []
        self.capturing = False
        self.pending: set[Mark] = set()
        self.registered: set[int] = set()
        self._current = ["main"]
        self._marks = 0
        self._look_seconds = seconds_per_look()

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

    def wait(self, event: Mark) -> None:
        assert not self.capturing
        self.pending.discard(event)

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
        from fusedring.engines.interpreter import looks_within

        return looks_within(seconds, self._look_seconds)


def record_kernels(gpu: RecordingGpu) -> None:
    """Have kernel launches written down, too."""
    from fusedring.kernels.prepared import Prepared

    real = Prepared.launch

    def noted(self: Prepared, output: torch.Tensor, patience: int) -> None:
        gpu.note("kernel", self._kernel.fn.__name__, gpu.current_stream())
        real(self, output, patience)

    Prepared.launch = noted


def pretend(communicator: Communicator, gpu: RecordingGpu, *, channels: int = 2) -> CudaEngine:
    """Let the communicator take host memory for that of `gpu`, shared as a real GPU's would be (collective)."""
    from fusedring.engines.cuda import CudaEngine
    from fusedring.engines.open_gpu import ways_between_ranks

    def exchange(value: Any, purpose: str) -> list[Any]:
        return communicator.exchange(value, timeout=60, purpose=purpose)

    ways = ways_between_ranks(gpu, communicator._group, communicator._workspace, exchange, timeout=60)
    if len(ways) > 1:
        ways[0] = NoPeers()  # instead of the real one, which would ask a real driver
    engine = pretend_ways(communicator, gpu, ways, channels=channels)
    assert isinstance(engine, CudaEngine), engine.title
    return engine


def pretend_ways(communicator: Communicator, gpu: RecordingGpu, ways: list[Any], *, channels: int = 2) -> GpuEngine:
    """The same, but with these ways between the ranks, which need not work."""
    from fusedring.engines.open_gpu import Probe

    record_kernels(gpu)
    how = {"channels": channels, "parity_bytes": PARITY_BYTES, "probe": Probe(elements=4096)}
    return communicator.open_gpu(gpu, timeout=60, ways=ways, **how)


class NoPeers:
    """A machine whose GPUs do not reach each other."""

    name = "peer memory"

    def allocate(self, nbytes: int) -> torch.Tensor:
        raise RuntimeError("peer access is not supported between these two devices\nand more that nobody reads")

    def map(self, memory: torch.Tensor) -> list[int]:
        raise AssertionError("never mapped")

    def is_full_mesh(self) -> bool:
        return False

    def close(self) -> None:
        pass
