"""Run a function on several ranks of this machine, with torch's own launcher."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


class RanksFailedError(RuntimeError):
    """One of the ranks raised or died; the text is the first one's."""


def run_on_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
    """What rank 0's `function(*arguments)` returns; all ranks run it, each in a fresh process with its share of cores.

    The function makes its process group itself. Raises KeyboardInterrupt on Ctrl-C, once all ranks have ended, and
    RanksFailedError if a rank fails.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="fusedring",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    try:
        results: dict[int, Any] = elastic_launch(config, function)(*arguments)
    except SignalException:
        raise KeyboardInterrupt from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RanksFailedError(f"rank {rank}: {failure.message}") from error
    return results[0]
