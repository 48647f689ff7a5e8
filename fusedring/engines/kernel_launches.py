"""How a launch becomes kernels: cut into windows that fit into the slots, each with its tables.

A *window* is the same range of every segment. Each is one kernel launch, and one epoch of the regions. Building tables
takes milliseconds, so those of a bucket are kept; where only its gradients have moved, they are pointed at them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusedring.config import torch_dtype
from fusedring.kernels import direct, ring
from fusedring.kernels.layout import SIGNAL_ROW, direct_rows, ring_rows, row_bytes
from fusedring.kernels.prepared import How, Prepared
from fusedring.kernels.region import Region, Totals
from fusedring.kernels.tables import Run, Table, block_of
from fusedring.plan.launch import Launch
from fusedring.plan.plan import ALIGNMENT, cut_into_windows, make_plan
from fusedring.transport.source import Source

CHUNK_BYTES = 64 << 10
"""Wire bytes that are signalled together, at the least: a system-scope release stalls a program for about 1 µs."""

_BUCKETS_KEPT = 256

Write = Callable[[torch.Tensor, torch.Tensor], None]
"""write(target, values): give `target`, on the device, these values, in the order of what is launched."""


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One window of a launch: its tables, its kernel, and what that learns of the values that it completes."""

    table: Table
    totals: Totals
    kernel: Prepared


@dataclass(slots=True)
class _Kept:
    """addresses: where the sources of a bucket lie."""

    addresses: list[int]
    windows: list[KernelLaunch]


class KernelLaunches:
    """The kernels of all launches on one rank's region. write: how tables reach the device."""

    def __init__(self, region: Region, write: Write) -> None:
        self._region, self._write = region, write
        self._kept: dict[Any, _Kept] = {}

    def of(self, launch: Launch, tensor: torch.Tensor, sources: Sequence[Source]) -> list[KernelLaunch]:
        """The windows of a launch on the flat `tensor`, parts of which are read from `sources`."""
        if not launch.elements:
            return []
        key, addresses = self._key(launch, tensor, sources), [source.tensor.data_ptr() for source in sources]
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= _BUCKETS_KEPT:
                self._kept.clear()
            kept = self._kept[key] = _Kept(addresses, self.build(launch, tensor, sources))
        elif kept.addresses != addresses:
            runs = _runs(tensor, sources)
            for window in kept.windows:
                window.table.point_at(runs, self._write)
            kept.addresses = addresses
        return kept.windows

    def _key(self, launch: Launch, tensor: torch.Tensor, sources: Sequence[Source]) -> tuple[Any, ...]:
        """Launches of the same key have the same tables, but for the addresses of their sources."""
        tensors = [source.tensor for source in sources]
        return (
            launch.kind,
            launch.algorithm,
            launch.dtype,
            launch.wire,
            launch.elements,
            launch.factor,
            tensor.data_ptr(),
            *[source.start for source in sources],
            *[source.numel() for source in tensors],
            *[source.data_ptr() % 16 for source in tensors],
        )

    def known(self, launch: Launch, tensor: torch.Tensor, sources: Sequence[Source]) -> list[KernelLaunch]:
        """As `of`, but nothing is built or written: none if the launch is new."""
        kept = self._kept.get(self._key(launch, tensor, sources))
        return kept.windows if kept is not None else []

    def forget(self) -> None:
        """Keep nothing that was built so far."""
        self._kept.clear()

    def build(self, launch: Launch, tensor: torch.Tensor, sources: Sequence[Source]) -> list[KernelLaunch]:
        """As `of`, anew, and not kept here."""
        if not launch.elements:
            return []
        region, runs, device = self._region, _runs(tensor, sources), tensor.device
        plan = make_plan(launch.kind, launch.algorithm, region.world, launch.elements)
        span, wire = self._span(launch), torch_dtype(launch.wire)
        # A row has SIGNAL_ROW signals, for the chunks of all segments.
        chunk = max(CHUNK_BYTES // wire.itemsize, -(-span // (SIGNAL_ROW // region.world)))
        chunk = -(-chunk // ALIGNMENT) * ALIGNMENT
        windows = []
        for segments in cut_into_windows([plan.bounds(segment) for segment in range(region.world)], span):
            origins = [start for start, _ in segments]
            if _holds_all(launch):  # the windows of all segments lie one behind the other in a row
                origins = [start - segment * span for segment, (start, _) in enumerate(segments)]
            table = Table(
                segments, runs, tensor, origins, chunk_elements=chunk, block=block_of(wire), write=self._write
            )
            totals = Totals(
                torch.zeros(region.channels, dtype=torch.float32, device=device),
                torch.zeros(region.channels, dtype=torch.int32, device=device),
            )
            kernel = prepare(launch, table, region, totals)
            windows.append(KernelLaunch(table, totals, kernel))
        return windows

    def _span(self, launch: Launch) -> int:
        """Elements of each segment that one window takes."""
        world = self._region.world
        if launch.algorithm == "ring":
            rows = ring_rows(world)
        else:
            rows = direct_rows(launch.algorithm if _holds_all(launch) else "two_shot", world)
        elements = row_bytes(self._region.parity_bytes, rows) // torch_dtype(launch.wire).itemsize
        if _holds_all(launch):
            elements //= world
        assert elements >= ALIGNMENT, "the slots are too small for so many ranks"
        return elements // ALIGNMENT * ALIGNMENT


def prepare(launch: Launch, table: Table, region: Region, totals: Totals) -> Prepared:
    """The kernel that does what `launch` says with the tiles of `table`."""
    scatter, gather = launch.kind != "all_gather", launch.kind != "reduce_scatter"
    scale = launch.factor if scatter else 1.0
    how: How = {"dtype": torch_dtype(launch.dtype), "wire": torch_dtype(launch.wire), "scale": scale}
    if launch.algorithm == "ring":
        kinds = {
            "all_reduce": ring.ring_all_reduce,
            "reduce_scatter": ring.ring_reduce_scatter,
            "all_gather": ring.ring_all_gather,
        }
        return kinds[launch.kind](table, region, totals, **how)
    if launch.algorithm == "master":
        return direct.master(table, region, totals, scatter=scatter, gather=gather, **how)
    if launch.algorithm == "one_shot" and scatter and gather:
        return direct.one_shot(table, region, totals, **how)
    assert launch.algorithm in ("one_shot", "two_shot"), f"there is no kernel for {launch.algorithm}"
    return direct.two_shot(table, region, totals, scatter=scatter, gather=gather, **how)


def _holds_all(launch: Launch) -> bool:
    """Whether a row of slots holds the whole bucket, not one segment."""
    return launch.algorithm == "master" or (launch.algorithm == "one_shot" and launch.kind == "all_reduce")


def _runs(tensor: torch.Tensor, sources: Sequence[Source]) -> list[Run]:
    """The sources, and between them the tensor itself."""
    runs, at = [], 0
    for source in sources:
        if source.start > at:
            runs.append(Run(at, tensor[at : source.start]))
        runs.append(Run(source.start, source.tensor))
        at = source.start + -(-source.tensor.numel() // ALIGNMENT) * ALIGNMENT
    if at < tensor.numel():
        runs.append(Run(at, tensor[at:]))
    return runs
