"""Traces of training: what every rank did and when, in the format of Perfetto (ui.perfetto.dev) and chrome://tracing.

One trace holds all ranks of a machine, each as a process, on one clock: `time.perf_counter()` is CLOCK_MONOTONIC, which
Linux keeps for the whole machine. A rank has a *track* for each wrapper (forward, backward, each gradient as it becomes
ready, the wait at the end) and one for each group's communication (meeting the other ranks, then the launch itself).

Nothing collective: each rank leaves its own events in the directory, and then merges what all ranks have left there. So
the last one completes the trace, and a rank that died is missing from it, nothing more.
"""

from __future__ import annotations

import atexit
import fcntl
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fusedring.log import logger, my_rank

MOST_EVENTS = 1_000_000
"""What a rank records at most, about 200 MB of JSON; the rest is left out, and the log says so."""

COMMUNICATION = "communication"
FORWARD, LOSS, BACKWARD, WAIT, OUTSIDE = "forward", "loss", "backward", "wait", "optimizer and data"

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def trace(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Record what this process does in the block; at its end `directory`/trace.json holds it, with all ranks' blocks.

    Call it on every rank that should be in the trace, in the same order relative to collectives. The environment
    variable FUSEDRING_TRACE=directory does the same for whole processes. Raises OSError if `directory` cannot be made,
    or at the end if the trace cannot be written; where the block itself raises, that is logged instead.
    """
    recorder = Recorder(Path(directory))
    (recorder.directory / "ranks").mkdir(parents=True, exist_ok=True)
    _recorders.append(recorder)
    try:
        yield
    except BaseException:
        _recorders.remove(recorder)
        try:
            recorder.write()
        except OSError:
            logger.exception("the trace cannot be written")
        raise
    _recorders.remove(recorder)
    recorder.write()


def recording() -> bool:
    """Whether anything is being recorded. Ask before working out what to record."""
    return bool(_recorders)


class Event(NamedTuple):
    """Something on a track from `start` to `end` (None: at one moment), in seconds of time.perf_counter()."""

    track: Track
    name: str
    start: float
    end: float | None
    arguments: dict[str, Any]


class Track:
    """A line of the trace, within one rank."""

    def __init__(self, name: str) -> None:
        self.number = next(_track_numbers)
        self.name = name

    def span(self, name: str, start: float, end: float, **arguments: Any) -> None:
        """Record something that lasted."""
        for recorder in _recorders:
            recorder.add(Event(self, name, start, end, arguments))

    def mark(self, name: str, at: float, **arguments: Any) -> None:
        """Record something that happened at one moment."""
        for recorder in _recorders:
            recorder.add(Event(self, name, at, None, arguments))


class Recorder:
    """The events of this process between its making and `write`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self._since = time.perf_counter()
        self._process = os.getpid()
        self._rank: int | None = None
        self._events: list[Event] = []

    def add(self, event: Event) -> None:
        """Keep an event."""
        if self._rank is None:
            self._rank = my_rank()  # now, since the process group may be gone at the end
        if len(self._events) < MOST_EVENTS:
            self._events.append(event)
        elif len(self._events) == MOST_EVENTS:
            self._events.append(Event(event.track, "trace full", event.start, None, {}))
            logger.warning("the trace is full: it holds the first %d events", MOST_EVENTS)

    def write_if_used(self) -> None:
        """As `write`, unless nothing was recorded: what only starts the ranks must not stand for rank 0."""
        if self._events:
            try:
                self.write()
            except OSError:
                logger.exception("FUSEDRING_TRACE: the trace cannot be written to %s", self.directory)

    def write(self) -> None:
        """Leave this rank's events in the directory, and merge all ranks'. Does nothing in a forked child."""
        if os.getpid() != self._process:
            return
        rank = my_rank() if self._rank is None else self._rank
        ranks = self.directory / "ranks"
        ranks.mkdir(parents=True, exist_ok=True)
        mine = {
            "rank": rank,
            "boot": _BOOT.read_text().strip(),
            "since": self._since,
            "until": time.perf_counter(),
            "events": _as_json(self._events, rank),
        }
        with (ranks / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _replace(ranks / f"{rank}.json", mine)
            everybody = [json.loads(path.read_text()) for path in sorted(ranks.glob("*.json"))]
            _replace(self.directory / "trace.json", _merged(mine, everybody))


def _merged(mine: dict[str, Any], everybody: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One trace that begins at 0. What lies there from an earlier run does not overlap in time, and is left out."""
    together = [
        other
        for other in everybody
        if other["boot"] == mine["boot"] and other["since"] < mine["until"] and mine["since"] < other["until"]
    ]
    stamps = [event["ts"] for other in together for event in other["events"] if "ts" in event]
    origin = min([1e6 * mine["since"], *stamps])  # a launch may have begun before the block
    events = []
    for event in itertools.chain.from_iterable(other["events"] for other in together):
        events.append({**event, "ts": event["ts"] - origin} if "ts" in event else event)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _as_json(events: Sequence[Event], rank: int) -> list[dict[str, Any]]:
    """Chrome's trace events; `ts` and `dur` are microseconds."""
    tracks = sorted({event.track for event in events}, key=lambda track: track.number)
    spans = [*events]
    for track in tracks:
        spans += _steps([event for event in events if event.track is track])
    rows: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}},
        {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}},
    ]
    for track in tracks:
        place = {"ph": "M", "pid": rank, "tid": track.number}
        rows.append({**place, "name": "thread_name", "args": {"name": track.name}})
        below = 1000 if track.name == COMMUNICATION else 0
        rows.append({**place, "name": "thread_sort_index", "args": {"sort_index": track.number + below}})
    # Whoever begins earlier, or at the same time and lasts longer, encloses.
    for event in sorted(spans, key=lambda event: (event.start, -(event.end or event.start))):
        row = {"pid": rank, "tid": event.track.number, "name": event.name, "ts": 1e6 * event.start}
        if event.end is None:
            row |= {"ph": "i", "s": "t"}
        else:
            row |= {"ph": "X", "dur": 1e6 * (event.end - event.start)}
        rows.append({**row, "args": event.arguments})
    return rows


def _steps(events: Sequence[Event]) -> list[Event]:
    """The steps of a wrapper's track, and what lies in them between the spans that were recorded.

    A step goes from the first forward after the last wait to the next such forward, or to its own wait if it is last.
    """
    derived = []
    begun: Event | None = None
    forward: Event | None = None
    wait: Event | None = None

    def end_step(wait: Event, at: float) -> None:
        nonlocal begun
        if begun is not None:
            derived.append(Event(begun.track, f"step {wait.arguments['step']}", begun.start, at, {}))
            begun = None

    for event in sorted(events, key=lambda event: event.start):
        if event.name == FORWARD:
            if wait is not None and wait.end is not None:
                derived.append(Event(event.track, OUTSIDE, wait.end, event.start, {}))
                end_step(wait, event.start)
                wait = None
            begun, forward = begun or event, event
        elif event.name == BACKWARD and forward is not None and forward.end is not None:
            derived.append(Event(event.track, LOSS, forward.end, event.start, {}))
            forward = None
        elif event.name == WAIT:
            wait = event
    if wait is not None and wait.end is not None:
        end_step(wait, wait.end)
    return derived


def _replace(path: Path, content: dict[str, Any]) -> None:
    """Write a file so that nobody ever reads half of it."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content))
    draft.replace(path)


_track_numbers = itertools.count(1)
_recorders: list[Recorder] = []

if _directory := os.environ.get("FUSEDRING_TRACE"):
    _recorders.append(Recorder(Path(_directory)))
    atexit.register(_recorders[0].write_if_used)
