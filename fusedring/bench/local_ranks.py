"""Run a function on several ranks of this machine, with torch's own launcher."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fusedring.collectives import close
from fusedring.signals import cores


class RanksFailedError(RuntimeError):
    """One of the ranks raised or died; the text is the first one's."""


def run_on_ranks(function: Callable[..., Any], ranks: int, *arguments: Any, timeout: float = 1800.0) -> Any:
    """What rank 0's `function(*arguments)` returns.

    Every rank runs it in a fresh process, with its share of the cores and a default process group over gloo whose
    timeout is `timeout` seconds. Raises KeyboardInterrupt on Ctrl-C, once all ranks have ended, and RanksFailedError if
    a rank fails.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

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
    threads = max(1, cores() // ranks)
    try:
        results: dict[int, Any] = elastic_launch(config, _run)(function, arguments, threads, timeout)
    except SignalException:
        raise KeyboardInterrupt from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message = failure.message
        if isinstance(message, dict):
            message = message.get("message", message)
        raise RanksFailedError(f"rank {rank}: {message}") from error
    except Exception as error:  # the launcher itself: no port, no semaphore, no temporary directory
        raise RanksFailedError(f"the ranks cannot be started: {type(error).__name__}: {error}") from error
    return results[0]


def _run(function: Callable[..., Any], arguments: tuple[Any, ...], threads: int, timeout: float) -> Any:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    try:
        result = function(*arguments)
        close()
        return result
    finally:
        dist.destroy_process_group()
