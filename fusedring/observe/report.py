"""What happened in the last training step, and when. All times are seconds of `time.perf_counter()`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class BucketReport:
    """A bucket: its size, with padding, and the names of its parameters."""

    bytes: int
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """One launch. start: all ranks had come and the transfer began; end: this rank had its result."""

    bucket: int
    bytes: int
    algorithm: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """The last synced backward of a wrapper. `print` shows a table of its launches; rich shows it in colour.

    backward_start: the first gradient reached the wrapper's output, or, where the wrapper itself is compiled, the first
    parameter's was computed. backward_end: the last gradient was computed.
    exposed_wait: seconds from then to the end of the last launch. overlap: the part of the time spent in launches that
    lay between backward_start and backward_end, 0 to 1.
    grad_norm: the 2-norm of all averaged gradients as one vector, the same bits on every rank, inf also where their
    squares overflow float32; found_inf: whether one of them is inf or NaN. Nothing is read for them again. None where
    nobody has looked at the values: on the host engine, with a communication hook of the user, where the group's own
    backend reduces, where trainable parameters are ignored.
    """

    backward_start: float
    backward_end: float
    buckets: tuple[BucketReport, ...]
    launches: tuple[LaunchReport, ...]
    exposed_wait: float
    overlap: float
    grad_norm: float | None = None
    found_inf: bool | None = None

    def __rich__(self) -> Table:
        """A table of the launches: where in backward each began, what it took, and how much of that was exposed."""
        from rich.table import Table

        backward = self.backward_end - self.backward_start
        table = Table(
            title=f"backward {1e3 * backward:.1f} ms, then waited {1e3 * self.exposed_wait:.1f} ms; "
            f"{self.overlap:.0%} of the communication overlapped"
        )
        for heading in ("bucket", "bytes", "began at", "took", "exposed"):
            table.add_column(heading, justify="right")
        for launch in self.launches:
            exposed = max(0.0, launch.end - max(launch.start, self.backward_end))
            table.add_row(
                str(launch.bucket),
                f"{launch.bytes:,}",
                f"{(launch.start - self.backward_start) / max(backward, 1e-9):.0%} of backward",
                f"{1e3 * (launch.end - launch.start):.2f} ms",
                f"{1e3 * exposed:.2f} ms",
            )
        return table

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=100, force_terminal=False, color_system=None).print(self)
        return text.getvalue().rstrip()


def overlapped_fraction(launches: Sequence[LaunchReport], start: float, end: float) -> float:
    """|communication ∩ [start, end]| / |communication|; 1 if nothing was launched."""
    total = sum(launch.end - launch.start for launch in launches)
    hidden = sum(max(0.0, min(launch.end, end) - max(launch.start, start)) for launch in launches)
    return min(1.0, hidden / total) if total > 0 else 1.0
