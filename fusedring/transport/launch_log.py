"""What each rank has launched, in shared memory: ranks that differ find out without waiting for each other.

A GPU's launches are queued far ahead of what runs, so ranks cannot meet before each one as the host engine's do.
Instead each rank writes the header of every launch into its own log, and compares, at its later calls, those launches
whose headers are all there by then. Until a difference is found, the GPU may have added gradients that do not belong
together.

Entry n of a rank lies at n modulo ENTRIES: first the header, then n. Only its rank writes it, and never waits; a reader
that finds another number before or after it has read the header has come too late for that entry, and skips it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedring.transport import agreement
from fusedring.transport.agreement import HEADER_BYTES

ENTRIES = 512
_ENTRY_BYTES = 128
assert HEADER_BYTES + 8 <= _ENTRY_BYTES
LOG_BYTES = ENTRIES * _ENTRY_BYTES


class LaunchLog:
    """All ranks' logs, as rank `rank` sees them: uint8, LOG_BYTES each and zeroed, in rank order."""

    def __init__(self, rank: int, logs: Sequence[torch.Tensor]) -> None:
        self._rank = rank
        self._bytes = [memoryview(log.numpy().data) for log in logs]
        self._numbers = [memory.cast("Q") for memory in self._bytes]
        self._entered = 0
        self._compared = 0

    def enter(self, header: bytes) -> None:
        """Write down this rank's next launch."""
        self._entered += 1
        at = self._entered % ENTRIES
        self._numbers[self._rank][_number_at(at)] = 0
        self._bytes[self._rank][at * _ENTRY_BYTES : at * _ENTRY_BYTES + len(header)] = header
        self._numbers[self._rank][_number_at(at)] = self._entered

    def compare(self) -> None:
        """Raises MismatchError, with the same text on every rank, where ranks have launched different things."""
        while self._compared < self._entered:
            number = self._compared + 1
            headers = [self._read(rank, number) for rank in range(len(self._bytes))]
            if any(header is None for header in headers):
                return
            self._compared = number
            agreement.agree([header for header in headers if header], so=_FOUND_LATE)

    def _read(self, rank: int, number: int) -> bytes | None:
        """The header; empty if it was overwritten; None if it is still to come."""
        at = number % ENTRIES
        before = self._numbers[rank][_number_at(at)]
        start = at * _ENTRY_BYTES
        header = bytes(self._bytes[rank][start : start + HEADER_BYTES])
        after = self._numbers[rank][_number_at(at)]
        if before == after == number:
            return header
        return b"" if max(before, after) > number else None


_FOUND_LATE = "which a GPU's ranks find out late: results since then are wrong, call fusedring.close() on all ranks"


def _number_at(entry: int) -> int:
    return ((entry + 1) * _ENTRY_BYTES) // 8 - 1
