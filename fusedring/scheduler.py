"""When what is launched: gradients become ready in any order, buckets are launched in one fixed order on all ranks.

A *step* is one synced backward. Its buckets are launched while backward runs, each once its gradients and all earlier
buckets are there; the end of backward launches the rest, whether or not every gradient came, so that all ranks always
launch the same things. A rank that missed a gradient says so in the note of its launches; then all ranks also exchange
who had which. A launch carries the step's number: a rank that lost a step is found, not paired with the wrong one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fusedring.buckets import Bucket, Entry
from fusedring.communicator import Batch, Communicator, Work
from fusedring.config import RingConfig, scale_factor
from fusedring.errors import MismatchError
from fusedring.launch import Launch
from fusedring.trace import BucketReport, LaunchReport, StepReport, overlapped_fraction

_GRADIENT_MISSING = 1


@dataclass(slots=True)
class _Step:
    """The synced backward under way."""

    number: int
    started: float
    waiting_for: list[int]
    arrived: list[list[bool]]
    batch: Batch = field(default_factory=Batch)
    launches: list[Launch] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)


class Scheduler:
    """Drives the buckets of one wrapper through its group's communicator."""

    def __init__(
        self, communicator: Communicator, buckets: Sequence[Bucket], config: RingConfig, *, grad_is_view: bool
    ) -> None:
        self._communicator, self._buckets, self._config = communicator, buckets, config
        self._grad_is_view = grad_is_view
        self._step: _Step | None = None
        self._next_number = 0
        self.report: StepReport | None = None

    @property
    def closed(self) -> bool:
        """Whether the group's workspace was closed since."""
        return self._communicator.closed

    @property
    def in_step(self) -> bool:
        """Whether a gradient has become ready since the last step ended."""
        return self._step is not None

    def ready(self, bucket: int, position: int, backward_start: float) -> None:
        """The gradient of entry `position` of `bucket` is complete: take it, and launch what can go.

        Raises RuntimeError if it comes a second time in one backward.
        """
        if self._step is None:
            self._step = self._begin(backward_start)
        step, entry = self._step, self._buckets[bucket].entries[position]
        if step.arrived[bucket][position]:
            raise RuntimeError(
                f"the gradient of parameter {entry.name} became ready twice in one backward, and the first may have "
                "been sent already. Use checkpoint(..., use_reentrant=False), or no_sync() around all but the last of "
                "several backward passes"
            )
        self._take(entry)
        step.arrived[bucket][position] = True
        step.waiting_for[bucket] -= 1
        while len(step.works) < len(self._buckets) and step.waiting_for[len(step.works)] == 0:
            self._launch(step, note=0)

    def finish(self) -> list[str]:
        """End the step: launch the rest, wait for everything, hand out the averaged gradients.

        Returns the names of the parameters that had no gradient on some rank, the same list on every rank. Raises what
        went wrong in a launch.
        """
        assert self._step is not None
        step, backward_end = self._step, time.perf_counter()
        try:
            note, held = 0, [[e.parameter.grad is not None for e in bucket.entries] for bucket in self._buckets]
            while len(step.works) < len(self._buckets):
                bucket = len(step.works)
                for position, entry in enumerate(self._buckets[bucket].entries):
                    if not step.arrived[bucket][position]:
                        note = _GRADIENT_MISSING
                        self._take(entry)
                self._launch(step, note)
            for work in step.works:
                work.wait()
            counts = self._count_gradients(step, held) if step.works[-1].outcome.note else None
        except MismatchError as error:
            self._next_number = max(self._next_number, error.latest_step + 1)
            raise
        finally:
            self._step = None
        missing = self._hand_out(counts)
        self.report = self._describe(step, backward_end)
        return missing

    def abandon(self) -> None:
        """Forget a step that an exception in backward cut short, once its launches have ended."""
        step, self._step = self._step, None
        if step is not None:
            for work in step.works:
                work.wait()

    def skip(self) -> None:
        """This rank leaves one step out (its forward failed): its numbers must show that."""
        self._next_number += 1

    def _begin(self, backward_start: float) -> _Step:
        number = self._next_number
        self._next_number += 1
        sizes = [len(bucket.entries) for bucket in self._buckets]
        return _Step(number, backward_start, sizes, [[False] * size for size in sizes])

    def _take(self, entry: Entry) -> None:
        """Bring a gradient into its bucket, unless autograd accumulated it there. None counts as zero."""
        grad = entry.parameter.grad
        if grad is None:
            entry.view.zero_()
        elif grad is not entry.view:
            if grad.layout != torch.strided:
                raise ValueError(f"the gradient of parameter {entry.name} is sparse: use sparse=False in its embedding")
            entry.view.copy_(grad.detach())

    def _launch(self, step: _Step, note: int) -> None:
        index = len(step.works)
        flat = self._buckets[index].flat
        launch = self._launch_of(flat, step, index, note)
        step.launches.append(launch)
        step.works.append(
            self._communicator.submit(launch, flat, result=flat, timeout=self._config.timeout, batch=step.batch)
        )

    def _launch_of(self, flat: torch.Tensor, step: _Step, index: int, note: int, op: str = "avg") -> Launch:
        return Launch(
            "all_reduce",
            self._communicator.resolve(self._config.algorithm, flat.nbytes),
            flat.numel(),
            flat.dtype,
            self._config.wire or flat.dtype if op == "avg" else flat.dtype,
            scale_factor(op, None, self._communicator.world_size, flat.dtype),
            step.number,
            index,
            note,
        )

    def _count_gradients(self, step: _Step, held: list[list[bool]]) -> list[list[tuple[int, int]]]:
        """For each entry, on how many ranks its gradient arrived in this step, and how many held one at its end."""
        pairs = [
            (float(arrived), float(holds))
            for arrivals, holdings in zip(step.arrived, held, strict=True)
            for arrived, holds in zip(arrivals, holdings, strict=True)
        ]
        counts = torch.tensor(pairs).view(-1)
        launch = self._launch_of(counts, step, len(self._buckets), 0, "sum")
        self._communicator.run(launch, counts, timeout=self._config.timeout)
        summed = iter(counts.view(-1, 2).tolist())
        return [[(int(a), int(h)) for a, h in (next(summed) for _ in bucket)] for bucket in step.arrived]

    def _hand_out(self, counts: list[list[tuple[int, int]]] | None) -> list[str]:
        """`.grad` becomes the bucket's average, unless no rank had one. Names the entries that lacked it somewhere."""
        missing = []
        everyone = self._communicator.world_size
        for at, bucket in enumerate(self._buckets):
            torch.autograd.graph.increment_version(bucket.flat)
            for position, entry in enumerate(bucket.entries):
                arrived, held = (everyone, everyone) if counts is None else counts[at][position]
                if arrived < everyone:
                    missing.append(entry.name)
                if held:
                    self._set_grad(entry)
        return missing

    def _set_grad(self, entry: Entry) -> None:
        parameter = entry.parameter
        if self._grad_is_view:
            parameter.grad = entry.view
        elif parameter.grad is None:
            parameter.grad = entry.view.clone()
        else:
            parameter.grad.copy_(entry.view)

    def _describe(self, step: _Step, backward_end: float) -> StepReport:
        launches = tuple(
            LaunchReport(launch.bucket, self._buckets[launch.bucket].flat.nbytes, launch.algorithm, start, work.ended)
            for launch, work in zip(step.launches, step.works, strict=True)
            for start in [work.outcome.started]
        )
        return StepReport(
            step.started,
            backward_end,
            tuple(BucketReport(b.flat.nbytes, tuple(e.name for e in b.entries)) for b in self._buckets),
            launches,
            max(0.0, max(launch.end for launch in launches) - backward_end),
            overlapped_fraction(launches, step.started, backward_end),
        )
