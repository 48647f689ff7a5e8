"""A training step's side on the GPU: which streams produced its gradients, and when that was."""

from __future__ import annotations

from collections.abc import Sequence

from fusedring.engines.work import GpuWork, Work
from fusedring.transport.gpu import Event, Gpu, Stream


class StepOnGpu:
    """Made when the first gradient is ready, in the stream that produced it.

    began: seconds of time.perf_counter() then, from which the GPU's times are counted. captured: whether the step goes
    into a CUDA graph; then there are no times.
    """

    def __init__(self, gpu: Gpu, began: float) -> None:
        self._gpu, self._began = gpu, began
        self.captured = gpu.is_capturing()
        self._streams: dict[Stream, None] = {}
        self._begun: Event = gpu.mark(gpu.current_stream())
        self._ended: Event = self._begun

    def produced(self) -> None:
        """The current stream has produced a gradient."""
        self._streams[self._gpu.current_stream()] = None

    @property
    def producers(self) -> tuple[Stream, ...]:
        """The streams that a launch now has to wait for: those of the gradients, and the current one."""
        return tuple(self._streams | {self._gpu.current_stream(): None})

    def gather(self) -> None:
        """What the current stream is given from now on runs after all gradients so far."""
        current = self._gpu.current_stream()
        for stream in self._streams:
            if stream != current:
                self._gpu.order(stream, current)

    def end(self) -> None:
        """Backward has been given to the current stream as a whole."""
        self._ended = self._gpu.mark(self._gpu.current_stream())

    def release(self, works: Sequence[Work]) -> None:
        """Memory of the producing streams that the launches read may be used again by those streams, afterwards."""
        started = [work for work in works if isinstance(work, GpuWork) and work.started]
        for stream in self._streams if started else ():
            self._gpu.after(started[-1].pending.done, stream)  # they run one after another

    def join(self, works: Sequence[Work]) -> None:
        """What the current stream is given from now on runs after the launches."""
        self.produced()
        self.release(works)

    def times(self, works: Sequence[Work]) -> tuple[float, list[tuple[float, float]]]:
        """When backward ended, and when each launch began and ended, as of time.perf_counter(). Waits for them."""
        pending = [work.pending for work in works if isinstance(work, GpuWork)]
        return self._at(self._ended), [(self._at(p.begun), self._at(p.done)) for p in pending]

    def _at(self, event: Event) -> float:
        return self._began + self._gpu.seconds(self._begun, event)
