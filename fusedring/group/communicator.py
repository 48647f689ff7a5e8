"""One process group's workspace and engines, and the order in which it launches.

Everything that a group does together goes through its communicator, one task at a time, in the order in which the
program asked. A task that nobody waits for yet runs on the communicator's thread, which the first such task starts; one
that is waited for runs in the calling thread, unless others are queued before it. A launch on a GPU is started in the
calling thread, and does not take long.
"""

from __future__ import annotations

import atexit
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fusedring.config import torch_dtype
from fusedring.engines.backend import Backend
from fusedring.engines.cuda import CHANNELS, PARITY_BYTES, CudaEngine, Kernels
from fusedring.engines.host import HostEngine
from fusedring.engines.interpreter import TritonEngine
from fusedring.engines.open_gpu import lend
from fusedring.errors import FusedRingError, MismatchError, NotCapturedError, OutOfMemoryError
from fusedring.group.work import Batch, GpuWork, Work
from fusedring.log import logger
from fusedring.observe.tracing import COMMUNICATION, Track, recording
from fusedring.plan import policy
from fusedring.plan.launch import Launch, Outcome
from fusedring.transport import agreement as launching
from fusedring.transport.agreement import Message, Opening
from fusedring.transport.gpu import Cuda, Gpu, Stream
from fusedring.transport.gpu_memory import Alone, Pages, Peers, Pinned, Way
from fusedring.transport.rendezvous import Rendezvous, group_timeout
from fusedring.transport.source import Source
from fusedring.transport.workspace import Workspace


class _Profiled:
    """A span in torch's profiler, which records the thread that launches and not the communicator's own."""

    def __init__(self, label: str) -> None:
        self._ended: torch.futures.Future[None] = torch.futures.Future()
        record = torch.autograd.profiler.record_function(label)
        record.__enter__()  # type: ignore[no-untyped-call]
        # The profiler knows this thread only; the future's callback carries that over to the thread that ends it.
        record._call_end_callbacks_on_future(self._ended)

    def end(self) -> None:
        """May be called by another thread."""
        self._ended.set_result(None)


@dataclass(slots=True)
class _Task:
    act: Callable[[], Any]
    work: Work
    batch: Batch = field(default_factory=Batch)
    profiled: _Profiled | None = None


class Communicator:
    """What one process group (None: a lone process) does together. Made by `communicator_of`."""

    def __init__(self, group: dist.ProcessGroup | None, *, timeout: float | None) -> None:
        self.default_timeout = group_timeout(group)
        limit = timeout or self.default_timeout
        self._rendezvous = Rendezvous(group, timeout=limit)
        self.rank, self.world_size = self._rendezvous.rank, self._rendezvous.world_size
        self._workspace = Workspace(self._rendezvous, timeout=limit)
        self._engines: dict[str, HostEngine | TritonEngine] = {
            "host": HostEngine(self._workspace),
            "triton": TritonEngine(self._workspace),
        }
        self._group = group
        self._on_gpus: dict[torch.device, CudaEngine] = {}
        self._channels: dict[torch.device, int] = {}
        self._track = Track(COMMUNICATION)
        self._turn = threading.Lock()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._queued = 0
        self._counting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wrappers = itertools.count()
        self.closed = False
        try:
            # 'auto' means what group rank 0's table says, on all ranks.
            tables = self.exchange(policy.ONE_SHOT_BYTES, timeout=limit, purpose="agree on algorithms")
        except BaseException:
            self._workspace.close()
            raise
        self._rules = policy.rules_in_host_memory(int(tables[0]))

    def resolve(self, algorithm: str, nbytes: int, device: torch.device) -> str:
        """`algorithm`, or what 'auto' stands for with a tensor of `nbytes` bytes on `device`."""
        if algorithm != "auto":
            return algorithm
        engine, rules = self._on_gpus.get(device), self._rules
        if engine is not None:
            rules = policy.rules_on_gpus(self.world_size, full_mesh=engine.full_mesh)
        return policy.algorithm_for(nbytes, rules)

    def number_wrapper(self) -> int:
        """A number for one more wrapper; the same on all ranks if they make their wrappers in the same order."""
        return next(self._wrappers)

    def exchange(self, value: Any, *, timeout: float | None, purpose: str) -> list[Any]:
        """Every rank's `value` (anything JSON can hold), in rank order (collective)."""
        limit = timeout or self.default_timeout
        values: list[Any] = self._in_order(
            lambda: self._rendezvous.exchange(value, timeout=limit, purpose=purpose),
        )
        return values

    def resolve_engine(
        self, engine: str, device: torch.device, *, channels: int | None = None, timeout: float | None = None
    ) -> str:
        """`engine`, or what 'auto' stands for on `device`. For the first tensor on a GPU, open it (collective).

        Raises FusedRingError if the GPU was opened with another number of channels, or if 'triton' was asked for and
        kernels cannot run on all ranks.
        """
        if device.type == "cpu" and device not in self._on_gpus:
            return "host" if engine == "auto" else engine
        if device not in self._on_gpus:
            limit = timeout or self.default_timeout
            self._in_order(lambda: self._open_gpu(Cuda(device), channels or CHANNELS, limit))
        if channels not in (None, self._channels[device]):
            raise FusedRingError(
                f"{device} was opened with {self._channels[device]} channels, and now {channels} were asked for: call "
                "fusedring.close() on all ranks first, or ask for the same"
            )
        if engine == "triton" and isinstance(self._on_gpus[device].executor, Backend):
            raise FusedRingError(
                f"engine 'triton' cannot run on {device}, only {self._on_gpus[device].executor.name} can (see the log "
                "for the reasons): use engine='auto'"
            )
        return "triton"

    def announce(self, message: Message) -> None:
        """Meet all ranks, who must announce the same (collective): MismatchError otherwise, with nothing written."""
        self._in_order(lambda: self._meet(message, self.default_timeout))

    def _meet(self, message: Message, limit: float) -> None:
        launching.agree(self._workspace.meet(launching.pack(message), timeout=limit))

    def gpu_engine(self, device: torch.device) -> CudaEngine | None:
        """What starts launches on `device`; None where the host engine or the interpreter runs them."""
        return self._on_gpus.get(device)

    def _open_gpu(self, gpu: Gpu, channels: int, limit: float) -> None:
        """Find out how kernels of all ranks reach each other's memory (collective)."""
        self._meet(Opening(channels), limit)
        exchange = partial(self._rendezvous.exchange, timeout=limit)
        pages = Pages(self._workspace, channels, limit)
        ways: list[Way] = [Alone(gpu)]
        if self.world_size > 1:
            assert self._group is not None
            gpus = exchange([gpu.identity(), gpu.device.index], purpose="tell each other their GPUs")
            identities, indices = zip(*gpus, strict=True)
            if len(set(identities)) < len(gpus):
                logger.warning("several ranks use the same GPU (%s): their kernels take turns", ", ".join(identities))
            same_index = len(set(indices)) < len(set(identities))
            ways = [Peers(gpu, self._group, same_index=same_index), Pinned(gpu, self._workspace, limit)]
        lent = lend(
            gpu,
            self._workspace,
            pages,
            ways,
            lambda text, purpose: exchange(text, purpose=purpose),
            channels=channels,
            parity_bytes=PARITY_BYTES,
        )
        executor: Kernels | Backend
        full_mesh = False
        if isinstance(lent, list):
            if self._group is None:
                raise FusedRingError(f"kernels cannot run on {gpu.device}: {'; '.join(lent)}")
            executor = Backend(gpu, self._group, pages.ledger)
            logger.warning(
                "%s: reducing with %s, whose bits differ from those of fusedring's kernels, since %s",
                gpu.device,
                executor.name,
                "; ".join(lent),
            )
        else:
            executor, full_mesh = Kernels(gpu, lent), lent.full_mesh
            if lent.why_not:
                logger.warning("%s: %s, since %s", gpu.device, executor.name, "; ".join(lent.why_not))
            logger.info("%s: %s, %d channels", gpu.device, executor.name, channels)
        self._on_gpus[gpu.device] = CudaEngine(gpu, self._workspace, executor, full_mesh=full_mesh)
        self._channels[gpu.device] = channels

    def allocate(self, nbytes: int, device: torch.device, *, timeout: float | None) -> torch.Tensor:
        """`nbytes` bytes at every rank, as uint8 (collective): of the workspace, or on a GPU, which needs no such."""
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        limit = timeout or self.default_timeout
        memory: torch.Tensor = self._in_order(lambda: self._workspace.allocate(nbytes, timeout=limit))
        return memory

    def run(self, launch: Launch, tensor: torch.Tensor, *, timeout: float | None) -> None:
        """Execute `launch` on the flat `tensor` and return when it has ended; on a GPU, when that is ordered."""
        limit = timeout or self.default_timeout
        if tensor.device in self._on_gpus:
            self.submit(launch, tensor, result=tensor, timeout=timeout).wait()
            return
        with torch.autograd.profiler.record_function(launch.label):
            self._in_order(lambda: self._execute(launch, tensor, (), limit))

    def submit(
        self,
        launch: Launch,
        tensor: torch.Tensor,
        *,
        result: torch.Tensor,
        timeout: float | None,
        sources: Sequence[Source] = (),
        batch: Batch | None = None,
        after: Sequence[Stream] = (),
    ) -> Work:
        """Queue `launch` on the flat `tensor`; the Work gives `result`.

        sources: what an engine that reads in place reads elsewhere than in `tensor`. after: on a GPU, the streams that
        produce what is read.
        """
        limit, work = timeout or self.default_timeout, Work(result, launch.label)
        self._check_open()
        engine = self._on_gpus.get(tensor.device)
        if engine is not None:
            self.settle()  # else the launch would start in the thread, which knows neither stream nor capture
            work = GpuWork(result, launch.label, engine)
            start = partial(engine.start, launch, tensor, timeout=limit, sources=sources, after=after)
            self._run_here(launch, start, work, batch or Batch())
            return work
        if launch.engine == "triton":
            # In another thread, Triton's interpreter would meet the caller's own kernels.
            self._run_here(launch, lambda: self._execute(launch, tensor, sources, limit), work, batch or Batch())
            return work
        profiled = _Profiled(launch.label) if torch._C._autograd._profiler_enabled() else None
        self._enqueue(_Task(lambda: self._execute(launch, tensor, sources, limit), work, batch or Batch(), profiled))
        return work

    def _run_here(self, launch: Launch, act: Callable[[], Any], work: Work, batch: Batch) -> None:
        """Run or start a launch in the calling thread."""
        try:
            if batch.error is not None:
                raise batch.error
            with torch.autograd.profiler.record_function(launch.label):
                work._value = self._in_order(act)
        except Exception as error:  # raised by wait()
            work._error = batch.error = error
        work._ended = time.perf_counter()
        work._finish()

    def settle(self) -> None:
        """Return once everything that is queued has ended, well or not."""
        with self._counting:
            queued = self._queued
        if queued and not self.closed:  # closing settles, too
            task = _Task(lambda: None, Work(torch.empty(0), "the call"))
            self._enqueue(task)
            task.work.wait()

    def close(self) -> None:
        """Finish what is queued, then let go of thread and memory. Not collective."""
        with self._counting:
            self.closed = True
        if self._thread is not None and self._thread.is_alive():
            self._tasks.put(None)
            self._thread.join()
        with self._turn:
            try:
                for engine in self._on_gpus.values():
                    engine.close()
            finally:
                self._on_gpus.clear()
                self._engines.clear()
                self._workspace.close()

    def abandon(self) -> None:
        """Let go of the memory. What is queued fails, and peers that wait for this rank are told.

        What a GPU has been given gets a few seconds, since others may rightly wait for it.
        """
        self.closed = True
        for engine in self._on_gpus.values():
            engine.abandon()
        if self._thread is not None and self._thread.is_alive():
            self._workspace.fail(FusedRingError("the process group is gone"))  # ends what the thread is waiting for
            self._tasks.put(None)
            self._thread.join(timeout=1)
        self._workspace.close()

    def _execute(self, launch: Launch, tensor: torch.Tensor, sources: Sequence[Source], limit: float) -> Outcome:
        begun = time.perf_counter()
        outcome = self._engines[launch.engine].run(launch, tensor, sources=sources, timeout=limit)
        if recording():
            self._track.span("meet", begun, outcome.started)
            self.trace_launch(launch, outcome.started, time.perf_counter())
        return outcome

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

    def _check_open(self) -> None:
        if self.closed:
            raise FusedRingError(
                f"rank {self.rank}: the group's workspace was closed meanwhile (fusedring.close), or this is a forked "
                "process. Make the call again on all ranks to open a new one"
            )

    def _in_order(self, act: Callable[[], Any]) -> Any:
        self._check_open()
        with self._counting:
            queued = self._queued
        if queued:
            task = _Task(act, Work(torch.empty(0), "the call"))
            self._enqueue(task)
            try:
                task.work.wait()
            except BaseException as error:
                if not task.work.is_completed():  # interrupted: nobody will know what this task did and when
                    self._workspace.fail(error)
                raise
            return task.work._value
        with self._turn:
            self._check_open()
            return self._guarded(act)

    def _enqueue(self, task: _Task) -> None:
        self._check_open()
        with self._counting:
            self._check_open()
            self._queued += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="fusedring", daemon=True)
                self._thread.start()
        self._tasks.put(task)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._perform(task)
            del task  # and with it the gradients that it read, before waiting for the next one

    def _perform(self, task: _Task) -> None:
        try:
            if task.batch.error is not None:
                raise task.batch.error
            with self._turn:
                task.work._value = self._guarded(task.act)
        except BaseException as error:  # raised by wait(), in the thread that asked
            task.work._error = task.batch.error = error
        task.work._ended = time.perf_counter()
        if task.profiled is not None:
            task.profiled.end()
        with self._counting:
            self._queued -= 1
        task.work._finish()

    def _guarded(self, act: Callable[[], Any]) -> Any:
        """A task that ends half-way makes the workspace unusable on all ranks; what all ranks agreed on does not."""
        try:
            return act()
        except (MismatchError, OutOfMemoryError, NotCapturedError):
            raise
        except BaseException as error:
            self._workspace.fail(error)
            raise


_communicators: dict[dist.ProcessGroup | None, Communicator] = {}


def communicator_of(group: dist.ProcessGroup | None = None, *, timeout: float | None = None) -> Communicator:
    """The communicator of a process group (None: the default group, or a lone process where there is none).

    The first call for a group is collective and bounded by `timeout` seconds. Raises RuntimeError where several
    processes were started but no process group exists, ValueError if this rank is not in the group, FusedRingError in a
    forked child of a rank.
    """
    for old in [g for g in _communicators if g is not None and g not in distributed_c10d._world.pg_map]:
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
        communicator.closed = True
    _parents.extend(_communicators.values())
    _communicators.clear()
    _inherited.update(distributed_c10d._world.pg_map)


os.register_at_fork(after_in_child=_leave_to_parent)
