"""What is known of steps that are over: of their averages, of what other ranks told, and when all that was."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fusedring.data_parallel.buckets import Bucket
from fusedring.data_parallel.flags import FlagsOnTheWay, Told
from fusedring.data_parallel.step import Step
from fusedring.engines.work import GpuWork
from fusedring.group.communicator import Communicator
from fusedring.observe.report import BucketReport, LaunchReport, StepReport, overlapped_fraction
from fusedring.observe.tracing import BACKWARD, WAIT, Track


@dataclass(frozen=True, slots=True)
class Average:
    """What is known of a bucket's average as a whole.

    squares: the sum of its squares, inf if that overflows float32. finite: whether all of it is. version: of its memory
    when it was handed out.
    """

    squares: float
    finite: bool
    version: int

    def holds_for(self, bucket: Bucket) -> bool:
        """Whether `squares` is that of what lies in the bucket now, as far as versions tell."""
        return bucket.flat._version == self.version and (math.isfinite(self.squares) or not self.finite)


class Results:
    """Of the steps of one wrapper with these buckets that ended well."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._step: Step | None = None
        self._told: Told | FlagsOnTheWay | None = None
        self._versions: list[int] = []
        self._report: StepReport | None = None
        self._on_the_way: deque[FlagsOnTheWay] = deque()

    def keep(self, step: Step, told: Told | FlagsOnTheWay | None) -> None:
        """Of a step whose averages were handed out just now. told: None if nobody can know it, in a CUDA graph."""
        self._step, self._told = step, told
        self._versions = [bucket.flat._version for bucket in self._buckets]
        if isinstance(told, FlagsOnTheWay):
            self._on_the_way.append(told)

    @property
    def report(self) -> StepReport | None:
        """Of the last step; on a GPU, waits for it.

        None before the first, and on a GPU if it was captured or a communication hook took part.
        """
        if self._step is not None:
            told = self._last_told()
            self._report = _describe(self._step, self._buckets, told) if told is not None else None
            self._step = None
        return self._report

    def averages(self) -> list[Average] | None:
        """What is known of each bucket's average in the last step; None if nobody knows. On a GPU, waits for it."""
        told = self._last_told()
        if told is None or told.squares is None or told.unbounded is None:
            return None
        known = zip(told.squares, told.unbounded, self._versions, strict=True)
        return [Average(squares, not unbounded, version) for squares, unbounded, version in known]

    def arrived(self) -> Iterator[Told]:
        """On a GPU: what other ranks have told of steps in which this one had all gradients, as soon as it is there."""
        while self._on_the_way and (told := self._on_the_way[0].read()) is not None:
            self._on_the_way.popleft()
            yield told

    def _last_told(self) -> Told | None:
        return self._told.read(wait=True) if isinstance(self._told, FlagsOnTheWay) else self._told


def _describe(step: Step, buckets: Sequence[Bucket], told: Told) -> StepReport | None:
    """None where nobody has taken the GPU's times."""
    if step.on_gpu is None:
        ended, times = step.ended, [(work.outcome.started, work.ended) for work in step.works]
    elif step.captured or not all(isinstance(work, GpuWork) for work in step.works):
        return None
    else:
        ended, times = step.on_gpu.times(step.works)
    launches = tuple(
        LaunchReport(each.launch.bucket, buckets[each.launch.bucket].flat.nbytes, each.launch.algorithm, *when)
        for each, when in zip(step.launched, times, strict=False)  # the last one is that of the flags
    )
    return StepReport(
        step.started,
        ended,
        tuple(BucketReport(b.flat.nbytes, tuple(e.name for e in b.entries)) for b in buckets),
        launches,
        max(0.0, max(end for _, end in times) - ended),
        overlapped_fraction(launches, step.started, ended),
        told.grad_norm,
        told.found_inf,
    )


def trace(step: Step, report: StepReport | None, track: Track, communicator: Communicator) -> None:
    """Spans of a step that has just ended. report: on a GPU, that of the step, whose times are the GPU's."""
    ended, over = step.ended, time.perf_counter()
    if step.on_gpu is not None:
        if report is None:
            return
        ended = report.backward_end
        over = ended + report.exposed_wait
        for each, told in zip(step.launched, report.launches, strict=True):
            communicator.trace_launch(each.launch, told.start, told.end)
    track.span(BACKWARD, step.started, ended, step=step.count)
    track.span(WAIT, ended, over, step=step.count)
