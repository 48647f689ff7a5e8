"""Gradient averaging for data-parallel training: a fused ring all-reduce, and the module wrapper that drives it."""

import sys

if sys.platform != "linux":
    raise ImportError(f"fusedring runs on Linux only (memfd, futex, peer-mapped GPU memory); this is {sys.platform}")

from fusedring.data_parallel.clip import clip_grad_norm_
from fusedring.data_parallel.ddp import FusedRingDDP
from fusedring.errors import CollectiveTimeoutError, FusedRingError, MismatchError, OutOfMemoryError, PeerLostError
from fusedring.group.collectives import Work, all_gather, all_reduce, close, empty, reduce_scatter
from fusedring.group.spawn import RanksFailedError, launch, spawn
from fusedring.integrations.torch_ddp import CommHookState, comm_hook
from fusedring.observe.tracing import trace
from fusedring.version import __version__

__all__ = [
    "CollectiveTimeoutError",
    "CommHookState",
    "FusedRingDDP",
    "FusedRingError",
    "MismatchError",
    "OutOfMemoryError",
    "PeerLostError",
    "RanksFailedError",
    "Work",
    "__version__",
    "all_gather",
    "all_reduce",
    "clip_grad_norm_",
    "close",
    "comm_hook",
    "empty",
    "launch",
    "reduce_scatter",
    "spawn",
    "trace",
]
