"""Which process group has which communicator: from its first collective to `close`, its destruction or a fork."""

from __future__ import annotations

import atexit
import os

import torch.distributed as dist

from fusedring.errors import FusedRingError
from fusedring.group.communicator import Communicator
from fusedring.torch_internals import living_groups

_communicators: dict[dist.ProcessGroup | None, Communicator] = {}


def communicator_of(group: dist.ProcessGroup | None = None, *, timeout: float | None = None) -> Communicator:
    """The communicator of a process group (None: the default group, or a lone process where there is none).

    The first call for a group is collective and bounded by `timeout` seconds. Raises RuntimeError where several
    processes were started but no process group exists, ValueError if this rank is not in the group, FusedRingError in a
    forked child of a rank.
    """
    living = living_groups()
    for old in [g for g in _communicators if g is not None and g not in living]:
        _communicators.pop(old).abandon()  # destroyed since
    group = _resolve(group)
    if group is not None and group in _inherited:
        raise FusedRingError("a forked process cannot take part in its parent's collectives: it needs its own group")
    if group not in _communicators:
        _communicators[group] = Communicator(group, timeout=timeout)
    return _communicators[group]


def close(group: dist.ProcessGroup | None = None) -> None:
    """Finish what a group (None: the default group) has queued, and let go of its workspace and thread.

    Not collective, but call it on all ranks: peers that still wait for this rank get a PeerLostError. Tensors from
    `empty` stay readable. The group's next collective opens a new workspace.
    """
    group = _resolve(group)
    communicator = _communicators.get(group)
    if communicator is not None:
        try:
            communicator.close()
        finally:
            _communicators.pop(group, None)


def _resolve(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if group is None and not dist.is_initialized():
        world = os.environ.get("WORLD_SIZE", "1")
        if world != "1":
            raise RuntimeError(
                f"WORLD_SIZE is {world} but there is no process group: call torch.distributed.init_process_group first"
            )
        return None
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"this rank is not a member of the process group it passed (got {group!r})")
    return group


@atexit.register
def _abandon_all() -> None:
    while _communicators:
        _communicators.popitem()[1].abandon()


_inherited: set[dist.ProcessGroup] = set()
"""In a forked child, the groups of its parent, for which it must not speak."""


_parents: list[Communicator] = []
"""In a forked child, what its parent had: kept, since memory of a GPU cannot be freed there."""


def _leave_to_parent() -> None:
    for communicator in _communicators.values():
        communicator.leave_to_parent()
    _parents.extend(_communicators.values())
    _communicators.clear()
    _inherited.update(living_groups())


os.register_at_fork(after_in_child=_leave_to_parent)
