"""Marks on a stream, medians of what lies between them, and the speed of a copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from fusedring.testing import VirtualCollective
from fusedring.transport.gpu import Event, Stream

_COPY_BYTES = 1 << 30
_TIMEOUT_SECONDS = 10.0
"""Of a wait in what is timed: a launch that hangs must not cost the part all of its time."""
_LEAD_CYCLES = 2_000_000
"""About a millisecond, in which the host gives the GPU all of what is timed next."""


def mark() -> Event:
    """When the current stream has done what it has been given."""
    return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]


def seconds_between(first: Event, second: Event) -> float:
    """Negative if the second mark came first. Both have been reached."""
    return float(first.elapsed_time(second)) / 1e3


def median_between(marks: Sequence[Event]) -> float:
    """Median seconds from each mark to the next. All have been reached."""
    return statistics.median(seconds_between(i, j) for i, j in pairwise(marks))


def hold_up(times: int = 1) -> None:
    """Keep the current stream busy while the host gives it what comes next."""
    torch.cuda._sleep(times * _LEAD_CYCLES)  # type: ignore[no-untyped-call]


def new_stream() -> Stream:
    """Of the current GPU."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def median_seconds(runs: Sequence[Callable[[], tuple[Event, Event]]], *, repeats: int = 10, lead: int = 1) -> float:
    """Of events that each run returns. The runs take turns; each is given to the GPU while that is held up.

    lead: how many times as long as usual it is held up.
    """
    runs[0]()
    spans = []
    for turn in range(repeats):
        hold_up(lead)
        spans.append(runs[(turn + 1) % len(runs)]())
    torch.cuda.synchronize()
    return statistics.median(seconds_between(begun, done) for begun, done in spans)


def timed_run(collective: VirtualCollective) -> Callable[[], tuple[Event, Event]]:
    """Runs it on a GPU, and returns the marks before and after."""

    def run() -> tuple[Event, Event]:
        events = collective.run(timeout=_TIMEOUT_SECONDS)
        assert events is not None
        return events

    return run


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second."""
    source, target = (torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))

    def run() -> tuple[Event, Event]:
        begun = mark()
        target.copy_(source)
        return begun, mark()

    return 2 * _COPY_BYTES / median_seconds([run], repeats=20)
