"""What becomes of a full bucket: which launch it gets, and where the result goes.

`Averages` is the usual one: an all-reduce, whose result becomes `.grad`. `HookedAverages` lets a hook of the user sum
instead. A reduction of another kind is another class like these, which the scheduler is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from fusedring.config import RingConfig, dtype_name, scale_factor
from fusedring.data_parallel.buckets import Bucket, Entry
from fusedring.data_parallel.step import Launched, Step
from fusedring.data_parallel.user_hook import CommHook, GradBucket, HookWork
from fusedring.engines.engine import Engine
from fusedring.engines.work import Work
from fusedring.group.communicator import Communicator
from fusedring.plan.launch import FLAGS, Launch
from fusedring.transport.source import Source


class Reduction(Protocol):
    """Of the buckets of one wrapper.

    reads_in_place: whether gradients may stay where autograd left them until they are reduced. tells_values: whether
    works tell sums of squares and non-finite values. tells_more: whether the work of the last bucket tells if some rank
    has flags to tell, so that they need not be sent where none has.
    """

    reads_in_place: bool
    tells_values: bool
    tells_more: bool

    def start(self, step: Step, index: int, bucket: Bucket, *, is_last: bool, more: bool, world_size: int) -> Launched:
        """Reduce bucket number `index`, dividing by `world_size`. more: whether this rank has flags to tell."""
        ...

    def hand_out(self, entries: Iterable[Entry]) -> None:
        """Let the results be where the user finds them."""
        ...


class Launcher:
    """Gives all-reduces of one wrapper's steps to its group. wrapper: its number."""

    def __init__(self, communicator: Communicator, engine: Engine, config: RingConfig, wrapper: int) -> None:
        self._communicator, self.engine, self._config, self._wrapper = communicator, engine, config, wrapper

    def describe(self, step: Step, index: int, flat: torch.Tensor, world_size: int, *, more: bool = False) -> Launch:
        """The launch that sums bucket number `index`, divided by `world_size`, as the user has chosen."""
        config = self._config
        return Launch(
            kind="all_reduce",
            algorithm=self._communicator.algorithm_for(config.algorithm, flat.nbytes, self.engine),
            elements=flat.numel(),
            dtype=dtype_name(flat.dtype),
            wire=dtype_name(config.wire or flat.dtype),
            factor=scale_factor("avg", None, world_size, flat.dtype),
            engine=self.engine.name,
            wrapper=self._wrapper,
            step=step.number,
            bucket=index,
            more=more,
        )

    def sum_flags(self, step: Step, vector: torch.Tensor) -> Work:
        """Sum the flags, in their own dtype."""
        launch = self.describe(step, FLAGS, vector, 1)
        algorithm = self._communicator.algorithm_for("auto", vector.nbytes, self.engine)
        return self.submit(step, replace(launch, algorithm=algorithm, wire=launch.dtype), vector)

    def submit(self, step: Step, launch: Launch, flat: torch.Tensor, sources: Sequence[Source] = ()) -> Work:
        """Start a launch, or queue it."""
        return self._communicator.submit(
            self.engine,
            launch,
            flat,
            result=flat,
            timeout=self._config.timeout,
            sources=sources,
            batch=step.batch,
            after=step.on_gpu.producers if step.on_gpu is not None else (),
        )


class Averages:
    """All-reduce, then `.grad` is the average. grad_is_view: the view into the bucket, or else a copy of it."""

    def __init__(self, launcher: Launcher, *, grad_is_view: bool) -> None:
        self._launcher, self._grad_is_view = launcher, grad_is_view
        self.reads_in_place, self.tells_values = launcher.engine.reads_in_place, launcher.engine.tells_values
        self.tells_more = launcher.engine.tells_more

    def start(self, step: Step, index: int, bucket: Bucket, *, is_last: bool, more: bool, world_size: int) -> Launched:
        """See `Reduction`."""
        launch = self._launcher.describe(step, index, bucket.flat, world_size, more=more)
        sources = [Source(start, tensor) for start, tensor in sorted(step.sources[index].items())]
        return Launched(launch, self._launcher.submit(step, launch, bucket.flat, sources))

    def hand_out(self, entries: Iterable[Entry]) -> None:
        """See `Reduction`."""
        if self._grad_is_view:
            for entry in entries:
                entry.parameter.grad = entry.view
            return
        for entry in entries:
            parameter = entry.parameter
            if entry.own is not None and parameter.grad is entry.own:
                entry.own.copy_(entry.view)
            else:  # what autograd put there may share its memory with another gradient
                parameter.grad = entry.own = entry.view.clone()


class HookedAverages:
    """The user's hook sums, then `.grad` is what it gave. averages: what happens without it."""

    reads_in_place = tells_values = tells_more = False

    def __init__(self, hook: CommHook, launcher: Launcher, averages: Averages) -> None:
        self.hook, self._launcher = hook, launcher
        self.hand_out = averages.hand_out

    def start(self, step: Step, index: int, bucket: Bucket, *, is_last: bool, more: bool, world_size: int) -> Launched:
        """See `Reduction`."""
        launch = self._launcher.describe(step, index, bucket.flat, world_size)
        future = self.hook.hook(self.hook.state, GradBucket(bucket, index, is_last=is_last))
        return Launched(launch, HookWork(bucket, launch.label, future))
