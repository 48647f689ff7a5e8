"""One process group's workspace and engines.

Everything that a group does together goes through its communicator, in the order in which the program asked (see
tasks.py). What a launch is carried out by is an engine's business (see engines/engine.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fusedring.config import torch_dtype
from fusedring.engines.engine import Engine
from fusedring.engines.host import HostEngine
from fusedring.engines.on_gpu import GpuEngine
from fusedring.engines.work import Batch, Pending, Work
from fusedring.errors import FusedRingError
from fusedring.group.tasks import Tasks
from fusedring.observe.tracing import COMMUNICATION, Track, recording
from fusedring.plan import policy
from fusedring.plan.launch import Launch, Outcome
from fusedring.transport import agreement
from fusedring.transport.agreement import Message
from fusedring.transport.gpu import Cuda, Gpu, Stream
from fusedring.transport.rendezvous import Rendezvous, group_timeout
from fusedring.transport.source import Source
from fusedring.transport.workspace import Workspace


class Communicator:
    """What one process group (None: a lone process) does together. Made by `communicator_of`.

    A timeout of None, wherever one is asked for, is the group's own.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, timeout: float | None) -> None:
        self._default_timeout = group_timeout(group)
        limit = self._limit(timeout)
        self._group = group
        self._rendezvous = Rendezvous(group, timeout=limit)
        self.rank, self.world_size = self._rendezvous.rank, self._rendezvous.world_size
        self._workspace = Workspace(self._rendezvous, timeout=limit)
        self._tasks = Tasks(self.rank, self._workspace.fail)
        self._track = Track(COMMUNICATION)
        try:
            # 'auto' means what group rank 0's table says, on all ranks.
            tables = self.exchange(policy.ONE_SHOT_BYTES, timeout=limit, purpose="agree on algorithms")
        except BaseException:
            self._workspace.close()
            raise
        self._rules = policy.rules_in_host_memory(int(tables[0]))
        self._in_host_memory: dict[str, Engine] = {"host": HostEngine(self._workspace, self._rules)}
        self._on_gpus: dict[torch.device, GpuEngine] = {}

    @property
    def closed(self) -> bool:
        """Whether the group's workspace was closed, or is a parent process's."""
        return self._tasks.closed

    def engine_for(
        self, name: str, device: torch.device, *, channels: int | None = None, timeout: float | None = None
    ) -> Engine:
        """The engine called `name`, or what 'auto' stands for, for tensors on `device`. Opens a GPU at its first tensor
        (collective).

        Raises FusedRingError if the GPU was opened with another number of channels, or if 'triton' was asked for and
        kernels cannot run on all ranks.
        """
        engine = self._on_gpus.get(device)
        if engine is None and device.type == "cpu":
            return self._engine_in_host_memory(policy.ENGINES_BY_DEVICE["cpu"].engine if name == "auto" else name)
        if engine is None:
            engine = self.open_gpu(Cuda(device), channels=channels, timeout=timeout)
        if channels not in (None, engine.channels):
            raise FusedRingError(
                f"{device} was opened with {engine.channels} channels, and now {channels} were asked for: call "
                "fusedring.close() on all ranks first, or ask for the same"
            )
        if name not in ("auto", engine.name):
            raise FusedRingError(
                f"engine {name!r} cannot run on {device}, only {engine.title} can (see the log for the reasons): use "
                "engine='auto'"
            )
        return engine

    def open_gpu(self, gpu: Gpu, *, timeout: float | None = None, **how: Any) -> GpuEngine:
        """From now on tensors on `gpu.device` are reduced by an engine for `gpu` (collective).

        how: as for `engines.open_gpu.open_gpu`, where a test says which ways between GPUs it pretends.
        """
        from fusedring.engines.open_gpu import open_gpu  # here, since it needs triton

        act = partial(
            open_gpu, gpu, self._group, self._rendezvous, self._workspace, timeout=self._limit(timeout), **how
        )
        engine: GpuEngine = self._tasks.run(act)
        self._on_gpus[gpu.device] = engine
        return engine

    def algorithm_for(self, algorithm: str, nbytes: int, engine: Engine) -> str:
        """`algorithm`, or what 'auto' stands for with a tensor of `nbytes` bytes."""
        return policy.algorithm_for(nbytes, engine.rules) if algorithm == "auto" else algorithm

    def exchange(self, value: Any, *, timeout: float | None, purpose: str) -> list[Any]:
        """Every rank's `value` (anything JSON can hold), in rank order (collective)."""
        exchange = partial(self._rendezvous.exchange, value, timeout=self._limit(timeout), purpose=purpose)
        values: list[Any] = self._tasks.run(exchange)
        return values

    def announce(self, message: Message) -> None:
        """Meet all ranks, who must announce the same (collective): MismatchError otherwise, with nothing written."""
        header, limit = agreement.pack(message), self._default_timeout
        self._tasks.run(lambda: agreement.agree(self._workspace.meet(header, timeout=limit)))

    def allocate(self, nbytes: int, device: torch.device, *, timeout: float | None) -> torch.Tensor:
        """`nbytes` bytes at every rank, as uint8 (collective): of the workspace, or on a GPU, which needs no such."""
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        limit = self._limit(timeout)
        memory: torch.Tensor = self._tasks.run(lambda: self._workspace.allocate(nbytes, timeout=limit))
        return memory

    def run(self, engine: Engine, launch: Launch, tensor: torch.Tensor, *, timeout: float | None) -> None:
        """As `submit`, but return when it has ended; on a GPU, when that is ordered."""
        self._tasks.check_open()
        work = engine.work(tensor, launch.label)
        if engine.in_caller:
            self._tasks.settle()
        self._tasks.run_for(work, self._act(engine, launch, tensor, timeout), Batch(), launch.label)
        work.wait()

    def submit(
        self,
        engine: Engine,
        launch: Launch,
        tensor: torch.Tensor,
        *,
        result: torch.Tensor,
        timeout: float | None,
        sources: Sequence[Source] = (),
        batch: Batch | None = None,
        after: Sequence[Stream] = (),
    ) -> Work:
        """Have `launch` on the flat `tensor` carried out, and go on; the Work gives `result`.

        sources: what an engine that reads in place reads elsewhere than in `tensor`. after: on a GPU, the streams that
        produce what is read.
        """
        self._tasks.check_open()
        work, act = engine.work(result, launch.label), self._act(engine, launch, tensor, timeout, sources, after)
        if engine.in_caller:
            self._tasks.settle()  # else it would start in the thread, which knows neither stream nor capture
            self._tasks.run_for(work, act, batch or Batch(), launch.label)
        else:
            self._tasks.start(work, act, batch or Batch(), launch.label)
        return work

    def settle(self) -> None:
        """Return once everything that is queued has ended, well or not."""
        self._tasks.settle()

    def trace_launch(self, launch: Launch, begun: float, ended: float) -> None:
        """A launch's span in the trace."""
        self._track.span(
            launch.label,
            begun,
            ended,
            bytes=launch.elements * torch_dtype(launch.dtype).itemsize,
            algorithm=launch.algorithm,
            wire=launch.wire,
            wrapper=launch.wrapper,
            step=launch.step,
        )

    def close(self) -> None:
        """Finish what is queued, then let go of thread and memory. Not collective."""
        with self._tasks.close():
            try:
                for engine in self._engines():
                    try:
                        engine.settle()
                    finally:
                        engine.close()
            finally:
                self._on_gpus.clear()
                self._workspace.close()

    def abandon(self) -> None:
        """Let go of the memory. What is queued fails, and peers that wait for this rank are told.

        What a GPU has been given gets a few seconds, since others may rightly wait for it.
        """
        self._tasks.refuse()
        for engine in self._engines():
            engine.abandon()
        self._tasks.abandon(FusedRingError("the process group is gone"))
        self._workspace.close()

    def leave_to_parent(self) -> None:
        """In a forked child: take nothing more."""
        self._tasks.refuse()

    def _engines(self) -> list[Engine]:
        return [*self._on_gpus.values(), *self._in_host_memory.values()]

    def _engine_in_host_memory(self, name: str) -> Engine:
        if name not in self._in_host_memory:
            from fusedring.engines.interpreter import InterpreterEngine  # here, since it needs triton

            self._in_host_memory[name] = InterpreterEngine(self._workspace, self._rules)
        return self._in_host_memory[name]

    def _limit(self, timeout: float | None) -> float:
        return timeout or self._default_timeout

    def _act(
        self,
        engine: Engine,
        launch: Launch,
        tensor: torch.Tensor,
        timeout: float | None,
        sources: Sequence[Source] = (),
        after: Sequence[Stream] = (),
    ) -> Callable[[], Outcome | Pending]:
        """What carries `launch` out when its turn has come."""
        start = partial(engine.start, launch, tensor, timeout=self._limit(timeout), sources=sources, after=after)
        return partial(self._traced, launch, start)

    def _traced(self, launch: Launch, start: Callable[[], Outcome | Pending]) -> Outcome | Pending:
        begun = time.perf_counter()
        outcome = start()
        if recording() and isinstance(outcome, Outcome):  # what a GPU was given is traced once it is through
            self._track.span("meet", begun, outcome.started)
            self.trace_launch(launch, outcome.started, time.perf_counter())
        return outcome
