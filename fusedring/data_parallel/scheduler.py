"""When what is launched: gradients become ready in any order, buckets are launched in one fixed order on all ranks.

A *step* is one synced backward. Its buckets are launched while backward runs, each once its gradients and all earlier
buckets are there; the end of backward launches the rest, whether or not every gradient came, so that all ranks always
launch the same things. A rank that missed a gradient says so in the flags of the last bucket, which the launch counts.
A compiled backward announces gradients long before they are in `.grad`; then they count as ready.
A launch carries the step's number: a rank that lost a step is found, not paired with the wrong one.

Several wrappers may take part in one backward, and their gradients may come in another order on another rank. So they
take turns. Backward visits modules in the reverse order of their forwards; so a wrapper holds its launches back until
every wrapper whose forward came later has launched all of its own. The end of backward launches what is left, of all
wrappers in that same order, before anybody waits. Two kinds have no turn of their own and launch at the end, after the
others: a wrapper in a backward that no forward announced (a second one through the same graph), and one whose forward
has last held others back in vain (a teacher that is never trained).

A parameter may belong to several wrappers. Then its gradient lies in the bucket of one of them, where the others read
it; so that bucket waits for the end of backward, too.

Steps are numbered by what all ranks have in common: a forward in training counts, and so does a backward. So a rank
whose forward, loss or backward failed is ahead of or behind the others, and found.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fusedring.config import RingConfig, dtype_name, scale_factor
from fusedring.data_parallel.announcements import Announcements, more_than_announced, twice
from fusedring.data_parallel.buckets import Bucket, Entry, count
from fusedring.data_parallel.compile.dynamo import undisturbed
from fusedring.data_parallel.step_on_gpu import FlagsOnTheWay, GpuStep
from fusedring.data_parallel.user_hook import CommHook, GradBucket, HookWork
from fusedring.errors import MismatchError
from fusedring.group.communicator import Communicator
from fusedring.group.work import Batch, Work
from fusedring.observe.report import BucketReport, LaunchReport, StepReport, overlapped_fraction
from fusedring.observe.tracing import BACKWARD, WAIT, Track, recording
from fusedring.plan.launch import Launch
from fusedring.transport.agreement import Wrapping
from fusedring.transport.source import Source

READ_IN_PLACE = 2048
"""Elements from which on a gradient is read by the kernels where autograd left it: the largest tile. Smaller ones are
packed into their bucket, since a tile that is not full still costs a whole pass."""


class Backward:
    """One run of autograd's engine, from a wrapper's first hook in it to `end`, which the engine calls at its end.

    Only the engine holds it, and lets go of it when the run ends, well or not. So a weak reference tells that a run
    failed: it is dead, and `end` was not called. Make it inside a hook of the outermost run.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self.run: int = torch._C._current_graph_task_id()
        self.started = time.perf_counter()
        self._end = end
        end_of_run = functools.partial(undisturbed(Backward._ended), self)
        torch.autograd.Variable._execution_engine.queue_callback(end_of_run)

    def _ended(self) -> None:
        self._end()

    @staticmethod
    def under_way() -> bool:
        """Whether this thread is inside of any run of autograd's engine."""
        return bool(torch._C._current_graph_task_id() >= 0)


@dataclass(slots=True)
class _Step:
    """The synced backward under way. number: the same on all ranks that lost none; count: of this wrapper's steps.

    run: of which `Backward`; early: whether it may launch before the end.
    """

    number: int
    count: int
    run: int
    early: bool
    started: float
    waiting_for: list[int]
    arrived: list[list[bool]]
    sources: list[dict[int, torch.Tensor]]
    on_gpu: GpuStep | None
    ended: float = 0.0
    batch: Batch = field(default_factory=Batch)
    launches: list[Launch] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    flags_work: Work | None = None
    taken: set[int] = field(default_factory=set)
    partial: bool = False


class Scheduler:
    """Drives the buckets of one wrapper through its group's communicator.

    after: the one that did so before, when the wrapper had other buckets.
    """

    def __init__(
        self,
        communicator: Communicator,
        buckets: Sequence[Bucket],
        config: RingConfig,
        *,
        grad_is_view: bool,
        after: Scheduler | None = None,
    ) -> None:
        self._communicator, self._buckets, self._config = communicator, buckets, config
        self._entries = [entry for bucket in buckets for entry in bucket.entries]
        self._flags_clear = True
        self.order: list[str] = []
        """In which the gradients of the first step came; empty until it has ended."""
        self._coming: dict[str, None] = {}
        self.late_here: list[str] = []
        """The parameters whose gradient did not arrive on this rank in the last step."""
        self._grad_is_view = grad_is_view
        self._step: _Step | None = None
        self._next_number: int
        self._steps: int
        self._wrapper: int
        if after is not None and after._communicator is communicator:
            self._next_number, self._steps, self._wrapper = after._next_number, after._steps, after._wrapper
        else:
            self._next_number, self._steps, self._wrapper = 0, 0, communicator.number_wrapper()
        self._device = buckets[0].flat.device
        self._engine = communicator.resolve_engine(
            config.engine, self._device, channels=config.channels, timeout=config.timeout
        )
        self._gpu = communicator.gpu_engine(self._device)
        if self._gpu is not None:
            for bucket in buckets:  # a step that fails may leave launches behind
                self._gpu.gpu.keep(bucket.flat, self._gpu.gpu.comm)
        self._flags_on_the_way: deque[FlagsOnTheWay] = deque()
        self._forward_order = 0
        self._expecting = False
        self._held_in_vain = False
        self.track = Track(f"FusedRingDDP {self._wrapper}")
        self._group_mates = _schedulers.setdefault(communicator, WeakSet())
        self._group_mates.add(self)
        self._shared: set[int] = set()
        """The ids of entries whose parameter some other wrapper has, too, or had."""
        self._shared_as_of = -1
        _made[0] += 1
        self._sharers = {id(e.parameter): _users.setdefault(e.parameter, WeakSet()) for e in self._entries}
        for users in self._sharers.values():
            users.add(self)
        self._announcements: Announcements = Announcements(
            self._entries, after._announcements if after is not None else None
        )
        self.hook: CommHook | None = after.hook if after is not None else None
        self.divisor: int | None = None
        """Instead of the world size, where only some ranks still train."""
        self._last: _Step | None = None
        self._report: StepReport | None = None

    @property
    def report(self) -> StepReport | None:
        """Of the last step that ended well; on a GPU, waits for it.

        None before the first, and on a GPU if it was captured or a communication hook took part.
        """
        if self._last is not None:
            self._report, self._last = self._describe(self._last), None
        return self._report

    @property
    def buckets(self) -> Sequence[Bucket]:
        """In the order in which they are launched."""
        return self._buckets

    @property
    def steps(self) -> int:
        """How many steps have begun."""
        return self._steps

    @property
    def bucket_bytes(self) -> list[int]:
        """Bytes of gradients in each bucket, padding left out."""
        return [sum(entry.parameter.nbytes for entry in bucket.entries) for bucket in self._buckets]

    @property
    def closed(self) -> bool:
        """Whether the group's workspace was closed since."""
        return self._communicator.closed

    @property
    def in_step(self) -> bool:
        """Whether a gradient has become ready since the last step ended."""
        return self._step is not None

    @property
    def expecting(self) -> bool:
        """Whether a synced forward has run and not all buckets were launched since."""
        return self._expecting

    def expect(self, *, training: bool, late: bool = False) -> None:
        """A synced forward has begun, so its backward is expected.

        late: within a backward (reentrant checkpointing), so that its gradients come after those of earlier forwards.
        """
        order = next(_forwards)
        self._forward_order, self._expecting = -order if late else order, True
        if training:
            self._next_number += 1

    def is_captured(self) -> bool:
        """Whether a CUDA graph captures what is launched now."""
        return self._gpu is not None and self._gpu.gpu.is_capturing()

    def announce_wrapping(self, parameters: int) -> None:
        """All ranks make their buckets anew, for so many parameters. Raises MismatchError where one does not."""
        with self._catching_up():
            self._communicator.announce(Wrapping(parameters, self._next_number, self._wrapper))

    def expect_nothing(self) -> None:
        """The forward before the next backward was not synced."""
        self._expecting = False

    def begin(self, backward: Backward) -> None:
        """Begin a step, unless it has begun: all its buckets will be launched, with gradients or without."""
        if self._step is None:
            self._look_for_sharers()
            sizes = [len(bucket.entries) for bucket in self._buckets]
            arrived = [[False] * size for size in sizes]
            sources: list[dict[int, torch.Tensor]] = [{} for _ in sizes]
            early = (self._expecting and not self._held_in_vain) or len(self._group_mates) == 1
            on_gpu = GpuStep(self._gpu, backward.started) if self._gpu is not None else None
            self._step = _Step(
                self._next_number, self._steps, backward.run, early, backward.started, sizes, arrived, sources, on_gpu
            )
            self._next_number += 1
            self._steps += 1
            self._held_in_vain = False

    def ready(self, bucket: int, position: int) -> None:
        """In a step, the gradient of entry `position` of `bucket` is complete: take it, and launch what can go.

        Raises RuntimeError if it comes a second time in one backward.
        """
        assert self._step is not None
        step, entry = self._step, self._buckets[bucket].entries[position]
        if self._announcements and self._announcements.settle(entry):
            if not self._announcements:
                self._advance(step)
            return
        if step.arrived[bucket][position]:
            raise twice(entry)
        if self._shared and id(entry) in self._shared:
            entry.view.copy_(self._dense_grad(entry))  # now: it may lie in a bucket that is reduced before this one
            step.taken.add(id(entry))
        if step.count == 0 and entry.name not in self._coming:
            self._coming[entry.name] = None
        self._arrive(step, bucket, position, entry)

    def announced(self, bucket: int, position: int, grad: torch.Tensor, *, probably_all: bool) -> None:
        """In a step, a compiled backward has computed `grad` for an entry: see `Announcements.announce`.

        Raises RuntimeError if another was taken already.
        """
        assert self._step is not None
        step, entry = self._step, self._buckets[bucket].entries[position]
        if step.count == 0:
            self._coming.pop(entry.name, None)
            self._coming[entry.name] = None
        if id(entry) in self._shared or (step.arrived[bucket][position] and entry not in self._announcements):
            return  # `ready` deals with it
        if self._announcements.announce(entry, grad, probably_all=probably_all):
            step.taken.add(id(entry))
            self._arrive(step, bucket, position, entry)

    def _arrive(self, step: _Step, bucket: int, position: int, entry: Entry) -> None:
        """A gradient is there, to be taken or taken already."""
        if step.on_gpu is not None:
            step.on_gpu.produced()
        if recording():
            self.track.mark("gradient ready", time.perf_counter(), parameter=entry.name, bucket=bucket)
        step.arrived[bucket][position] = True
        step.waiting_for[bucket] -= 1
        if step.waiting_for[bucket] == 0:
            self._advance(step)

    def finish(self) -> list[str]:
        """End the step: launch the rest, wait for everything, hand out the averaged gradients.

        Returns the names of the parameters that had no gradient on some rank: the same list on every rank, but that on
        a GPU a rank which had all of its own finds out later (see `late_elsewhere`). Raises what went wrong in a
        launch.
        """
        assert self._step is not None
        step = self._step
        self._announcements.settle_all()
        for _, scheduler in self._in_turn(step):
            scheduler._launch_rest()
        for mate in self._group_mates:
            if mate._step is None and mate._expecting and mate._forward_order > self._forward_order:
                mate._held_in_vain = True
        with self._catching_up():
            self._end(step)
        missing = self._hand_out(step)
        if step.count == 0:
            self.order = list(self._coming)
        step.sources.clear()  # they may be freed, now that the producing streams wait for the launches
        self._last = step
        if recording():
            self._trace(step)
        return missing

    def late_elsewhere(self) -> list[str]:
        """On a GPU: what `finish` would have told of earlier steps, had the other ranks' flags been there already."""
        late = [0] * len(self._entries)
        if self._gpu is not None and not self._gpu.gpu.is_capturing():
            while self._flags_on_the_way and (flags := self._flags_on_the_way[0].read()) is not None:
                self._flags_on_the_way.popleft()
                late_then, _, partial = count(flags)
                self._refuse(partial)
                late = [a + b for a, b in zip(late, late_then, strict=True)]
        return self._late(late)

    def shadow(self) -> None:
        """Take part in a step of the other ranks with gradients of zero, which no rank misses."""
        self.expect(training=True)
        sizes = [len(bucket.entries) for bucket in self._buckets]
        arrived = [[True] * size for size in sizes]
        on_gpu = GpuStep(self._gpu, time.perf_counter()) if self._gpu is not None else None
        step = _Step(
            self._next_number, self._steps, -1, True, time.perf_counter(), sizes, arrived, [{} for _ in sizes], on_gpu
        )
        self._step = step
        self._next_number += 1
        self._steps += 1
        for bucket in self._buckets:
            bucket.flat.zero_()
        self._buckets[-1].flags[1].fill_(self._divided_by)  # that this rank holds none decides nothing
        self._flags_clear = True
        while len(step.works) < len(self._buckets):
            self._launch(step, takes=False)
        with self._catching_up():
            self._end(step)
        self._flags_clear = False

    def let_launches_end(self) -> None:
        """What was launched in the step has ended afterwards, well or not; on a GPU, for the current stream.

        A `.grad` that was set aside comes back.
        """
        if self._step is not None:
            self._announcements.withdraw()
            self._communicator.settle()
            if self._step.on_gpu is not None:
                self._step.on_gpu.join(self._step.works)

    def abandon(self) -> None:
        """Forget a step that an exception in backward cut short, once its launches have ended.

        Raises what went wrong in one of them.
        """
        if self._step is not None:
            with self._catching_up():
                self._end(self._step)

    def _end(self, step: _Step) -> None:
        """Wait for all launches of the step, then forget it. Raises what went wrong in the first that failed.

        If the wait is interrupted, launches go on: then the step stays, for `abandon` to wait for them.
        """
        self._communicator.settle()
        self._step, self._expecting = None, False
        self._announcements.withdraw()
        if step.on_gpu is not None:
            step.on_gpu.release(step.works)
        for work in step.works:
            work.wait()
        if step.flags_work is not None:
            step.flags_work.wait()

    @contextmanager
    def _catching_up(self) -> Iterator[None]:
        """After a mismatch the next step gets a number that no rank has used."""
        try:
            yield
        except MismatchError as error:
            self._next_number = max(self._next_number, error.latest_step + 1)
            raise

    def _in_turn(self, step: _Step) -> list[tuple[_Step, Scheduler]]:
        """The steps in the same backward with their schedulers, this one too, in the order in which they launch."""
        partners = (s for s in self._group_mates if s._step is not None and s._step.run == step.run)
        return sorted(
            ((s._step, s) for s in partners if s._step is not None),
            key=lambda pair: (not pair[0].early, -pair[1]._forward_order, pair[1]._wrapper),
        )

    def _advance(self, step: _Step) -> None:
        """Launch the buckets whose gradients are all there, if it is this scheduler's turn."""
        if not step.early or any(mate._holds_back(self) for mate in self._group_mates):
            return
        while len(step.works) < len(self._buckets) and step.waiting_for[len(step.works)] == 0:
            if self._is_shared(self._buckets[len(step.works)]):
                return
            if self._announcements and len(step.works) == len(self._buckets) - 1:
                return  # its flags tell whether what was announced was all
            self._launch(step)
        if self._expecting and len(step.works) == len(self._buckets):
            self._expecting = False
            for other_step, scheduler in self._in_turn(step):
                scheduler._advance(other_step)

    def _holds_back(self, other: Scheduler) -> bool:
        return self._expecting and not self._held_in_vain and self._forward_order > other._forward_order

    def _is_shared(self, bucket: Bucket) -> bool:
        """Whether another wrapper that is in a backward, or expects one, may still read a gradient of the bucket."""
        return bool(self._shared) and any(
            user is not self and (user._expecting or user._step is not None)
            for entry in bucket.entries
            if id(entry) in self._shared
            for user in self._sharers[id(entry.parameter)]
        )

    def _look_for_sharers(self) -> None:
        """Looks anew where a wrapper was made since."""
        if self._shared_as_of != _made[0]:
            self._shared_as_of = _made[0]
            self._shared = {id(e) for e in self._entries if len(self._sharers[id(e.parameter)]) > 1}

    def _launch_rest(self) -> None:
        """At the end of backward: launch what has not been launched, with or without gradients."""
        step = self._step
        assert step is not None
        if step.ended:
            return
        self._expecting = False
        step.ended = time.perf_counter()
        if step.on_gpu is not None:
            step.on_gpu.end()
        while len(step.works) < len(self._buckets):
            self._launch(step)

    def _take(self, step: _Step, index: int) -> None:
        """Bring a bucket's gradients into it, but those that autograd accumulated there or the engine reads elsewhere.

        None counts as zero. What autograd owns is read and never written: other gradients may share its memory.
        """
        if step.on_gpu is not None:
            step.on_gpu.gather()
        views, grads = [], []
        for entry in self._buckets[index].entries:
            grad = entry.parameter.grad
            if id(entry) in step.taken or grad is entry.view:
                continue
            if grad is None:
                entry.view.zero_()
                continue
            grad = self._dense_grad(entry)
            alone = id(entry) not in self._shared
            if self._engine == "triton" and alone and self.hook is None and grad.numel() >= READ_IN_PLACE:
                source = entry.in_place(grad)
                if source is not None:
                    step.sources[index][entry.offset] = source
                    continue
            views.append(entry.view)
            grads.append(grad)
        if views:
            with torch.no_grad():
                torch._foreach_copy_(views, grads)  # thousands of small ones at once

    def _dense_grad(self, entry: Entry) -> torch.Tensor:
        grad = entry.parameter.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise ValueError(f"the gradient of parameter {entry.name} is sparse: use sparse=False in its embedding")
        return grad.detach()

    def _launch(self, step: _Step, *, takes: bool = True) -> None:
        index = len(step.works)
        if takes:
            self._take(step, index)
        bucket, is_last = self._buckets[index], index == len(self._buckets) - 1
        if is_last:
            self._write_flags(step)
        launch = self._bucket_launch(step, index)
        step.launches.append(launch)
        if self.hook is not None:
            future = self.hook.hook(self.hook.state, GradBucket(bucket, index, is_last=is_last))
            step.works.append(HookWork(bucket, launch.label, future))
            if is_last:
                step.flags_work = self._submit(step, self._flags_launch(step), bucket.flags.view(-1), ())
            return
        sources = [Source(start, tensor) for start, tensor in sorted(step.sources[index].items())]
        step.works.append(self._submit(step, launch, bucket.flat, sources))

    def _submit(self, step: _Step, launch: Launch, flat: torch.Tensor, sources: Sequence[Source]) -> Work:
        return self._communicator.submit(
            launch,
            flat,
            result=flat,
            timeout=self._config.timeout,
            sources=sources,
            batch=step.batch,
            after=step.on_gpu.producers if step.on_gpu is not None else (),
        )

    def _write_flags(self, step: _Step) -> None:
        """Before the last bucket is launched: which gradients have not arrived here, and which are not there at all.

        In most steps no rank sets a flag; so they are clear already, and stay so.
        """
        late = [not arrived for bucket in step.arrived for arrived in bucket]
        self.late_here = self._late(late)
        flags = self._buckets[-1].flags
        if any(late) or self._announcements.partial:
            partial = [id(entry) in self._announcements.partial for entry in self._entries]
            empty = [is_late and e.parameter.grad is None for is_late, e in zip(late, self._entries, strict=True)]
            step.partial = any(partial)
            if step.on_gpu is not None and step.on_gpu.captured:
                names = ", ".join(self._late(late)) or "what was computed in several parts"
                raise RuntimeError(f"a CUDA graph cannot capture a backward that leaves {names} without gradients")
            flags.copy_(flags.new_tensor([late, empty, partial])).mul_(self._divided_by)
        elif not self._flags_clear:
            flags.zero_()
        self._flags_clear = False  # until `_hand_out` sees the other ranks'

    def _bucket_launch(self, step: _Step, index: int) -> Launch:
        flat = self._buckets[index].flat
        return Launch(
            kind="all_reduce",
            algorithm=self._communicator.resolve(self._config.algorithm, flat.nbytes, flat.device),
            elements=flat.numel(),
            dtype=dtype_name(flat.dtype),
            wire=dtype_name(self._config.wire or flat.dtype),
            factor=scale_factor("avg", None, self._divided_by, flat.dtype),
            engine=self._engine,
            wrapper=self._wrapper,
            step=step.number,
            bucket=index,
        )

    @property
    def _divided_by(self) -> int:
        return self.divisor or self._communicator.world_size

    def _flags_launch(self, step: _Step) -> Launch:
        """The flags by themselves, after a hook has had the gradients of the last bucket."""
        launch = self._bucket_launch(step, len(self._buckets) - 1)
        flags = self._buckets[-1].flags
        algorithm = self._communicator.resolve(self._config.algorithm, flags.nbytes, flags.device)
        return replace(launch, algorithm=algorithm, elements=flags.numel(), bucket=len(self._buckets))

    def _hand_out(self, step: _Step) -> list[str]:
        """`.grad` becomes the bucket's average, unless no rank had one. Names the entries that lacked it somewhere."""
        for bucket in self._buckets:
            torch.autograd.graph.increment_version(bucket.flat)
        if self._gpu is not None and all(map(all, step.arrived)) and not step.partial:
            # Nothing here depends on the flags, so the host does not wait for them.
            if step.on_gpu is not None and not step.on_gpu.captured:
                self._flags_on_the_way.append(FlagsOnTheWay(self._gpu, self._buckets[-1]))
            self._set_grads(self._entries)
            return []
        late, empty, partial = count(self._buckets[-1].flags)
        self._flags_clear = not any(late) and not any(empty) and not any(partial)
        if any(empty):
            world = self._communicator.world_size
            self._set_grads(e for e, ranks in zip(self._entries, empty, strict=True) if ranks < world)
        else:
            self._set_grads(self._entries)
        self._refuse(partial)
        return self._late(late)

    def _refuse(self, partial: Sequence[int]) -> None:
        if any(partial):
            raise more_than_announced(self._late(partial))

    def _late(self, flags: Sequence[int]) -> list[str]:
        return (
            [] if not any(flags) else [entry.name for entry, ranks in zip(self._entries, flags, strict=True) if ranks]
        )

    def _set_grads(self, entries: Iterable[Entry]) -> None:
        if self._grad_is_view:
            for entry in entries:
                entry.parameter.grad = entry.view
            return
        for entry in entries:
            parameter = entry.parameter
            if entry.own is not None and parameter.grad is entry.own:
                entry.own.copy_(entry.view)
            else:  # what autograd put there may share its memory with another gradient
                parameter.grad = entry.own = entry.view.clone()

    def _describe(self, step: _Step) -> StepReport | None:
        if step.on_gpu is None:
            ended, times = step.ended, [(work.outcome.started, work.ended) for work in step.works]
        elif step.on_gpu.captured or self.hook is not None:
            return None  # nobody has taken the GPU's times
        else:
            ended, times = step.on_gpu.times(step.works)
        launches = tuple(
            LaunchReport(launch.bucket, self._buckets[launch.bucket].flat.nbytes, launch.algorithm, *when)
            for launch, when in zip(step.launches, times, strict=True)
        )
        return StepReport(
            step.started,
            ended,
            tuple(BucketReport(b.flat.nbytes, tuple(e.name for e in b.entries)) for b in self._buckets),
            launches,
            max(0.0, max(launch.end for launch in launches) - ended),
            overlapped_fraction(launches, step.started, ended),
        )

    def _trace(self, step: _Step) -> None:
        """Spans of the step that has just ended. On a GPU that takes its report, and so waits for it."""
        ended, over = step.ended, time.perf_counter()
        if step.on_gpu is not None:
            report = self.report
            if report is None:
                return
            ended = report.backward_end
            over = ended + report.exposed_wait
            for launch, told in zip(step.launches, report.launches, strict=True):
                self._communicator.trace_launch(launch, told.start, told.end)
        self.track.span(BACKWARD, step.started, ended, step=step.count)
        self.track.span(WAIT, ended, over, step=step.count)


_schedulers: WeakKeyDictionary[Communicator, WeakSet[Scheduler]] = WeakKeyDictionary()
_users: MutableMapping[torch.nn.Parameter, WeakSet[Scheduler]] = WeakIdKeyDictionary()
_forwards = itertools.count(1)
_made = [0]
"""How many schedulers there have been."""
