"""The model of protocol.py against the kernels themselves: the same waits, reads, stores and posts, in the same order.

Each kernel runs under Triton's interpreter, one rank at a time, with all signals raised beforehand; what it touches in
the regions is written down on the way. The interpreter runs the channels of a launch one after another.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import pytest
import torch

from fusedring.kernels.layout import (
    SIGNAL_ROW,
    SIGNALS,
    STATUS_BYTES,
    direct_rows,
    region_bytes,
    ring_rows,
    row_bytes,
    slots_byte,
)
from fusedring.kernels.region import Region, Totals
from fusedring.kernels.tables import Run, Table
from tests.kernels.protocol import Join, Launch, Post, Program, Put, Read, Rules, Wait, programs
from tests.kernels.test_protocol import COLLECTIVES, launches
from tests.ranks import run_ranks

PART = 16
"""Elements of a chunk: the smallest that the plan cuts, one tile."""

Touch = tuple[Any, ...]
"""('wait' or 'post', rank, row, index, epoch) or ('read' or 'put', rank, parity, row, place)."""


class Recording:
    """What kernels do to the signals and slots of `regions`, in order."""

    def __init__(self, regions: list[torch.Tensor], slots_byte: int) -> None:
        from triton.runtime.interpreter import InterpreterBuilder

        self.raw: list[tuple[str, int, int, int]] = []
        self._spans = [(region.data_ptr(), region.numel()) for region in regions]
        self._slots_byte = slots_byte
        self._builder = InterpreterBuilder
        self._real = {
            name: getattr(InterpreterBuilder, name)
            for name in ("create_atomic_rmw", "create_masked_load", "create_masked_store")
        }

    def __enter__(self) -> Recording:
        real = self._real

        def atomic(builder, op, pointer, value, mask, sem, scope):
            self._note("wait" if "ADD" in str(op) else "post", pointer, int(np.asarray(value.data).flat[0]))
            return real["create_atomic_rmw"](builder, op, pointer, value, mask, sem, scope)

        def load(builder, pointers, mask, *rest):
            if np.any(mask.data):
                self._note("read", pointers, int(np.sum(mask.data)))
            return real["create_masked_load"](builder, pointers, mask, *rest)

        def store(builder, pointers, value, mask, *rest):
            if np.any(mask.data):
                self._note("put", pointers, int(np.sum(mask.data)))
            return real["create_masked_store"](builder, pointers, value, mask, *rest)

        for name, patched in zip(real, (atomic, load, store), strict=True):
            setattr(self._builder, name, patched)
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._real.items():
            setattr(self._builder, name, original)

    def _note(self, what: str, pointers: Any, number: int) -> None:
        address = int(np.asarray(pointers.data).flat[0])
        for rank, (base, nbytes) in enumerate(self._spans):
            at = address - base
            if 0 <= at < nbytes:
                in_slots = at >= self._slots_byte
                if in_slots == (what in ("read", "put")) and (in_slots or at >= 4 * SIGNALS):
                    self.raw.append((what, rank, at, number))


def touches(raw: list[tuple[str, int, int, int]], epoch: int, slots_byte: int, parity: int, row: int) -> list[Touch]:
    """Addresses as rows and places."""
    found = []
    for what, rank, at, number in raw:
        if what in ("wait", "post"):
            line, index = divmod(at // 4 - SIGNALS, SIGNAL_ROW)
            found.append((what, rank, line, index, epoch if what == "wait" else number))
        else:
            assert number == PART
            which, rest = divmod(at - slots_byte, parity)
            line, place = divmod(rest, row)
            assert place % (4 * PART) == 0
            found.append((what, rank, which, line, place // (4 * PART)))
    return found


def modelled(program: Program, epoch: int, rows: int, places: int) -> list[Touch]:
    """The touches of one epoch of a program of the model, stores in the place where they are issued."""
    found: list[Touch] = []

    def span(what: str, where: tuple[int, Any, Any]) -> Touch:
        rank, first, _ = where
        line, place = divmod((first - int(first)) * rows, 1)
        assert (place * places).denominator == 1
        return what, rank, int(first), int(line), int(place * places)

    issued = iter(program.stores)
    following = next(issued, None)
    for number, action in enumerate([*program.actions, None]):
        while following is not None and following[0] == number:
            store = following[1]
            if isinstance(store, Post) and store.epoch == epoch:
                found.append(("post", *store.signal, store.epoch))
            elif isinstance(store, Put) and store.chunk.epoch == epoch:
                found.append(span("put", store.span))
            following = next(issued, None)
        match action:
            case Wait(signal, awaited) if awaited == epoch:
                found.append(("wait", *signal, awaited))
            case Read(where, expected) if expected.epoch == epoch:
                found.append(span("read", where))
            case Join():
                pytest.fail("the programs were made without joins")
    return found


def compare(launch: Launch, channels: int) -> None:
    from fusedring.kernels import direct, ring

    world, algorithm = len(launch.chunks), launch.algorithm
    scatter, gather = launch.kind != "all_gather", launch.kind != "reduce_scatter"
    chunks, whole_rows = max(1, *launch.chunks), algorithm in ("one_shot", "master")
    edges = [0, *itertools.accumulate(PART * filled for filled in launch.chunks)]
    parts = list(itertools.pairwise(edges))
    segments = [parts[s - 1] for s in range(world)] if algorithm == "ring" else parts
    origins = [start - (s * PART * chunks if whole_rows else 0) for s, (start, _) in enumerate(segments)]
    output = torch.zeros(max(1, edges[-1]))
    parity = 256 * 64 * world
    regions = [torch.zeros(region_bytes(world, parity), dtype=torch.uint8) for _ in range(world)]
    status = torch.zeros(STATUS_BYTES, dtype=torch.uint8)
    bases = torch.tensor([*(region.data_ptr() for region in regions), status.data_ptr()])
    rows = ring_rows(world) if algorithm == "ring" else direct_rows(algorithm, world)
    places = world * chunks if whole_rows else chunks
    start = slots_byte(world)
    model = programs((launch,) * 2, Rules(stream_order=False), channels)
    if algorithm == "ring":
        names = {
            (True, True): "ring_all_reduce",
            (True, False): "ring_reduce_scatter",
            (False, True): "ring_all_gather",
        }
        run, halves = getattr(ring, names[scatter, gather]), {}
    else:
        run = getattr(direct, algorithm)
        halves = {} if algorithm == "one_shot" else {"scatter": scatter, "gather": gather}
    for rank in range(world):
        region = Region(bases, rank, world, parity, channels, platform=0)
        table = Table(segments, [Run(0, output)], output, origins, chunk_elements=PART, block=2048)
        totals = Totals(torch.zeros(channels), torch.zeros(channels, dtype=torch.int32))
        prepared = run(table, region, totals, dtype=torch.float32, wire=torch.float32, scale=1.0, **halves)
        for epoch in (1, 2):
            for memory in regions:  # all peers have come, and more
                memory.view(torch.int32)[SIGNALS : start // 4] = 99
            with Recording(regions, start) as recording:
                prepared.launch(output, 3)
            got = touches(recording.raw, epoch, start, parity, row_bytes(parity, rows))
            mine = model[rank * channels : (rank + 1) * channels]
            want = [touch for program in mine for touch in modelled(program, epoch, rows, places)]
            assert got == want, (launch, channels, rank, epoch)


def compare_all(rank: int, world: int, name: str) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    for chunks, channels in (((1, 1), 1), ((2, 1), 2), ((0, 1, 2), 1), ((2, 2, 2), 2), ((0, 1, 0, 1), 1)):
        (launch,) = launches(name, chunks)
        compare(launch, channels)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_kernels_do_what_the_model_does(name):
    run_ranks(1, compare_all, name)
