"""Run a function on several ranks of this machine with torch's own launcher: for notebooks, scripts, the command."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fusedring.config import check_timeout
from fusedring.errors import CollectiveTimeoutError, PeerLostError
from fusedring.group.collectives import close
from fusedring.transport.host_signals import cores

_HOW_TO_IMPORT = (
    "Every rank is a fresh process, which imports the function by its name. Write it at the top of a .py file (in a "
    "notebook: a cell that begins with %%writefile training.py), import it from there, and pass values as arguments"
)
_PATIENCE = 0.5
"""Seconds that a rank which lost another one stays, so that the other one's error is what the launcher sees first."""


class RanksFailedError(RuntimeError):
    """A rank raised or died, and the others were ended; the text is the first one's. Its traceback is a note."""


def spawn(function: Callable[..., Any], ranks: int, *arguments: Any, timeout: float = 1800.0) -> list[Any]:
    """What `function(*arguments)` returns on each of `ranks` ranks, rank 0's first.

    Every rank is a fresh process on this machine, with its share of the cores and a default process group over gloo
    whose timeout is `timeout` seconds. For a notebook, or a script that calls it under `if __name__ == "__main__":`.

    function: something that another process can import: from a file, not defined in a notebook's cell, in another
        function or as a lambda. arguments, and what it returns: anything that can be pickled.

    Raises ValueError for wrong arguments and a function that cannot be imported, RanksFailedError if a rank fails, and
    KeyboardInterrupt on Ctrl-C, once all ranks have ended.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    name = _pickled(function)
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"ranks must be a whole number, at least 1, got {ranks!r}")
    check_timeout(timeout)
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself asks
        raise RuntimeError(
            'a new rank imports this script, which calls spawn: put that under if __name__ == "__main__":'
        )
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
        with _signal_handlers_kept():
            results: dict[int, bytes] = elastic_launch(config, _run)(name, arguments, threads, timeout)
    except SignalException:
        raise KeyboardInterrupt from None
    except ChildFailedError as error:
        raise _failure(error) from None
    except Exception as error:  # the launcher itself: arguments that cannot be pickled, no port, no semaphore
        raise RanksFailedError(f"the ranks cannot be started: {type(error).__name__}: {error}") from error
    return [pickle.loads(results[rank]) for rank in range(ranks)]


def launch(function: Callable[..., Any], ranks: int, *arguments: Any, timeout: float = 1800.0) -> list[Any]:
    """The old name of `spawn`, for one release more."""
    warnings.warn("fusedring.launch has become fusedring.spawn: use that name", FutureWarning, stacklevel=2)
    return spawn(function, ranks, *arguments, timeout=timeout)


def _pickled(function: Callable[..., Any]) -> bytes:
    """The function's name, for other processes. Raises ValueError where they could not find it."""
    if not callable(function):
        raise ValueError(f"expected a function, got {function!r}")
    at_prompt = not hasattr(sys.modules["__main__"], "__file__")
    if at_prompt and getattr(function, "__module__", None) == "__main__":
        raise ValueError(f"{function!r} was defined in a notebook or at a prompt. {_HOW_TO_IMPORT}")
    try:
        return pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"{function!r} cannot be imported ({error}). {_HOW_TO_IMPORT}") from None


def _run(name: bytes, arguments: tuple[Any, ...], threads: int, timeout: float) -> bytes:
    """One rank, from its beginning to its end; its result."""
    try:
        function = pickle.loads(name)
    except (AttributeError, ImportError) as error:
        raise ValueError(f"the function cannot be imported ({error}). {_HOW_TO_IMPORT}") from error
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    try:
        result = function(*arguments)
        close()
    except (PeerLostError, CollectiveTimeoutError):
        time.sleep(_PATIENCE)
        raise
    finally:
        dist.destroy_process_group()
    try:
        return pickle.dumps(result)  # bytes outlive this process, which shared tensors would not
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"what the function returned cannot be pickled ({error})") from error


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Torch's launcher sets handlers, and leaves them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {name: signal.getsignal(name) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            if handler is not None:  # None: not set by Python, and not to be restored by it
                signal.signal(name, handler)


def _failure(error: Any) -> RanksFailedError:
    """What the rank that failed first has left, from torch's ChildFailedError."""
    rank, failure = error.get_first_failure()
    message, traceback = failure.message, ""
    if isinstance(message, dict):
        traceback = message.get("extraInfo", {}).get("py_callstack", "")
        message = message.get("message", message)
    elif failure.exitcode > 0:
        message = f"ended with exit code {failure.exitcode}; see what it printed"
    failed = RanksFailedError(f"rank {rank}: {message}")
    if traceback:
        failed.add_note(f"On rank {rank}:\n{traceback.rstrip()}")
    return failed
