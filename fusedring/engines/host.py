"""The host engine: executes a plan with torch operations on shared memory, one process per rank.

Ranks read and write each other's tensors in place. A tensor outside the workspace travels through its rank's staging
slot, a *window* at a time: the same range of every span for all ranks, whether staged or not. Every window is an epoch:

1. copy in (staged ranks), then meet; the first meeting shows that all ranks launch the same, before any write;
2. the algorithm;
3. post DONE and wait for it: nobody reads or writes this rank's memory any more; copy out (staged ranks).

The ring. Rank r takes what rank r-1 has ready, adds its own contribution, and leaves the partial sum where its own
contribution lay, narrowed to the wire. So the ring needs no slots: a contribution is used up by the hop that overwrites
it, and a partial sum is overwritten only by the finished segment, which came round through its one reader. Steps are
the outer loop and chunks the inner one: what a chunk waits for was posted a whole segment ago.

one_shot. Contributions always travel through slots, which alternate by epoch, and each rank writes only its own tensor:
meeting is all the synchronisation it needs, which is what makes it fast for small tensors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import torch

from fusedring.config import torch_dtype
from fusedring.engines.arithmetic import CHUNK_ELEMENTS, Arithmetic
from fusedring.engines.work import Work
from fusedring.plan.launch import Launch, Outcome
from fusedring.plan.plan import ALIGNMENT, COLLECTING, Plan, Span, cut_into_windows, make_plan
from fusedring.plan.policy import Rule
from fusedring.transport import agreement
from fusedring.transport.gpu import Stream
from fusedring.transport.source import Location, Source
from fusedring.transport.workspace import Workspace

DONE: Final = (1 << 32) - 1
"""The last point of every epoch."""


class HostEngine:
    """Runs launches on one workspace, one after another."""

    name = "host"
    in_caller = False
    reads_in_place = False
    tells_values = False
    tells_more = True
    gpu = None

    def __init__(self, workspace: Workspace, rules: Sequence[Rule]) -> None:
        self.rules = rules
        self._workspace = workspace
        self._arithmetics: dict[tuple[str, str], Arithmetic] = {}

    def work(self, result: torch.Tensor, label: str) -> Work:
        """As `Engine.work`."""
        return Work(result, label)

    @torch.no_grad()
    def start(
        self,
        launch: Launch,
        tensor: torch.Tensor,
        *,
        timeout: float,
        sources: Sequence[Source] = (),
        after: Sequence[Stream] = (),
    ) -> Outcome:
        """Execute `launch` on this rank's `tensor`, in place: one-dimensional, contiguous, in host memory.

        sources: must be empty, since this engine reads what it reduces in `tensor` itself.

        Raises MismatchError, with nothing written, if the ranks' launches differ, and whatever `Workspace.wait` raises.
        """
        assert not sources
        workspace = self._workspace
        plan = make_plan(launch.kind, launch.algorithm, workspace.world_size, launch.elements)
        job = _Job(workspace, plan, launch, tensor, self._arithmetic(launch.dtype, launch.wire), timeout)
        here = None if job.exchanges_slots else workspace.locate(tensor)
        windows = job.windows(staged=here is None)
        if here is None:
            job.copy_in(windows[0])
        headers = workspace.meet(agreement.pack(launch, here), timeout=timeout)
        started = time.perf_counter()
        locations = agreement.agree(headers)
        if here is not None and None in locations:
            windows = job.windows(staged=True)
        job.locations = locations
        for number, window in enumerate(windows):
            if number > 0:
                if here is None:
                    job.copy_in(window)
                workspace.meet(b"", timeout=timeout)
            job.perform(window)
            if here is None and not job.exchanges_slots:
                job.copy_out(window)
        return Outcome(started, more=agreement.anybody_has_more(headers))

    def settle(self) -> None:
        """What was started has ended."""

    def close(self) -> None:
        """As `Engine.close`."""
        self._arithmetics.clear()

    def abandon(self) -> None:
        """The workspace tells the other ranks."""

    def _arithmetic(self, dtype: str, wire: str) -> Arithmetic:
        if (dtype, wire) not in self._arithmetics:
            self._arithmetics[dtype, wire] = Arithmetic(torch_dtype(dtype), torch_dtype(wire))
        return self._arithmetics[dtype, wire]


class _Job:
    """One launch at one rank: which memory belongs to whom in a window, and the algorithms on it."""

    def __init__(
        self,
        workspace: Workspace,
        plan: Plan,
        launch: Launch,
        tensor: torch.Tensor,
        arithmetic: Arithmetic,
        timeout: float,
    ) -> None:
        self.workspace, self.plan, self.launch, self.tensor = workspace, plan, launch, tensor
        self.arithmetic, self.timeout = arithmetic, timeout
        self.locations: Sequence[Location | None] = ()
        self.exchanges_slots = any(step.phase == "exchange" for step in plan.steps)
        whole = bool(plan.steps) and all(t.segment is None for step in plan.steps for t in step.transfers)
        self.spans: tuple[Span, ...] = ((0, plan.elements),) if whole else plan.parts
        slot_elements = workspace.slot_bytes // tensor.itemsize
        self.capacity = slot_elements // len(self.spans) // ALIGNMENT * ALIGNMENT

    # Windows and places

    def windows(self, *, staged: bool) -> list[tuple[Span, ...]]:
        """The ranges of all spans, window by window; without staged ranks everything is one window."""
        longest = max(stop - start for start, stop in self.spans)
        if not staged or longest <= self.capacity:
            return [self.spans]
        return cut_into_windows(self.spans, self.capacity)

    def slot_piece(self, rank: int, epoch: int, span: int, elements: int) -> torch.Tensor:
        base = self.workspace.slot(rank, epoch % 2).view(self.tensor.dtype)
        return _cut(base, span * self.capacity, span * self.capacity + elements)

    def piece(self, window: tuple[Span, ...], rank: int, span: int) -> torch.Tensor:
        """The memory where the other ranks find `rank`'s share of a span."""
        start, stop = window[span]
        location = self.locations[rank]
        if location is None:
            return self.slot_piece(rank, self.workspace.epoch, span, stop - start)
        if rank == self.workspace.rank:
            return _cut(self.tensor, start, stop)
        size = self.tensor.itemsize
        place = Location(location.arena, location.offset + start * size)
        return self.workspace.bytes_at(rank, place, (stop - start) * size).view(self.tensor.dtype)

    def copy_in(self, window: tuple[Span, ...]) -> None:
        """Before the meeting of the next epoch, this rank's share goes to its slot of that epoch."""
        for span, (start, stop) in enumerate(window):
            slot = self.slot_piece(self.workspace.rank, self.workspace.epoch + 1, span, stop - start)
            _copy(slot, _cut(self.tensor, start, stop))

    def copy_out(self, window: tuple[Span, ...]) -> None:
        for span, (start, stop) in enumerate(window):
            if self.launch.kind != "reduce_scatter" or span == self.workspace.rank:
                slot = self.slot_piece(self.workspace.rank, self.workspace.epoch, span, stop - start)
                _copy(_cut(self.tensor, start, stop), slot)

    # Algorithms

    def perform(self, window: tuple[Span, ...]) -> None:
        workspace = self.workspace
        if self.plan.algorithm == "ring" and workspace.world_size > 1:
            self.ring(window)
        elif self.launch.kind == "all_gather":
            self.hand_out(window)
        else:
            self.sum_directly(window)
        if not self.exchanges_slots:
            workspace.post(DONE)
            workspace.wait(range(workspace.world_size), DONE, timeout=self.timeout)

    def sum_directly(self, window: tuple[Span, ...]) -> None:
        """Sum the spans that the plan brings together here, and write each sum to everyone who is to have it."""
        rank, plan, chunks_done = self.workspace.rank, self.plan, 0
        if plan.world_size == 1 and self.arithmetic.lossless and self.launch.factor == 1.0:
            return  # a lone rank's contribution is the sum
        for span, (start, stop) in enumerate(window):
            if not plan.sums(rank, span):
                continue
            receivers = plan.receivers(rank, span)
            if self.launch.kind == "all_reduce" or not receivers:
                receivers += (rank,)
            sources = [_chunks(self.piece(window, r, span)) for r in range(plan.world_size)]
            whole = self.exchanges_slots
            targets = [_chunks(_cut(self.tensor, start, stop))] if whole else [sources[r] for r in receivers]
            for source, target in zip(zip(*sources, strict=True), zip(*targets, strict=True), strict=True):
                self.arithmetic.sum_to(target, source, self.launch.factor)
                chunks_done += 1
                self.show_progress(chunks_done)

    def hand_out(self, window: tuple[Span, ...]) -> None:
        """Copy the spans that the plan hands out from here; their owners keep the same rounded values."""
        rank, plan, chunks_done = self.workspace.rank, self.plan, 0
        for span in range(len(window)):
            owner, receivers = plan.owner(span), {rank, *plan.receivers(rank, span)}
            if len(receivers) < plan.world_size:
                continue
            if self.arithmetic.lossless:
                receivers.remove(owner)
            source = _chunks(self.piece(window, owner, span))
            targets = [_chunks(self.piece(window, r, span)) for r in sorted(receivers)]
            for at, chunk in enumerate(source):
                self.arithmetic.narrow_to([target[at] for target in targets], chunk)
                chunks_done += 1
                self.show_progress(chunks_done)

    def ring(self, window: tuple[Span, ...]) -> None:
        """All steps of the ring. Point i·C + c + 1 of the epoch: chunk c of round i is ready for the next rank."""
        rank, plan, arithmetic, factor = self.workspace.rank, self.plan, self.arithmetic, self.launch.factor
        previous = (rank - 1) % plan.world_size
        chunks_per_span = max(-(-(stop - start) // CHUNK_ELEMENTS) for start, stop in window)
        mine = [_chunks(self.piece(window, rank, span)) for span in range(plan.world_size)]
        theirs = [_chunks(self.piece(window, previous, span)) for span in range(plan.world_size)]
        rounds = 0
        if plan.kind == "all_gather" and not arithmetic.lossless:
            for at in range(chunks_per_span):  # the owner keeps what the others will get
                if at < len(mine[rank]):
                    arithmetic.narrow_to([mine[rank][at]], mine[rank][at])
                self.workspace.post(at + 1)
            rounds = 1
        last_hop = plan.world_size - 2
        for hop, step in enumerate(plan.steps):
            span = plan.owner(step.into(rank).segment or 0)
            for at in range(chunks_per_span):
                if rounds > 0:
                    ready = (rounds - 1) * chunks_per_span + at + 1
                    self.workspace.wait((previous,), ready, timeout=self.timeout)
                if at < len(mine[span]):
                    own, arrived = mine[span][at], theirs[span][at]
                    if step.phase not in COLLECTING:
                        own.copy_(arrived)
                    else:
                        target = own if hop == last_hop else arithmetic.partial(own)
                        if hop == 0:
                            arithmetic.first_hop(target, arrived, own, factor)
                        else:
                            arithmetic.hop(target, arithmetic.partial(arrived), own, factor)
                self.workspace.post(rounds * chunks_per_span + at + 1)
            rounds += 1

    def show_progress(self, chunks_done: int) -> None:
        """Keeps the others' timeouts from running while this rank works; nobody sleeps on these points."""
        self.workspace.post(chunks_done, wake=False)


def _cut(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """tensor[start:stop]. A view costs as much as copying a small tensor does, so none is made of all of it."""
    return tensor if stop - start == tensor.numel() else tensor[start:stop]


def _chunks(piece: torch.Tensor) -> tuple[torch.Tensor, ...]:
    elements = piece.numel()
    if elements > CHUNK_ELEMENTS:
        return torch.split(piece, CHUNK_ELEMENTS)
    return (piece,) if elements else ()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    for to, chunk in zip(_chunks(target), _chunks(source), strict=True):
        to.copy_(chunk)
