"""The status pages of all ranks: host memory on which kernels and hosts leave word for each other.

What is on a status page is said in kernels/layout.py. All ranks of a group have mapped the pages of all, so a rank
whose kernel gave up can follow who waited for whom. No call of a GPU's driver is needed to read them or to stop a
kernel, hence that works while a kernel hangs and while a CUDA graph is captured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fusedring.errors import REOPEN, CollectiveTimeoutError, FusedRingError, PeerLostError
from fusedring.kernels.layout import BEGUN, ENDED, FAILED, NOTICE_WORDS, NOTICES, STATUS_BYTES, STOP, TIMED_OUT, WAITING

WATCH_SECONDS = 0.1
"""How often somebody looks whether the rank that a kernel waits for lives."""

GRACE_SECONDS = 1.0
"""How long a rank that gave up listens for what others were waiting for, to name the one that stopped."""


@dataclass(frozen=True, slots=True)
class GaveUp:
    """What a kernel waited for when it left. awaited: a rank, or -1 if it left before it waited for any."""

    code: int
    awaited: int
    step: int
    chunk: int
    epoch: int


class KernelStatus:
    """Every rank's status page, as rank `rank` sees them.

    pages: uint8, STATUS_BYTES each, in rank order. is_lost: whether a rank has ended, so that nothing more comes of it.
    """

    def __init__(self, rank: int, pages: Sequence[torch.Tensor], channels: int, is_lost: Callable[[int], bool]) -> None:
        self._rank, self._is_lost = rank, is_lost
        self._words = [page[:STATUS_BYTES].view(torch.int32) for page in pages]
        self._channels = channels

    @property
    def failed(self) -> bool:
        """Whether a kernel of this rank has given up."""
        return any(row[FAILED] for row in self._notices(self._rank))

    @property
    def under_way(self) -> bool:
        """Whether a launch has begun and not ended."""
        return any(row[BEGUN] != row[ENDED] for row in self._notices(self._rank))

    def stop(self) -> None:
        """Make this rank's kernels leave, and later ones leave at once."""
        self._words[self._rank][STOP] = 1

    def clear(self) -> None:
        """Forget what this rank's kernels have said, and that they were stopped; when none of them runs."""
        self._words[self._rank].zero_()

    def waits_for_lost(self) -> list[list[int]]:
        """What kernels of this rank wait for now (rank + 1, step, chunk), where that rank has ended."""
        waits = [row[WAITING : WAITING + 3] for row in self._notices(self._rank) if row[WAITING]]
        return [wait for wait in waits if self._is_lost(wait[0] - 1)]

    def failure(self, label: str, algorithm: str, why_timed_out: str) -> FusedRingError:
        """Why this rank's kernel gave up, with the chain of who waited for whom."""
        rank = self._rank
        report = self._report_of(rank)
        if report is None or report.awaited < 0:
            return FusedRingError(
                f"{label}: another rank, or an earlier launch, gave up before rank {rank} began; the tensor is NaN. "
                f"{REOPEN}"
            )
        why = why_timed_out if report.code == TIMED_OUT else "another rank gave up"
        text = (
            f"{label}: rank {rank} waited for rank {report.awaited} at step {report.step} of {algorithm} (chunk "
            f"{report.chunk}, epoch {report.epoch}) and left, because {why}"
        )
        named, awaited = {rank}, report.awaited
        while awaited not in named:
            named.add(awaited)
            further = self._report_of(awaited)
            if further is None and self._is_lost(awaited):
                return PeerLostError(f"{text}; rank {awaited} has ended. The tensor is NaN. {REOPEN}")
            if further is None or further.awaited < 0:
                text += f"; rank {awaited} has said nothing"
                break
            text += f"; rank {awaited} waited for rank {further.awaited} at step {further.step}"
            awaited = further.awaited
        return CollectiveTimeoutError(
            f"{text}. The tensor is NaN. If a rank was only late, pass a longer timeout. {REOPEN}"
        )

    def _notices(self, rank: int) -> list[list[int]]:
        words = self._words[rank][NOTICES : NOTICES + NOTICE_WORDS * self._channels]
        table = words.view(self._channels, NOTICE_WORDS)
        notices: list[list[int]] = table.tolist()
        return notices

    def _report_of(self, rank: int) -> GaveUp | None:
        """A peer that waits has been told to give up by now, and is given a moment to say so."""
        until = time.monotonic() + GRACE_SECONDS
        while True:
            reports = [GaveUp(*row[FAILED : FAILED + 5]) for row in self._notices(rank) if row[FAILED]]
            if reports or time.monotonic() > until:
                # One that waited says more than one that left at once.
                return min(reports, default=None, key=lambda r: (r.awaited < 0, r.code, r.awaited, r.step, r.chunk))
            time.sleep(0.01)


class Watch:
    """A thread that looks whether the ranks that kernels wait for live, since a kernel sees signals only.

    If such a rank has ended and the kernel still waits for the same thing at the next look, nothing more will come, and
    the kernel is stopped.
    """

    def __init__(self, status: KernelStatus) -> None:
        self._status = status
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fusedring watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        before: list[list[int]] = []
        while not self._over.wait(WATCH_SECONDS):
            waits = self._status.waits_for_lost()
            if any(wait in before for wait in waits):
                self._status.stop()
            before = waits
