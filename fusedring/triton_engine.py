"""The triton engine: launches the kernels of fusedring/kernels on a workspace.

Under Triton's interpreter (TRITON_INTERPRET=1), one process per rank, on shared memory: the same kernel source that a
GPU runs, slowly, for tests and for looking at.

A launch is cut into *windows* that fit into the slots, the same range of every segment. Each window is one kernel
launch and one epoch of the regions. The workspace's own meeting comes first, so that ranks which differ are found
before any write.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fusedring import launch as launching
from fusedring.errors import CollectiveTimeoutError, FusedRingError
from fusedring.launch import Launch, Outcome, Source
from fusedring.plan import ALIGNMENT, make_plan
from fusedring.workspace import Workspace

if TYPE_CHECKING:
    from fusedring.kernels.launching import Region, Totals
    from fusedring.kernels.tiles import Run, Table

PARITY_BYTES = 8 << 20
"""Slots of one parity, at each rank."""

CHUNK_BYTES = 64 << 10
"""Wire bytes that are signalled together, at the least: a system-scope release stalls a program for about 1 µs."""

CHANNELS = 2
"""Programs of a launch. The interpreter runs them one after another, so here they are only as many as tests need."""

POLL_SECONDS = 0.5e-3
"""What one look of a waiting kernel takes under the interpreter."""

GRACE_SECONDS = 1.0
"""How long a rank that gave up listens for what others were waiting for, to name the one that stopped."""

_MOST_CHUNKS = 512
_BUCKETS_KEPT = 256


@dataclass(slots=True)
class _Prepared:
    """What is kept of a bucket: where its sources lie, how they are laid out and aligned, and the tiles."""

    places: list[tuple[int, int, int]]
    shape: object
    tables: list[Table]


class TritonEngine:
    """Runs launches on one workspace, one after another."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._memory: torch.Tensor | None = None
        self._words: list[torch.Tensor] = []
        self._region: Region | None = None
        self._totals: Totals | None = None
        self._prepared: dict[Any, _Prepared] = {}

    @torch.no_grad()
    def run(self, launch: Launch, tensor: torch.Tensor, *, timeout: float, sources: Sequence[Source] = ()) -> Outcome:
        """Execute `launch` on this rank's `tensor`, in place: one-dimensional, contiguous, in host memory.

        sources: parts of the tensor that are read elsewhere; only the result is written to `tensor`.

        Raises MismatchError, with nothing written, if the ranks' launches differ, CollectiveTimeoutError naming rank
        and step if a rank makes no progress for about `timeout` seconds; `tensor` is NaN then.
        """
        headers = self._workspace.meet(launching.pack(launch, None), timeout=timeout)
        started = time.perf_counter()
        _, note = launching.agree(headers)
        region, totals = self._open(timeout)
        squares, unbounded = 0.0, False
        if launch.elements:
            for table in self._tables(launch, region, tensor, sources):
                self._kernel(launch)(
                    table,
                    tensor,
                    region,
                    totals,
                    wire=launch.wire,
                    scale=launch.factor if launch.kind != "all_gather" else 1.0,
                    polls=max(1, int(timeout / POLL_SECONDS)),
                )
                self._check_status(launch, region, timeout)
                squares += float(totals.squares.sum())
                unbounded |= bool(totals.unbounded.any())
        return Outcome(started, note, squares, unbounded)

    def _open(self, timeout: float) -> tuple[Region, Totals]:
        """The regions of all ranks; the first launch on all of them gets the memory."""
        if self._region is None or self._totals is None:
            from fusedring.kernels.launching import Region, Totals, region_bytes
            from fusedring.kernels.signals import SIGNALS

            workspace = self._workspace
            nbytes = region_bytes(workspace.world_size, PARITY_BYTES)
            self._memory = workspace.allocate(nbytes, timeout=timeout)
            location = workspace.locate(self._memory)
            assert location is not None
            regions = [workspace.bytes_at(rank, location, nbytes) for rank in range(workspace.world_size)]
            self._words = [memory[: 4 * SIGNALS.value].view(torch.int32) for memory in regions]
            bases = torch.tensor([memory.data_ptr() for memory in regions])
            self._region = Region(bases, workspace.rank, workspace.world_size, PARITY_BYTES, CHANNELS, inline=False)
            self._totals = Totals(torch.zeros(CHANNELS), torch.zeros(CHANNELS, dtype=torch.int32))
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
        from fusedring.kernels.launching import row_bytes
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
        return max(ALIGNMENT, elements // ALIGNMENT * ALIGNMENT)

    def _tables(self, launch: Launch, region: Region, tensor: torch.Tensor, sources: Sequence[Source]) -> list[Table]:
        """The tiles of each window. They are kept; sources that only moved are pointed at, in place."""
        from fusedring.kernels.tiles import Run, alignment

        places = [(source.start, source.tensor.numel(), source.tensor.data_ptr()) for source in sources]
        key = (launch.kind, launch.algorithm, launch.elements, launch.dtype, launch.wire, tensor.data_ptr())
        known = self._prepared.get(key)
        if known is not None and known.places == places:
            return known.tables
        runs = _runs(tensor, sources, Run)
        shape = (tuple(place[:2] for place in places), alignment(runs, tensor))
        if known is None or known.shape != shape:
            if len(self._prepared) >= _BUCKETS_KEPT:
                self._prepared.clear()
            known = self._prepared[key] = _Prepared([], shape, self._build(launch, region, tensor, runs))
        for table in known.tables:
            table.point_at(runs)
        known.places = places
        return known.tables

    def _build(self, launch: Launch, region: Region, tensor: torch.Tensor, runs: list[Run]) -> list[Table]:
        from fusedring.kernels.tiles import Table, block_of

        plan = make_plan(launch.kind, launch.algorithm, region.world, launch.elements)
        span = self._span(launch, region)
        chunk = max(CHUNK_BYTES // launch.wire.itemsize, -(-span * region.world // _MOST_CHUNKS))
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

    def _check_status(self, launch: Launch, region: Region, timeout: float) -> None:
        """Raise if the kernel gave up, with the chain of who waited for whom."""
        from fusedring.kernels.signals import ABORT, TIMED_OUT

        if self._words[region.rank][ABORT.value] == 0:
            return
        report = self._report_of(region.rank, region)
        if report is None:
            raise FusedRingError(
                f"{launch.label}: an earlier launch gave up, the result on rank {region.rank} is NaN. {_REOPEN}"
            )
        code, awaited, step, chunk, epoch = report
        waited = f"waited {timeout:g} s" if code == TIMED_OUT.value else "waited, until another rank gave up,"
        text = (
            f"{launch.label}: rank {region.rank} {waited} for rank {awaited} at step {step} of {launch.algorithm} "
            f"(chunk {chunk}, epoch {epoch})"
        )
        for _ in range(region.world):
            further = self._report_of(awaited, region)
            if further is None:
                text += f"; rank {awaited} stopped without a word"
                break
            text += f"; rank {awaited} waited for rank {further[1]} at step {further[2]}"
            awaited = further[1]
        raise CollectiveTimeoutError(f"{text}. The result on rank {region.rank} is NaN. {_REOPEN}")

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
