"""What engines need of symmetric memory: the same layout at every rank of a group, mapped by all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from fusedring.launches import Location


class Workspace(Protocol):
    """The symmetric memory of one process group. All ranks make the same calls in the same order.

    epoch: how many times the ranks have met. It never goes back, and names the parity of the staging slots.
    slot_bytes: the size of a staging slot.
    """

    rank: int
    world_size: int
    epoch: int
    slot_bytes: int

    def allocate(self, nbytes: int, *, timeout: float) -> torch.Tensor:
        """This rank's region, uint8, of a new arena of `nbytes` bytes per rank. It lives as long as its tensor."""
        ...

    def locate(self, tensor: torch.Tensor) -> Location | None:
        """Where `tensor` lies in this rank's part of the workspace; None if it is ordinary memory."""
        ...

    def bytes_at(self, rank: int, location: Location, nbytes: int) -> torch.Tensor:
        """`nbytes` bytes of `rank`'s memory at `location`, uint8."""
        ...

    def slot(self, rank: int, parity: int) -> torch.Tensor:
        """`rank`'s staging slot, uint8, for tensors that are not in the workspace."""
        ...

    def meet(self, header: bytes, *, timeout: float) -> list[bytes]:
        """Begin the next epoch: show `header` to all ranks and wait for theirs."""
        ...

    def post(self, point: int, *, wake: bool = True) -> None:
        """Say that this rank has passed `point` (1, 2, ...) of this epoch."""
        ...

    def wait(self, ranks: Sequence[int], point: int, *, timeout: float) -> None:
        """Wait until `ranks` have passed `point` of this epoch.

        Raises CollectiveTimeoutError after `timeout` seconds without progress, PeerLostError if one of them died, or
        whatever another rank reported first.
        """
        ...

    def is_lost(self, rank: int) -> bool:
        """Whether a rank has ended or closed its workspace: it will do nothing more."""
        ...

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one left an epoch half done. Every later call raises on every rank."""
        ...

    def close(self) -> None:
        """Let go of the memory. Not collective; ranks that still wait for this one are told."""
        ...
