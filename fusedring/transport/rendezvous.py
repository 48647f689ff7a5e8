"""How the ranks of a process group find each other before they share memory: small values through the group's store.

The store, not the group's backend, because a store can say who is missing, and because every backend has one.

A *session* is one time that all ranks came together; its number is part of every key, so nothing left over from an
attempt that failed is ever read. Each rank shows a fresh token under its own key; rank 0 waits until every rank shows
one that it has not used before, and answers under each token with the session's number. A rank that gives up takes its
token back. So ranks may come late, give up and come again, in any order and each as often as it likes.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, default_pg_timeout

from fusedring.errors import CollectiveTimeoutError
from fusedring.torch_internals import store_of, timeout_of

_GONE = "-"
"""In place of a token: this rank does not wait."""

_POLL_SECONDS = 0.005


class Rendezvous:
    """Exchanges between the ranks of one process group, in the same order on all of them. group None: world size 1.

    Making one is collective. Raises CollectiveTimeoutError that names the ranks which did not come within `timeout`
    seconds.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, timeout: float) -> None:
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self._store = None if group is None else store_of(group)
        self._read: str | None = None
        self._count = 0
        self._session = "" if self._store is None else self._join(self._store, timeout)

    def exchange(self, value: Any, *, timeout: float, purpose: str) -> list[Any]:
        """Every rank's `value` (anything JSON can hold), in rank order.

        Raises CollectiveTimeoutError that names the ranks which did not come within `timeout` seconds. The session is
        of no use then: some ranks may have what others lack.
        """
        if self._store is None:
            return [json.loads(json.dumps(value))]
        key = f"{self._session}/{self._count}"
        self._count += 1
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        deadline = time.monotonic() + timeout
        values = []
        for rank in range(self.world_size):
            if not _wait(self._store, f"{key}/{rank}", deadline):
                missing = [r for r in range(rank, self.world_size) if not self._store.check([f"{key}/{r}"])]
                if missing:  # else the last one came just now
                    raise self._timeout(missing, timeout, purpose)
            values.append(json.loads(self._store.get(f"{key}/{rank}")))
        # Whoever writes to this exchange has read the one before, so this rank's old value is no longer needed.
        if self._read is not None:
            self._store.delete_key(self._read)
        self._read = f"{key}/{self.rank}"
        return values

    def _join(self, store: Store, timeout: float) -> str:
        token, deadline = uuid.uuid4().hex, time.monotonic() + timeout
        store.set(_token_key(self.rank), token)
        try:
            if self.rank > 0:
                if not _wait(store, _answer_key(token), deadline):
                    # If nobody is absent, rank 0 has not answered yet.
                    raise self._timeout(list(self._absent(store)) or [0], timeout, "open the workspace")
                session: str = store.get(_answer_key(token)).decode()
                store.delete_key(_answer_key(token))
                return session
            while absent := list(self._absent(store)):
                if time.monotonic() > deadline:
                    raise self._timeout(absent, timeout, "open the workspace")
                time.sleep(_POLL_SECONDS)
        except BaseException:
            store.set(_token_key(self.rank), _GONE)
            raise
        tokens = [store.get(_token_key(rank)).decode() for rank in range(self.world_size)]
        store.set(_USED_KEY, json.dumps(tokens))
        session = f"fusedring/session {store.add('fusedring/sessions', 1)}"
        for used in tokens[1:]:
            store.set(_answer_key(used), session)
        return session

    def _absent(self, store: Store) -> Iterable[int]:
        """The ranks that show no fresh token."""
        used = json.loads(store.get(_USED_KEY)) if store.check([_USED_KEY]) else []
        for rank in range(self.world_size):
            key = _token_key(rank)
            if not store.check([key]) or store.get(key).decode() in (_GONE, *used):
                yield rank

    def _timeout(self, missing: Iterable[int], timeout: float, purpose: str) -> CollectiveTimeoutError:
        ranks = ", ".join(map(str, missing))
        return CollectiveTimeoutError(
            f"rank {self.rank} waited {timeout:g} s to {purpose}, but rank(s) {ranks} of the group did not come. All "
            "ranks of the group must make the call; if they are only late, pass a longer timeout"
        )


_USED_KEY = "fusedring/used tokens"


def _token_key(rank: int) -> str:
    return f"fusedring/token of rank {rank}"


def _answer_key(token: str) -> str:
    return f"fusedring/answer to {token}"


def _wait(store: Store, key: str, deadline: float) -> bool:
    """Whether the key was there before the deadline.

    It asks again and again: a blocking wait would keep the store's connection from other threads and groups.
    """
    pause = _POLL_SECONDS / 8
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS)
    return True


def group_timeout(group: dist.ProcessGroup | None) -> float:
    """The timeout in seconds that the process group was made with; torch's default for a lone process."""
    given = None if group is None else timeout_of(group)
    return (default_pg_timeout if given is None else given).total_seconds()
