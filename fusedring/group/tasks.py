"""The order in which one group does things: one at a time, as the program asked.

A task that nobody waits for yet runs on the group's thread, which the first such task starts; one that is waited for
runs in the calling thread, unless others are queued before it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from fusedring.engines.work import Batch, Work
from fusedring.errors import FusedRingError, MismatchError, NotCapturedError, OutOfMemoryError
from fusedring.observe.profiler import ProfiledSpan, profiled_span


@dataclass(slots=True)
class _Task:
    act: Callable[[], Any]
    work: Work
    batch: Batch = field(default_factory=Batch)
    span: ProfiledSpan | None = None


class Tasks:
    """What rank `rank` of a group has been asked to do.

    spoil: told what ended a task half-way, makes the group's workspace unusable on all ranks. What all ranks agreed on
    not to do is no such thing.
    """

    def __init__(self, rank: int, spoil: Callable[[BaseException], None]) -> None:
        self.closed = False
        self._rank, self._spoil = rank, spoil
        self._turn = threading.Lock()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._queued = 0
        self._counting = threading.Lock()
        self._thread: threading.Thread | None = None

    def check_open(self) -> None:
        """Raises FusedRingError after `close`."""
        if self.closed:
            raise FusedRingError(
                f"rank {self._rank}: the group's workspace was closed meanwhile (fusedring.close), or this is a forked "
                "process. Make the call again on all ranks to open a new one"
            )

    def run(self, act: Callable[[], Any]) -> Any:
        """What `act` gives, once it is its turn."""
        self.check_open()
        with self._counting:
            queued = self._queued
        if queued:
            task = _Task(act, Work(torch.empty(0), "the call"))
            self._enqueue(task)
            try:
                task.work.wait()
            except BaseException as error:
                if not task.work.is_completed():  # interrupted: nobody will know what this task did and when
                    self._spoil(error)
                raise
            return task.work._value
        with self._turn:
            self.check_open()
            return self._guarded(act)

    def run_for(self, work: Work, act: Callable[[], Any], batch: Batch, label: str) -> None:
        """As `run`; `work` tells what came of it, unless a task of the same batch has failed."""
        try:
            if batch.error is not None:
                raise batch.error
            with torch.autograd.profiler.record_function(label):
                value = self.run(act)
        except Exception as error:  # raised by wait()
            batch.error = error
            work._finish(error=error)
        else:
            work._finish(value)

    def start(self, work: Work, act: Callable[[], Any], batch: Batch, label: str) -> None:
        """As `run_for`, but on the group's thread, and the caller goes on."""
        self._enqueue(_Task(act, work, batch, profiled_span(label)))

    def settle(self) -> None:
        """Return once everything that is queued has ended, well or not."""
        with self._counting:
            queued = self._queued
        if queued and not self.closed:  # closing settles, too
            task = _Task(lambda: None, Work(torch.empty(0), "the call"))
            self._enqueue(task)
            task.work.wait()

    def refuse(self) -> None:
        """Take nothing more."""
        self.closed = True

    def close(self) -> AbstractContextManager[object]:
        """Finish what is queued and take nothing more. Within the context nothing runs."""
        with self._counting:
            self.closed = True
        if self._thread is not None and self._thread.is_alive():
            self._tasks.put(None)
            self._thread.join()
        return self._turn

    def abandon(self, error: BaseException) -> None:
        """Take nothing more, and let what is queued fail because of `error`."""
        self.refuse()
        if self._thread is not None and self._thread.is_alive():
            self._spoil(error)  # ends what the thread is waiting for
            self._tasks.put(None)
            self._thread.join(timeout=1)

    def _enqueue(self, task: _Task) -> None:
        self.check_open()
        with self._counting:
            self.check_open()
            self._queued += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="fusedring", daemon=True)
                self._thread.start()
        self._tasks.put(task)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._perform(task)
            del task  # and with it the gradients that it read, before waiting for the next one

    def _perform(self, task: _Task) -> None:
        value, failure = None, None
        try:
            if task.batch.error is not None:
                raise task.batch.error
            with self._turn:
                value = self._guarded(task.act)
        except BaseException as error:  # raised by wait(), in the thread that asked
            failure = task.batch.error = error
        if task.span is not None:
            task.span.end()
        with self._counting:
            self._queued -= 1
        task.work._finish(value, failure)

    def _guarded(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except (MismatchError, OutOfMemoryError, NotCapturedError):
            raise
        except BaseException as error:
            self._spoil(error)
            raise
