"""Spans in torch's profiler of what another thread does."""

from __future__ import annotations

import torch

from fusedring.torch_internals import end_span_with, profiler_is_on


class ProfiledSpan:
    """A span in torch's profiler, which records the thread that makes it, and not the one that ends it."""

    def __init__(self, label: str) -> None:
        self._ended: torch.futures.Future[None] = torch.futures.Future()
        record = torch.autograd.profiler.record_function(label)
        record.__enter__()  # type: ignore[no-untyped-call]
        # The profiler knows this thread only; the future's callback carries that over to the thread that ends it.
        end_span_with(record, self._ended)

    def end(self) -> None:
        """May be called by another thread."""
        self._ended.set_result(None)


def profiled_span(label: str) -> ProfiledSpan | None:
    """A span that begins now, if torch's profiler is on."""
    return ProfiledSpan(label) if profiler_is_on() else None
