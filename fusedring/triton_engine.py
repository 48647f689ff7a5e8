"""The triton engine: launches the kernels of fusedring/kernels on a workspace.

Under Triton's interpreter (TRITON_INTERPRET=1), one process per rank, on shared memory: the same kernel source that a
GPU runs, slowly, for tests and for looking at. One kernel at a time in a process: the interpreter has global state.

A launch is cut into *windows* that fit into the slots, the same range of every segment. Each window is one kernel
launch and one epoch of the regions. The workspace's own meeting comes first, so that ranks which differ are found
before any write.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fusedring import launch as launching
from fusedring.errors import CollectiveTimeoutError, FusedRingError, PeerLostError
from fusedring.launch import Launch, Outcome, Source
from fusedring.plan import ALIGNMENT, make_plan
from fusedring.workspace import Workspace

if TYPE_CHECKING:
    from fusedring.kernels.region import Region, Totals
    from fusedring.kernels.tiles import Run, Table

PARITY_BYTES = 8 << 20
"""Slots of one parity, at each rank."""

CHUNK_BYTES = 64 << 10
"""Wire bytes that are signalled together, at the least: a system-scope release stalls a program for about 1 µs."""

CHANNELS = 2
"""Programs of a launch. The interpreter runs them one after another, so here they are only as many as tests need."""

WATCH_SECONDS = 0.1
"""How often somebody looks whether the rank that a kernel waits for lives."""

GRACE_SECONDS = 1.0
"""How long a rank that gave up listens for what others were waiting for, to name the one that stopped."""

_BUCKETS_KEPT = 256
_MOST_POLLS = (1 << 31) - 1
_LOOKS_MEASURED = 50


@dataclass(slots=True)
class _Prepared:
    """What is kept of a bucket: where its sources lie (start, elements, address), and the tiles of its windows."""

    places: list[tuple[int, int, int]]
    tables: list[Table]


class TritonEngine:
    """Runs launches on one workspace, one after another."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._memory: torch.Tensor | None = None
        self._words: list[torch.Tensor] = []
        self._abort = 0
        self._look_seconds = 0.0
        self._region: Region | None = None
        self._totals: Totals | None = None
        self._prepared: dict[Any, _Prepared] = {}

    @torch.no_grad()
    def run(self, launch: Launch, tensor: torch.Tensor, *, timeout: float, sources: Sequence[Source] = ()) -> Outcome:
        """Execute `launch` on this rank's `tensor`, in place: one-dimensional, contiguous, in host memory.

        sources: parts of the tensor that are read elsewhere; only the result is written to `tensor`.

        Returns when all ranks had come, and what the kernels learnt of the results.

        Raises MismatchError, with nothing written, if the ranks' launches differ; CollectiveTimeoutError naming rank
        and step if a rank makes no progress for about `timeout` seconds, or PeerLostError if it has ended, and then
        `tensor` is NaN; FusedRingError if a kernel of another group is running in this process.
        """
        headers = self._workspace.meet(launching.pack(launch, None), timeout=timeout)
        started = time.perf_counter()
        launching.agree(headers)
        region, totals = self._open(timeout)
        squares, unbounded = 0.0, False
        try:
            with _alone(launch, region.rank):
                for table in self.prepare(launch, tensor, sources) if launch.elements else ():
                    self._run_kernel(launch, table, tensor, region, totals, timeout)
                    squares += float(totals.squares.sum())
                    unbounded |= bool(totals.unbounded.any())
        except BaseException:
            for words in self._words:  # peers wait in a kernel, where nothing else reaches them
                words[self._abort] = 1
            tensor.fill_(math.nan)  # some of it may be reduced, and some not
            raise
        return Outcome(started, squares, unbounded)

    def _run_kernel(
        self, launch: Launch, table: Table, tensor: torch.Tensor, region: Region, totals: Totals, timeout: float
    ) -> None:
        epochs, started = self._epochs(region), time.perf_counter()
        with _Watch(self._workspace, self._words[region.rank]), np.errstate(all="ignore"):
            self._kernel(launch)(
                table,
                tensor,
                region,
                totals,
                wire=launch.wire,
                scale=launch.factor if launch.kind != "all_gather" else 1.0,
                polls=max(1, min(_MOST_POLLS, int(timeout / self._look_seconds))),
            )
        if not torch.equal(self._epochs(region), epochs + 1):  # a channel that is through has counted
            raise self._failure(launch, region, timeout, time.perf_counter() - started)

    def _epochs(self, region: Region) -> torch.Tensor:
        """How many launches each channel has finished."""
        from fusedring.kernels.signals import EPOCHS

        return self._words[region.rank][EPOCHS.value : EPOCHS.value + region.channels].clone()

    def _open(self, timeout: float) -> tuple[Region, Totals]:
        """The regions of all ranks; the first launch on all of them gets the memory."""
        if self._region is None or self._totals is None:
            from fusedring.kernels.region import Region, Totals, region_bytes
            from fusedring.kernels.signals import ABORT, INTERPRETER, SIGNALS

            workspace = self._workspace
            nbytes = region_bytes(workspace.world_size, PARITY_BYTES)
            self._memory = workspace.allocate(nbytes, timeout=timeout)
            location = workspace.locate(self._memory)
            assert location is not None
            regions = [workspace.bytes_at(rank, location, nbytes) for rank in range(workspace.world_size)]
            self._words = [memory[: 4 * SIGNALS.value].view(torch.int32) for memory in regions]
            self._abort = ABORT.value
            bases = torch.tensor([memory.data_ptr() for memory in regions])
            self._region = Region(
                bases, workspace.rank, workspace.world_size, PARITY_BYTES, CHANNELS, INTERPRETER.value
            )
            self._totals = Totals(torch.zeros(CHANNELS), torch.zeros(CHANNELS, dtype=torch.int32))
            self._look_seconds = _seconds_per_look()
        return self._region, self._totals

    def _kernel(self, launch: Launch) -> Any:
        from fusedring.kernels import direct, ring

        scatter, gather = launch.kind != "all_gather", launch.kind != "reduce_scatter"
        if launch.algorithm == "ring":
            return {
                "all_reduce": ring.ring_all_reduce,
                "reduce_scatter": ring.ring_reduce_scatter,
                "all_gather": ring.ring_all_gather,
            }[launch.kind]
        if launch.algorithm == "master":
            return partial(direct.master, scatter=scatter, gather=gather)
        if launch.algorithm == "one_shot" and scatter and gather:
            return direct.one_shot
        return partial(direct.two_shot, scatter=scatter, gather=gather)

    def _row_elements(self, launch: Launch, region: Region) -> int:
        """Elements that a row of slots can hold."""
        from fusedring.kernels.direct import direct_rows
        from fusedring.kernels.region import row_bytes
        from fusedring.kernels.ring import ring_rows

        if launch.algorithm == "ring":
            rows = ring_rows(region.world)
        else:
            rows = direct_rows(launch.algorithm if self._holds_all(launch) else "two_shot", region.world)
        return row_bytes(region, rows) // launch.wire.itemsize

    def _holds_all(self, launch: Launch) -> bool:
        """Whether a row of slots holds the whole bucket, not one segment."""
        return launch.algorithm == "master" or (launch.algorithm == "one_shot" and launch.kind == "all_reduce")

    def _span(self, launch: Launch, region: Region) -> int:
        """Elements of each segment that one window takes."""
        elements = self._row_elements(launch, region)
        if self._holds_all(launch):
            elements //= region.world
        assert elements >= ALIGNMENT, "the slots are too small for so many ranks"
        return elements // ALIGNMENT * ALIGNMENT

    def prepare(self, launch: Launch, tensor: torch.Tensor, sources: Sequence[Source]) -> list[Table]:
        """The tiles of each window. They are kept; where sources only moved, they are pointed at them, in place.

        Only after the first launch, which opens the regions.
        """
        from fusedring.kernels.tiles import Run

        assert self._region is not None
        places = [(source.start, source.tensor.numel(), source.tensor.data_ptr()) for source in sources]
        key = (
            launch.kind,
            launch.algorithm,
            launch.dtype,
            launch.wire,
            launch.elements,
            tensor.data_ptr(),
            tuple((start, elements, address % 16 == 0) for start, elements, address in places),
        )
        known = self._prepared.get(key)
        if known is None:
            if len(self._prepared) >= _BUCKETS_KEPT:
                self._prepared.clear()
            tables = self._build(launch, self._region, tensor, _runs(tensor, sources, Run))
            known = self._prepared[key] = _Prepared(places, tables)
        if known.places != places:
            runs = _runs(tensor, sources, Run)
            for table in known.tables:
                table.point_at(runs)
            known.places = places
        return known.tables

    def _build(self, launch: Launch, region: Region, tensor: torch.Tensor, runs: list[Run]) -> list[Table]:
        from fusedring.kernels.signals import SIGNAL_ROW
        from fusedring.kernels.tiles import Table, block_of

        plan = make_plan(launch.kind, launch.algorithm, region.world, launch.elements)
        span = self._span(launch, region)
        # A row has SIGNAL_ROW signals, for the chunks of all segments.
        chunk = max(CHUNK_BYTES // launch.wire.itemsize, -(-span // (SIGNAL_ROW.value // region.world)))
        chunk = -(-chunk // ALIGNMENT) * ALIGNMENT
        tables = []
        for at in range(0, max(stop - start for start, stop in plan.parts), span):
            segments = [plan.bounds(segment) for segment in range(region.world)]
            segments = [(min(start + at, stop), min(start + at + span, stop)) for start, stop in segments]
            origins = [start for start, _ in segments]
            if self._holds_all(launch):  # the windows of all segments lie one behind the other in a row
                origins = [start - segment * span for segment, (start, _) in enumerate(segments)]
            tables.append(Table(segments, runs, tensor, origins, chunk_elements=chunk, block=block_of(launch.wire)))
        return tables

    def _failure(self, launch: Launch, region: Region, timeout: float, elapsed: float) -> FusedRingError:
        """Why the kernel gave up, with the chain of who waited for whom."""
        from fusedring.kernels.signals import TIMED_OUT

        report = self._report_of(region.rank, region)
        if report is None:
            return FusedRingError(
                f"{launch.label}: another rank, or an earlier launch, gave up before rank {region.rank} began; the "
                f"tensor is NaN. {_REOPEN}"
            )
        code, awaited, step, chunk, epoch = report
        why = f"its timeout is {timeout:g} s" if code == TIMED_OUT.value else "another rank gave up"
        text = (
            f"{launch.label}: rank {region.rank} waited for rank {awaited} at step {step} of {launch.algorithm} (chunk "
            f"{chunk}, epoch {epoch}) and left {elapsed:.1f} s after the launch, because {why}"
        )
        named = {region.rank}
        while awaited not in named:
            named.add(awaited)
            further = self._report_of(awaited, region)
            if further is None and self._workspace.is_lost(awaited):
                return PeerLostError(f"{text}; rank {awaited} has ended. The tensor is NaN. {_REOPEN}")
            if further is None:
                text += f"; rank {awaited} has said nothing"
                break
            text += f"; rank {awaited} waited for rank {further[1]} at step {further[2]}"
            awaited = further[1]
        return CollectiveTimeoutError(
            f"{text}. The tensor is NaN. If a rank was only late, pass a longer timeout. {_REOPEN}"
        )

    def _report_of(self, rank: int, region: Region) -> list[int] | None:
        """What a rank's kernel was waiting for when it gave up: code, awaited rank, step, chunk, epoch.

        A peer that waits has been told to give up by now, and is given a moment to say so.
        """
        from fusedring.kernels.signals import STATUS, STATUS_WORDS

        words = self._words[rank][STATUS.value : STATUS.value + STATUS_WORDS.value * region.channels]
        table = words.view(region.channels, -1)
        until = time.monotonic() + GRACE_SECONDS
        while True:
            reports = [row[:5] for row in table.tolist() if row[0]]
            if reports or time.monotonic() > until:
                return min(reports, default=None)
            time.sleep(0.01)


class _Watch:
    """While a kernel runs, looks whether the rank that it waits for lives, since a kernel sees signals only.

    If that rank has ended and the kernel still waits for the same thing at the next look, nothing more will come, and
    the kernel's abort word is raised.
    """

    def __init__(self, workspace: Workspace, words: torch.Tensor) -> None:
        self._workspace, self._words = workspace, words
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fusedring watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        from fusedring.kernels.signals import ABORT, STATUS, STATUS_WORDS

        size = STATUS_WORDS.value
        table = self._words[STATUS.value : STATUS.value + size * CHANNELS].view(CHANNELS, size)
        before: list[list[int]] = []
        while not self._over.wait(WATCH_SECONDS):
            waits = [row[5:] for row in table.tolist() if row[5] and self._workspace.is_lost(row[5] - 1)]
            if any(wait in before for wait in waits):
                self._words[ABORT.value] = 1
            before = waits


@contextmanager
def _alone(launch: Launch, rank: int) -> Iterator[None]:
    """Refuse to run beside another kernel: waiting could be for ever, if ranks take their groups in other orders."""
    if not _interpreting.acquire(blocking=False):
        raise FusedRingError(
            f"{launch.label}: rank {rank} runs a kernel of another group, and Triton's interpreter runs one at a time "
            "in a process. Wait for it before launching on this group, or use engine='host'"
        )
    try:
        yield
    finally:
        _interpreting.release()


def _seconds_per_look() -> float:
    """What one look of a waiting kernel takes here and now."""
    from fusedring.kernels.signals import look

    words = torch.zeros(16, dtype=torch.int32)
    look[(1,)](words.data_ptr(), 1)
    start = time.perf_counter()
    look[(1,)](words.data_ptr(), _LOOKS_MEASURED)
    return (time.perf_counter() - start) / _LOOKS_MEASURED


_interpreting = threading.Lock()
"""Triton's interpreter keeps its state in the process, so that only one kernel can run at a time."""

_REOPEN = "Call fusedring.close() on all ranks of the group before its next collective"


def _runs(tensor: torch.Tensor, sources: Sequence[Source], make: Any) -> list[Any]:
    """The sources, and between them the tensor itself."""
    runs, at = [], 0
    for source in sources:
        if source.start > at:
            runs.append(make(at, tensor[at : source.start]))
        runs.append(make(source.start, source.tensor))
        at = source.start + -(-source.tensor.numel() // ALIGNMENT) * ALIGNMENT
    if at < tensor.numel():
        runs.append(make(at, tensor[at:]))
    return runs
