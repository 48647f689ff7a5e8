"""How the ranks of a process group find each other before they share memory: small values through the group's store.

The store, not the group's backend, because a store waits with a deadline and can say who is missing, and because every
backend has one.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fusedring.errors import CollectiveTimeoutError


class Rendezvous:
    """Exchanges between the ranks of one process group, in the same order on all of them. group None: world size 1."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self._store = None if group is None else distributed_c10d._get_process_group_store(group)
        self._read: str | None = None
        self._count = 0
        # A group can be opened again after close(): each opening has its own keys.
        opening = 0 if self._store is None else self._store.add(f"fusedring/openings/{self.rank}", 1)
        self._prefix = f"fusedring/{opening}"

    def exchange(self, value: Any, *, timeout: float, purpose: str) -> list[Any]:
        """Every rank's `value` (anything JSON can hold), in rank order.

        Raises CollectiveTimeoutError that names the ranks which did not come within `timeout` seconds.
        """
        if self._store is None:
            return [json.loads(json.dumps(value))]
        key = f"{self._prefix}/{self._count}"
        self._count += 1
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        deadline = time.monotonic() + timeout
        values = []
        for rank in range(self.world_size):
            left = max(0.001, deadline - time.monotonic())
            try:
                self._store.wait([f"{key}/{rank}"], timedelta(seconds=left))
            except RuntimeError:  # what each kind of store makes of a timeout differs
                missing = [r for r in range(rank, self.world_size) if not self._store.check([f"{key}/{r}"])]
                if not missing:
                    raise
                raise CollectiveTimeoutError(
                    f"rank {self.rank} waited {timeout:g} s to {purpose}, but rank(s) "
                    f"{', '.join(map(str, missing))} of the group did not come. All ranks of the group must make the "
                    "call; if they are only late, pass a longer timeout"
                ) from None
            values.append(json.loads(self._store.get(f"{key}/{rank}")))
        # Whoever writes to this exchange has read the one before, so this rank's old value is no longer needed.
        if self._read is not None:
            self._store.delete_key(self._read)
        self._read = f"{key}/{self.rank}"
        return values


def group_timeout(group: dist.ProcessGroup | None) -> float:
    """The timeout in seconds that the process group was made with; torch's default for a lone process."""
    default = distributed_c10d.default_pg_timeout.total_seconds()
    if group is None:
        return default
    for device in group._device_types:
        options = getattr(group._get_backend(torch.device(device)), "options", None)
        if options is not None:
            return float(options._timeout.total_seconds())
    return default
