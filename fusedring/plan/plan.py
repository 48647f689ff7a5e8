"""The plan of a collective: who sends which segment to whom, step by step. Pure values: no torch, no I/O.

Terms
-----
A tensor of N elements is cut into W *parts*, one for each rank, in multiples of 16 elements (the last may be ragged).
Part r is what `reduce_scatter` leaves at rank r. A *segment* is a part on its trip: segment s has an *owner*, the rank
where its sum is complete, and it lies in the tensor where its owner's part lies.

On the ring, segment s starts its trip at rank s and travels W-1 hops, so its owner is rank s-1 (mod W): with four
ranks the first iteration sends segment 0 from rank 0 to rank 1, segment 1 from rank 1 to rank 2, and so on. The direct
algorithms have no trip: segment s is owned by rank s. Because a segment lies at its owner's part, every algorithm's
reduce-scatter ends with part r at rank r, and `all_reduce` is exactly `reduce_scatter` followed by `all_gather`.

Elements sent in total by an all-reduce: ring, two_shot and master 2(W-1)N, one_shot W(W-1)N. Padding is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from fusedring.config import ALGORITHMS, KINDS, Algorithm, Kind

Phase = Literal["reduce-scatter", "all-gather", "exchange", "gather", "broadcast", "scatter"]

Span = tuple[int, int]
"""Elements [start, stop)."""

ALIGNMENT = 16
"""Parts are multiples of this many elements: 16-byte accesses for every dtype, and what Triton needs to vectorise."""

COLLECTING: frozenset[Phase] = frozenset({"reduce-scatter", "exchange", "gather"})
"""Phases that bring contributions together; the others hand out what is finished."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """`elements` elements of `segment` (None: the whole tensor) go from rank `src` to rank `dst`."""

    src: int
    dst: int
    segment: int | None
    elements: int


@dataclass(frozen=True, slots=True)
class Step:
    """Transfers that happen at the same time."""

    phase: Phase
    transfers: tuple[Transfer, ...]

    def into(self, rank: int) -> Transfer:
        """The one transfer that `rank` receives in this step of a ring."""
        (transfer,) = (t for t in self.transfers if t.dst == rank)
        return transfer


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a collective does, for every rank. Build one with `make_plan`."""

    kind: Kind
    algorithm: Algorithm
    world_size: int
    elements: int
    parts: tuple[Span, ...]
    steps: tuple[Step, ...]

    def owner(self, segment: int) -> int:
        """The rank where the sum of `segment` is complete."""
        return (segment - 1) % self.world_size if self.algorithm == "ring" else segment

    def bounds(self, segment: int) -> Span:
        """Where `segment` lies in the tensor: elements [start, stop)."""
        return self.parts[self.owner(segment)]

    def sums(self, rank: int, segment: int) -> bool:
        """Whether a direct algorithm brings every rank's contribution to `segment` together at `rank`."""
        senders = {
            t.src
            for step in self.steps
            if step.phase in COLLECTING
            for t in step.transfers
            if t.dst == rank and t.segment in (None, segment)
        }
        return len(senders) == self.world_size - 1

    def receivers(self, rank: int, segment: int) -> tuple[int, ...]:
        """The ranks to which a direct algorithm's `rank` hands the finished `segment`, in order."""
        return tuple(
            t.dst
            for step in self.steps
            if step.phase not in COLLECTING
            for t in step.transfers
            if t.src == rank and t.segment in (None, segment)
        )

    @property
    def elements_per_rank(self) -> tuple[int, ...]:
        """Elements that each rank sends."""
        sent = [0] * self.world_size
        for step in self.steps:
            for t in step.transfers:
                sent[t.src] += t.elements
        return tuple(sent)

    @property
    def elements_transferred(self) -> int:
        """Elements that all ranks together send."""
        return sum(self.elements_per_rank)


def split_evenly(elements: int, world_size: int) -> tuple[Span, ...]:
    """Cut [0, elements) into `world_size` runs that differ by at most one block of `ALIGNMENT` elements."""
    blocks = -(-elements // ALIGNMENT)
    edges = [min(elements, ALIGNMENT * (r * blocks // world_size)) for r in range(world_size)] + [elements]
    return tuple(pairwise(edges))


def cut_into_windows(spans: Sequence[Span], elements: int) -> list[tuple[Span, ...]]:
    """Cut runs of elements into windows: each holds the same `elements` elements of every run, as far as it goes."""
    longest = max(stop - start for start, stop in spans)
    return [
        tuple((min(start + at, stop), min(start + at + elements, stop)) for start, stop in spans)
        for at in range(0, longest, elements)
    ]


@lru_cache(maxsize=1024)
def make_plan(kind: Kind, algorithm: Algorithm, world_size: int, elements: int) -> Plan:
    """The plan of one collective.

    Raises ValueError for a world size below 1, a negative element count, or an unknown kind or algorithm.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if elements < 0:
        raise ValueError(f"elements must be at least 0, got {elements}")
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    draft = Plan(kind, algorithm, world_size, elements, split_evenly(elements, world_size), ())
    steps = _STEPS[algorithm](draft) if world_size > 1 else ()
    return Plan(kind, algorithm, world_size, elements, draft.parts, steps)


def _ring(plan: Plan) -> tuple[Step, ...]:
    """At hop h of the reduce-scatter, rank r passes on segment r-h; at hop h of the all-gather, segment r+1-h."""
    ranks = range(plan.world_size)

    def step(phase: Phase, first: int, hop: int) -> Step:
        return Step(phase, tuple(_send(plan, r, (r + 1) % len(ranks), (r + first - hop) % len(ranks)) for r in ranks))

    hops = range(plan.world_size - 1)
    reduce_scatter = tuple(step("reduce-scatter", 0, hop) for hop in hops)
    all_gather = tuple(step("all-gather", 1, hop) for hop in hops)
    return _phases(plan, reduce_scatter, all_gather)


def _two_shot(plan: Plan) -> tuple[Step, ...]:
    """Everybody sends each part to its owner; owners send their sums to everybody."""
    pairs = _pairs(plan)
    reduce_scatter = Step("reduce-scatter", tuple(_send(plan, src, dst, dst) for src, dst in pairs))
    all_gather = Step("all-gather", tuple(_send(plan, src, dst, src) for src, dst in pairs))
    return _phases(plan, (reduce_scatter,), (all_gather,))


def _one_shot(plan: Plan) -> tuple[Step, ...]:
    """Everybody sends everything to everybody. A lone reduce-scatter or all-gather needs only the parts."""
    if plan.kind != "all_reduce":
        return _two_shot(plan)
    return (Step("exchange", tuple(_send(plan, src, dst, None) for src, dst in _pairs(plan))),)


def _master(plan: Plan) -> tuple[Step, ...]:
    """Rank 0 collects, adds and hands out. What it hands out, or collects, may be just the parts."""
    others = range(1, plan.world_size)
    whole_in = Step("gather", tuple(_send(plan, r, 0, None) for r in others))
    whole_out = Step("broadcast", tuple(_send(plan, 0, r, None) for r in others))
    if plan.kind == "reduce_scatter":
        return whole_in, Step("scatter", tuple(_send(plan, 0, r, r) for r in others))
    if plan.kind == "all_gather":
        return Step("gather", tuple(_send(plan, r, 0, r) for r in others)), whole_out
    return whole_in, whole_out


_STEPS = {"ring": _ring, "two_shot": _two_shot, "one_shot": _one_shot, "master": _master}


def _phases(plan: Plan, reduce_scatter: tuple[Step, ...], all_gather: tuple[Step, ...]) -> tuple[Step, ...]:
    wanted = {"all_reduce": reduce_scatter + all_gather, "reduce_scatter": reduce_scatter, "all_gather": all_gather}
    return wanted[plan.kind]


def _pairs(plan: Plan) -> list[tuple[int, int]]:
    ranks = range(plan.world_size)
    return [(src, dst) for src in ranks for dst in ranks if src != dst]


def _send(plan: Plan, src: int, dst: int, segment: int | None) -> Transfer:
    if segment is None:
        return Transfer(src, dst, None, plan.elements)
    start, stop = plan.bounds(segment)
    return Transfer(src, dst, segment, stop - start)
