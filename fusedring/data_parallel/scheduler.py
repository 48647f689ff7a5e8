"""When what is launched: gradients become ready in any order, buckets are launched in one fixed order on all ranks.

A *step* is one synced backward. Its buckets are launched while backward runs, each once its gradients and all earlier
buckets are there and it is the wrapper's turn (see `turns`); the end of backward launches the rest, whether or not
every gradient came, so that all ranks always launch the same things. Behind the buckets come the flags, in which a rank
that missed a gradient says so. A compiled backward announces gradients long before they are in `.grad`; then they count
as ready. A launch carries the step's number: a rank that lost a step is found, not paired with the wrong one.

Steps are numbered by what all ranks have in common: a forward in training counts, and so does a backward. So a rank
whose forward, loss or backward failed is ahead of or behind the others, and found.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fusedring.config import RingConfig
from fusedring.data_parallel import step_report
from fusedring.data_parallel.announcements import Announcements, refuse, twice
from fusedring.data_parallel.buckets import Bucket, Entry
from fusedring.data_parallel.flags import Flags
from fusedring.data_parallel.reduction import Averages, HookedAverages, Launcher, Reduction
from fusedring.data_parallel.sharing import SharedParameters
from fusedring.data_parallel.step import Step
from fusedring.data_parallel.step_on_gpu import StepOnGpu
from fusedring.data_parallel.step_report import Results
from fusedring.data_parallel.turns import Turn, turns_of
from fusedring.data_parallel.user_hook import CommHook
from fusedring.errors import MismatchError
from fusedring.group.communicator import Communicator
from fusedring.observe.tracing import Track, recording
from fusedring.transport.agreement import NewBuckets


class StepNumbers:
    """next: that of the next step, the same on all ranks that lost none. begun: how many steps this wrapper began."""

    def __init__(self) -> None:
        self.next = self.begun = 0

    @contextmanager
    def catching_up(self) -> Iterator[None]:
        """After a mismatch the next step gets a number that no rank has used."""
        try:
            yield
        except MismatchError as error:
            self.next = max(self.next, error.latest_step + 1)
            raise


class Scheduler:
    """Drives the buckets of one wrapper through its group's communicator.

    flags: memory for them, as `Flags` says. knows_norm: whether the buckets hold all gradients of the module. after:
    the scheduler that the wrapper had before, when it had other buckets.
    """

    def __init__(
        self,
        communicator: Communicator,
        buckets: Sequence[Bucket],
        flags: torch.Tensor,
        config: RingConfig,
        *,
        grad_is_view: bool,
        knows_norm: bool = True,
        after: Scheduler | None = None,
    ) -> None:
        self._communicator, self.buckets = communicator, buckets
        self._entries = [entry for bucket in buckets for entry in bucket.entries]
        engine = communicator.engine_for(
            config.engine, buckets[0].flat.device, channels=config.channels, timeout=config.timeout
        )
        self._gpu = engine.gpu
        if self._gpu is not None:
            for bucket in buckets:  # a step that fails may leave launches behind
                self._gpu.keep(bucket.flat, self._gpu.comm)
        self._turns = turns_of(communicator)
        same_group = after is not None and after._communicator is communicator
        self.numbers: StepNumbers = after.numbers if after is not None and same_group else StepNumbers()
        number = after.turn.number if after is not None and same_group else self._turns.number()
        self.turn: Turn = Turn(number, range(len(buckets)))
        self._turns.join(self)
        self._shared = SharedParameters(self, self._entries)
        self._flags = Flags(flags, self._entries, len(buckets), self._gpu, knows_norm=knows_norm)
        self._launcher = Launcher(communicator, engine, config, number)
        self._averages = Averages(self._launcher, grad_is_view=grad_is_view)
        self.reduction: Reduction = self._averages
        self._announcements: Announcements = Announcements(
            self._entries, after._announcements if after is not None else None
        )
        if after is not None and after.hook is not None:
            self.set_hook(after.hook)
        self.divisor: int | None = None
        """Instead of the world size, where only some ranks still train."""
        self.track = Track(f"FusedRingDDP {number}")
        self.order: list[str] = []
        """The parameters' names as their gradients came in the first step; empty until it has ended."""
        self._coming: dict[str, None] = {}
        self.late_here: list[str] = []
        """The parameters whose gradient did not arrive on this rank in the last step."""
        self.step: Step | None = None
        """The one under way: from the first gradient that becomes ready to the end of backward."""
        self.results = Results(buckets)

    @property
    def closed(self) -> bool:
        """Whether the group's workspace was closed since."""
        return self._communicator.closed

    @property
    def hook(self) -> CommHook | None:
        """The user's, if there is one."""
        return self.reduction.hook if isinstance(self.reduction, HookedAverages) else None

    def set_hook(self, hook: CommHook) -> None:
        """Let the user's hook sum the gradients."""
        self.reduction = HookedAverages(hook, self._launcher, self._averages)

    def is_captured(self) -> bool:
        """Whether a CUDA graph captures what is launched now."""
        return self._gpu is not None and self._gpu.is_capturing()

    # Between steps

    def expect(self, *, training: bool, late: bool = False) -> None:
        """A synced forward has begun, so its backward is expected. late: see `Turn.expect`."""
        self.turn.expect(late=late)
        if training:
            self.numbers.next += 1

    def announce_new_buckets(self, parameters: int) -> None:
        """All ranks make their buckets anew, for so many parameters. Raises MismatchError where one does not."""
        with self.numbers.catching_up():
            self._communicator.announce(NewBuckets(parameters, self.numbers.next, self.turn.number))

    def late_elsewhere(self) -> list[str]:
        """On a GPU: what `finish` would have told of earlier steps, had the other ranks' flags been there already."""
        late = [0] * len(self._entries)
        for told in self.results.arrived() if not self.is_captured() else ():
            refuse(_names_of(self._entries, told.partial))
            late = [a + b for a, b in zip(late, told.late, strict=True)]
        return _names_of(self._entries, late)

    # In a step

    def begin(self, run: int, started: float) -> Step:
        """Begin a step, unless it has begun: all its buckets will be launched, with gradients or without.

        run: the number of the run of autograd's engine. started: when it began.
        """
        if self.step is None:
            self._shared.look()
            self._turns.begin(self.turn, run)
            self.step = self._new_step(started)
        return self.step

    def _new_step(self, started: float) -> Step:
        on_gpu = StepOnGpu(self._gpu, started) if self._gpu is not None else None
        step = Step.begin(self.buckets, self.numbers.next, self.numbers.begun, started, on_gpu)
        self.numbers.next += 1
        self.numbers.begun += 1
        return step

    def ready(self, step: Step, bucket: int, position: int) -> None:
        """The gradient of entry `position` of `bucket` is complete: take it, and launch what can go.

        Raises RuntimeError if it comes a second time in one backward.
        """
        entry = self.buckets[bucket].entries[position]
        if self._announcements and self._announcements.settle(entry):
            return
        if step.arrived[bucket][position]:
            raise twice(entry)
        if self._shared and entry in self._shared:
            entry.view.copy_(entry.dense_grad())  # now: it may lie in a bucket that is reduced before this one
            step.taken.add(id(entry))
        if step.count == 0 and entry.name not in self._coming:
            self._coming[entry.name] = None
        self._arrive(step, bucket, position, entry)

    def announced(self, step: Step, bucket: int, position: int, grad: torch.Tensor, *, probably_all: bool) -> None:
        """A compiled backward has computed `grad` for an entry: see `Announcements.announce`.

        Raises RuntimeError if another was taken already.
        """
        entry = self.buckets[bucket].entries[position]
        if step.count == 0:
            self._coming.pop(entry.name, None)
            self._coming[entry.name] = None
        if entry in self._shared or (step.arrived[bucket][position] and entry not in self._announcements):
            return  # `ready` deals with it
        if self._announcements.announce(entry, grad, probably_all=probably_all):
            step.taken.add(id(entry))
            self._arrive(step, bucket, position, entry)

    def _arrive(self, step: Step, bucket: int, position: int, entry: Entry) -> None:
        """A gradient is there, to be taken or taken already."""
        if step.on_gpu is not None:
            step.on_gpu.produced()
        if recording():
            self.track.mark("gradient ready", time.perf_counter(), parameter=entry.name, bucket=bucket)
        step.arrived[bucket][position] = True
        step.waiting_for[bucket] -= 1
        if step.waiting_for[bucket] == 0:
            self.advance()

    def advance(self) -> None:
        """Launch the buckets whose gradients are all there, if it is this wrapper's turn."""
        step = self.step
        if step is None or not self._turns.may_launch(self.turn):
            return
        while (index := self.turn.next) is not None and step.waiting_for[index] == 0:
            if self._shared.may_be_read_in(self.buckets[index]):
                return
            self._launch(step, index)
        if self.turn.next is None:
            self._turns.pass_on(self.turn)

    def _launch(self, step: Step, index: int, *, takes: bool = True) -> None:
        """Bucket number `index` has its turn. takes: whether gradients are to be brought into it first."""
        bucket, world_size = self.buckets[index], self.divisor or self._communicator.world_size
        if takes:
            step.take(index, bucket, self._shared, reads_in_place=self.reduction.reads_in_place)
        is_last = self.turn.is_last
        more = is_last and takes and (any(step.waiting_for) or self._announcements.may_be_partial)
        launched = self.reduction.start(step, index, bucket, is_last=is_last, more=more, world_size=world_size)
        step.launched.append(launched)
        self.turn.launched()

    # The end of a step

    def launch_rest(self) -> None:
        """At the end of backward: launch what has not been launched, with or without gradients."""
        step = self.step
        if step is None or step.ended:
            return
        self._announcements.settle_all()
        self.turn.expecting = False
        step.ended = time.perf_counter()
        if step.on_gpu is not None:
            step.on_gpu.end()
        while (index := self.turn.next) is not None:
            self._launch(step, index)

    def _somebody_has_more(self, step: Step) -> bool:
        """Whether flags have to be sent: the values that were learnt, or what some rank said that it has."""
        reduction = self.reduction
        return reduction.tells_values or not reduction.tells_more or step.launched[-1].work.heard_more()

    def launch_flags(self) -> None:
        """Behind all buckets of all wrappers: tell the other ranks what came here, if anybody has to tell something."""
        step = self.step
        if step is None or step.flags is not None:
            return
        late, partial = step.late() if any(step.waiting_for) else [], self._announcements.partial
        self.late_here, step.partial = _names_of(self._entries, late), bool(partial)
        if step.captured and (self.late_here or partial):
            names = ", ".join(self.late_here) or "what was computed in several parts"
            raise RuntimeError(f"a CUDA graph cannot capture a backward that leaves {names} without gradients")
        if self._somebody_has_more(step):
            self._flags.write(late, partial)
            self._send_flags(step)

    def _send_flags(self, step: Step) -> None:
        self._flags.learn(step.launched if self.reduction.tells_values else None)
        step.flags = self._launcher.sum_flags(step, self._flags.vector)

    def finish(self, step: Step) -> list[str]:
        """End the step: launch the rest, wait for everything, hand out the averaged gradients.

        Returns the names of the parameters that had no gradient on some rank: the same list on every rank, but that on
        a GPU a rank which had all of its own finds out later (see `late_elsewhere`). Raises what went wrong in a
        launch.
        """
        self._turns.launch_rest(self.turn)
        with self.numbers.catching_up():
            self._end(step)
        missing = self._hand_out(step)
        if step.count == 0:
            self.order = list(self._coming)
        for sources in step.sources:
            sources.clear()  # they may be freed, now that the producing streams wait for the launches
        if recording():
            report = self.results.report if step.on_gpu is not None else None
            step_report.trace(step, report, self.track, self._communicator)
        return missing

    def shadow(self) -> None:
        """Take part in a step of the other ranks with gradients of zero, which no rank misses."""
        self.expect(training=True)
        self._turns.begin(self.turn, -1)
        step = self.step = self._new_step(time.perf_counter())
        while (index := self.turn.next) is not None:
            self.buckets[index].flat.zero_()
            self._launch(step, index, takes=False)
        if self._somebody_has_more(step):
            self._flags.write_empty()
            self._send_flags(step)
        with self.numbers.catching_up():
            self._end(step)

    def let_launches_end(self) -> None:
        """What was launched in the step has ended afterwards, well or not; on a GPU, for the current stream.

        A `.grad` that was set aside comes back.
        """
        if self.step is not None:
            self._announcements.withdraw()
            self._communicator.settle()
            if self.step.on_gpu is not None:
                self.step.on_gpu.join(self.step.works)

    def abandon(self) -> None:
        """Forget a step that an exception in backward cut short, once its launches have ended.

        Raises what went wrong in one of them.
        """
        if self.step is not None:
            with self.numbers.catching_up():
                self._end(self.step)

    def _end(self, step: Step) -> None:
        """Wait for all launches of the step, then forget it. Raises what went wrong in the first that failed.

        If the wait is interrupted, launches go on: then the step stays, for `abandon` to wait for them.
        """
        self._communicator.settle()
        self.step = None
        self.turn.end()
        self._announcements.withdraw()
        if step.on_gpu is not None:
            step.on_gpu.release(step.works)
        for work in step.works:
            work.wait()

    def _hand_out(self, step: Step) -> list[str]:
        """`.grad` becomes the bucket's average, unless no rank had one. Names the entries that lacked it somewhere."""
        for bucket in self.buckets:
            torch.autograd.graph.increment_version(bucket.flat)
        if self._gpu is not None and not self.late_here and not step.partial:
            # Nothing here depends on the flags, so the host does not wait for them.
            self.reduction.hand_out(self._entries)
            self.results.keep(step, self._flags.send_to_host(self._gpu) if not step.captured else None)
            return []
        told = self._flags.read() if step.flags is not None else self._flags.nothing_told()
        if any(told.empty):
            world = self._communicator.world_size
            self.reduction.hand_out(e for e, ranks in zip(self._entries, told.empty, strict=True) if ranks < world)
        else:
            self.reduction.hand_out(self._entries)
        refuse(_names_of(self._entries, told.partial))
        self.results.keep(step, told)
        return _names_of(self._entries, told.late)


def _names_of(entries: Sequence[Entry], flags: Sequence[int]) -> list[str]:
    """Of the entries whose flag is not 0."""
    return [entry.name for entry, flag in zip(entries, flags, strict=True) if flag] if any(flags) else []
