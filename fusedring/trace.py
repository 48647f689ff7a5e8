"""What happened in a training step, and when. All times are seconds of `time.perf_counter()`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BucketReport:
    """A bucket: its size with padding, and the names of its parameters."""

    bytes: int
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """One launch. start: all ranks had come and the transfer began; end: the result was everywhere."""

    bucket: int
    bytes: int
    algorithm: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """The last synced backward of a wrapper.

    backward_start: the first gradient reached the wrapper's output. backward_end: the last gradient was computed.
    exposed_wait: seconds that the training loop then still waited. overlap: the part of the time spent in launches that
    lay between backward_start and backward_end, 0 to 1.
    """

    backward_start: float
    backward_end: float
    buckets: tuple[BucketReport, ...]
    launches: tuple[LaunchReport, ...]
    exposed_wait: float
    overlap: float


def overlapped_fraction(launches: Sequence[LaunchReport], start: float, end: float) -> float:
    """|communication ∩ [start, end]| / |communication|; 1 if nothing was launched."""
    total = sum(launch.end - launch.start for launch in launches)
    hidden = sum(max(0.0, min(launch.end, end) - max(launch.start, start)) for launch in launches)
    return min(1.0, hidden / total) if total > 0 else 1.0
