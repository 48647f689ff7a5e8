"""Run a function on several ranks: fresh processes over gloo, a deadline, and nothing left behind."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE = 90.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch.distributed",
        "torch.testing",
        "fusedring",
        "tests.ranks",
        "tests.interpreter",
        "torch._inductor.compile_fx",  # seconds for every rank that has an optimizer or a compiled model
    ]
)


class RankError(AssertionError):
    """A rank raised, died or did not end in time."""


def run_ranks(world: int, function: Callable[..., Any], *args: Any, deadline: float = DEADLINE) -> list[Any]:
    """function(rank, world, *args) on every rank of a fresh gloo group; what each returned, in rank order."""
    outcomes = start_ranks(world, function, *args, deadline=deadline)
    bad = {rank: text for rank, (state, text) in enumerate(outcomes) if state != "returned"}
    if bad:
        raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in bad.items()))
    return [value for _, value in outcomes]


def start_ranks(world: int, function: Callable[..., Any], *args: Any, deadline: float = DEADLINE) -> list[Any]:
    """As `run_ranks`, for ranks that may die: ('returned', value), ('raised', text) or ('died', exit code) of each."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world):
            mine, theirs = _context.Pipe(duplex=False)
            process = _context.Process(target=_rank_main, args=(theirs, folder, rank, world, function, args))
            process.start()
            theirs.close()
            ranks.append((process, mine))
        end = time.monotonic() + deadline
        outcomes = []
        try:
            for process, pipe in ranks:
                if not pipe.poll(max(0.0, end - time.monotonic())):
                    raise RankError(f"a rank did not end within {deadline} s")
                try:
                    outcomes.append(pipe.recv())
                except EOFError:
                    process.join(5)
                    outcomes.append(("died", process.exitcode))
        finally:
            for process, pipe in ranks:
                process.join(0 if len(outcomes) < world else 10)
                if process.is_alive():
                    process.kill()
                    process.join()
                pipe.close()
    return outcomes


def _rank_main(pipe: Connection, folder: str, rank: int, world: int, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    try:
        store = dist.FileStore(str(Path(folder) / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
        outcome = ("returned", function(rank, world, *args))
    except BaseException:
        outcome = ("raised", traceback.format_exc())
    pipe.send(outcome)
    pipe.close()
    # Keep the group's store and workspace until everybody is through.
    if outcome[0] == "returned" and dist.is_initialized():
        dist.destroy_process_group()


class Ranks:
    """Ranks that stay, and run one function after another, since starting them takes seconds.

    After one in which a rank raised anything but an AssertionError they start anew. first(rank, world, *args) is run
    when they start.
    """

    def __init__(self, world: int, first: Callable[..., None] | None = None, *args: Any) -> None:
        self.world, self._first = world, (first, args)
        self._executor = ThreadPoolExecutor(1)
        self._pipes: list[Connection] = []
        self._running: Future[object] | None = None

    def run(self, function: Callable[..., None], *args: Any, deadline: float = DEADLINE) -> None:
        """function(rank, world, *args) on every rank. Raises AssertionError with what the ranks have to say."""
        if self._running is None:
            mine, theirs = zip(*(multiprocessing.Pipe() for _ in range(self.world)), strict=True)
            self._pipes = list(mine)
            self._running = self._executor.submit(run_ranks, self.world, _serve, theirs, self._first, deadline=86400)
        for pipe in self._pipes:
            pipe.send((function, args, deadline))
        end = time.monotonic() + deadline + 5  # a rank that is not through by its deadline ends itself
        answers = []
        for pipe in self._pipes:
            if pipe.poll(max(0.0, end - time.monotonic())):
                answers.append(pipe.recv())
            else:
                answers.append((False, f"died, or was not through after {deadline} s"))
        if not all(reusable for reusable, _ in answers):
            self._restart()
        texts = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]
        assert not texts, "\n".join(texts)

    def stop(self) -> None:
        """Let the ranks end."""
        running, self._running = self._running, None
        if running is not None:
            for pipe in self._pipes:
                pipe.send(None)
            running.result()

    def _restart(self) -> None:
        with suppress(RankError, OSError):  # what was wrong has been told
            self.stop()


def _serve(
    rank: int, world: int, pipes: tuple[Connection, ...], first: tuple[Callable[..., None] | None, tuple[Any, ...]]
) -> None:
    prepare, with_args = first
    if prepare is not None:
        prepare(rank, world, *with_args)
    while (order := pipes[rank].recv()) is not None:
        function, args, deadline = order
        faulthandler.dump_traceback_later(deadline, exit=True)
        try:
            function(rank, world, *args)
            answer = (True, "")
        except AssertionError:
            answer = (True, traceback.format_exc())
        except BaseException:  # pytest.fail, for one
            answer = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        pipes[rank].send(answer)


@contextmanager
def staying_ranks(world: int, first: Callable[..., None] | None = None, *args: Any) -> Iterator[Ranks]:
    ranks = Ranks(world, first, *args)
    try:
        yield ranks
    finally:
        ranks.stop()
