"""The boards of all ranks: pages of host memory on which kernels and hosts leave word for each other.

What is on a board is said in kernels/signals.py. All ranks of a group have mapped all boards, so a rank whose kernel
gave up can follow who waited for whom. No call of a GPU's driver is needed to read them or to stop a kernel, hence that
works while a kernel hangs and while a CUDA graph is captured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fusedring.errors import REOPEN, CollectiveTimeoutError, FusedRingError, PeerLostError

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


class Boards:
    """Every rank's board, as rank `rank` sees them.

    boards: uint8, BOARD_BYTES each, in rank order. is_lost: whether a rank has ended, so that nothing more comes of it.
    """

    def __init__(
        self, rank: int, boards: Sequence[torch.Tensor], channels: int, is_lost: Callable[[int], bool]
    ) -> None:
        from fusedring.kernels.signals import BOARD_BYTES

        self._rank, self._is_lost = rank, is_lost
        self._words = [board[:BOARD_BYTES].view(torch.int32) for board in boards]
        self._channels = channels

    @property
    def failed(self) -> bool:
        """Whether a kernel of this rank has given up."""
        from fusedring.kernels.signals import FAILED

        return any(row[FAILED.value] for row in self._notices(self._rank))

    @property
    def under_way(self) -> bool:
        """Whether a launch has begun and not ended."""
        from fusedring.kernels.signals import BEGUN, ENDED

        return any(row[BEGUN.value] != row[ENDED.value] for row in self._notices(self._rank))

    def stop(self) -> None:
        """Make this rank's kernels leave, and later ones leave at once."""
        from fusedring.kernels.signals import STOP

        self._words[self._rank][STOP.value] = 1

    def clear(self) -> None:
        """Forget what this rank's kernels have said, and that they were stopped. None of them runs."""
        self._words[self._rank].zero_()

    def waits_for_lost(self) -> list[list[int]]:
        """What kernels of this rank wait for now (rank + 1, step, chunk), where that rank has ended."""
        from fusedring.kernels.signals import WAITING

        at = WAITING.value
        waits = [row[at : at + 3] for row in self._notices(self._rank) if row[at]]
        return [wait for wait in waits if self._is_lost(wait[0] - 1)]

    def failure(self, label: str, algorithm: str, why_timed_out: str) -> FusedRingError:
        """Why this rank's kernel gave up, with the chain of who waited for whom."""
        from fusedring.kernels.signals import TIMED_OUT

        rank = self._rank
        report = self._report_of(rank)
        if report is None or report.awaited < 0:
            return FusedRingError(
                f"{label}: another rank, or an earlier launch, gave up before rank {rank} began; the tensor is NaN. "
                f"{REOPEN}"
            )
        why = why_timed_out if report.code == TIMED_OUT.value else "another rank gave up"
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
        from fusedring.kernels.signals import NOTICE_WORDS, NOTICES

        size = NOTICE_WORDS.value
        table = self._words[rank][NOTICES.value : NOTICES.value + size * self._channels].view(self._channels, size)
        notices: list[list[int]] = table.tolist()
        return notices

    def _report_of(self, rank: int) -> GaveUp | None:
        """A peer that waits has been told to give up by now, and is given a moment to say so."""
        until = time.monotonic() + GRACE_SECONDS
        while True:
            reports = [GaveUp(*row[:5]) for row in self._notices(rank) if row[0]]
            if reports or time.monotonic() > until:
                # One that waited says more than one that left at once.
                return min(reports, default=None, key=lambda r: (r.awaited < 0, r.code, r.awaited, r.step, r.chunk))
            time.sleep(0.01)


class Watch:
    """Looks whether the ranks that kernels wait for live, since a kernel sees signals only.

    If such a rank has ended and the kernel still waits for the same thing at the next look, nothing more will come, and
    the kernel is stopped.
    """

    def __init__(self, boards: Boards) -> None:
        self._boards = boards
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
            waits = self._boards.waits_for_lost()
            if any(wait in before for wait in waits):
                self._boards.stop()
            before = waits
