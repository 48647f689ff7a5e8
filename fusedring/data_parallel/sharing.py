"""Parameters that several wrappers have.

The gradient of such a parameter lies in the bucket of one of them, where the others read it; so it is copied as soon as
it comes, and its bucket waits until no other wrapper may still read there.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from weakref import WeakSet

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fusedring.data_parallel.buckets import Bucket, Entry
from fusedring.data_parallel.turns import Participant


class SharedParameters:
    """Those of one wrapper, the `owner`. True if there are any."""

    def __init__(self, owner: Participant, entries: Sequence[Entry]) -> None:
        self._owner, self._entries = owner.turn, entries
        self._users = {id(entry): _users.enter(entry.parameter, owner) for entry in entries}
        self._shared: frozenset[int] = frozenset()
        self._as_of = -1

    def look(self) -> None:
        """Find out which they are, if a wrapper was made since the last look."""
        if self._as_of != _users.entered:
            self._as_of = _users.entered
            self._shared = frozenset(id(entry) for entry in self._entries if len(self._users[id(entry)]) > 1)

    def __bool__(self) -> bool:
        return bool(self._shared)

    def __contains__(self, entry: object) -> bool:
        return id(entry) in self._shared

    def may_be_read_in(self, bucket: Bucket) -> bool:
        """Whether another wrapper that is in a backward, or expects one, may still read a gradient of the bucket."""
        return bool(self._shared) and any(
            user.turn is not self._owner and (user.turn.expecting or user.turn.run is not None)
            for entry in bucket.entries
            if id(entry) in self._shared
            for user in self._users[id(entry)]
        )


class _Users:
    """Who has which parameter. entered: how many times somebody said so."""

    def __init__(self) -> None:
        self._of: MutableMapping[torch.nn.Parameter, WeakSet[Participant]] = WeakIdKeyDictionary()
        self.entered = 0

    def enter(self, parameter: torch.nn.Parameter, user: Participant) -> WeakSet[Participant]:
        """`user` has `parameter`. Returns all users, for ever up to date."""
        self.entered += 1
        users = self._of.setdefault(parameter, WeakSet())
        users.add(user)
        return users


_users = _Users()
