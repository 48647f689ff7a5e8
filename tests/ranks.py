"""Run a function on several ranks: fresh processes over gloo, a deadline, and nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE = 90.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch.testing", "fusedring", "tests.ranks"])


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
