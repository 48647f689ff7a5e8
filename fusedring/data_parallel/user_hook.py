"""User-defined communication hooks, with torch's interface: how a bucket is shown to one, and what it gives back.

A hook gets a bucket's local gradients, neither scaled nor narrowed, and returns a future of what is to be in the bucket
instead. It is called once for each bucket and step, in the same order on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from fusedring.data_parallel.buckets import Bucket
from fusedring.engines.work import Work
from fusedring.plan.launch import Outcome

Hook = Callable[[Any, Any], torch.futures.Future[Any]]


@dataclass(frozen=True, slots=True)
class CommHook:
    """What `register_comm_hook` was given. name: in logging data."""

    state: Any
    hook: Hook
    name: str


class GradBucket:
    """A bucket, as torch.distributed.GradBucket shows it."""

    def __init__(self, bucket: Bucket, index: int, *, is_last: bool) -> None:
        self._bucket, self._index, self._is_last = bucket, index, is_last

    def index(self) -> int:
        """Its number; the first one is ready first."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All its gradients, flattened one behind the other, with zeros where they are padded."""
        return self._bucket.flat

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer in the shapes of the parameters."""
        return [entry.view for entry in self._bucket.entries]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients these are."""
        return [entry.parameter for entry in self._bucket.entries]

    def is_last(self) -> bool:
        """Whether no bucket comes after it in this step."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Put other gradients there."""
        self._bucket.flat.copy_(buffer.view(-1))


class HookWork(Work):
    """A hook's future, and the bucket that its value goes to."""

    def __init__(self, bucket: Bucket, label: str, future: torch.futures.Future[Any]) -> None:
        super().__init__(bucket.flat, label)
        if not hasattr(future, "wait"):  # backends return futures of another class
            raise TypeError(f"a communication hook must return a torch.futures.Future, got {type(future).__name__}")
        self._bucket, self._future = bucket, future
        self._value = Outcome(time.perf_counter())
        self._taken = False

    def is_completed(self) -> bool:
        """Whether the future is done."""
        return self._future.done()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait for the future, and put its value into the bucket. Raises what the hook raised."""
        value = self._future.wait()
        if not self._taken:
            self._taken, self._ended = True, time.perf_counter()
            value = value[0] if isinstance(value, (list, tuple)) else value
            if not isinstance(value, torch.Tensor) or value.numel() < self._bucket.flat.numel():
                given = f"{value.numel()} elements" if isinstance(value, torch.Tensor) else type(value).__name__
                raise ValueError(
                    f"a communication hook's future must give the bucket's gradients, a tensor of "
                    f"{self._bucket.flat.numel()} elements, and it gave {given}"
                )
            flat = self._bucket.flat
            if value.data_ptr() != flat.data_ptr():
                flat.copy_(value.view(-1)[: flat.numel()])
        return True
