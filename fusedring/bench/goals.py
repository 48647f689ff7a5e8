"""What this library wants to reach, and whether a run has reached it.

The goals are for 2 ranks on 2 cores or more, in host memory. A goal that is missed keeps its row; where the reason is
known, it stands beside the goal.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fusedring.bench.clock import Timing
from fusedring.bench.measure import CROWD_SIZES, CROWDS, LATENCY_BYTES, SIZES, Results
from fusedring.bench.memory import STATED_SLOTS
from fusedring.bench.models import GPT_3M, LINEARS, LORA, MANY, MLP, RESNET
from fusedring.bench.steps import FUSEDRING, TORCH, Step

GOAL_RANKS = LEAST_CORES = 2

LEAST_REPEATS_OF_P99 = 100

NOT_MEASURED = "not measured in this run"


class NotMeasuredError(Exception):
    """A number that a goal needs is not there; the text says why."""


@dataclass(frozen=True, slots=True)
class Goal:
    """work: what is measured. limit: the least it may be, or the most, in `unit`; None: looked at, not judged.

    reached: what it is in a run. reason: why it is missed, where that is known.
    """

    work: str
    limit: float | None
    at_least: bool
    unit: str
    reached: Callable[[Results], float]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A goal beside what was reached. verdict: 'met', 'missed', 'not judged' or 'not measured'; reason: why not met."""

    work: str
    goal: str
    reached: float | None
    unit: str
    verdict: str
    reason: str


def why_not_judged(ranks: int, device: str) -> str | None:
    """Why the goals are not for such a run on this machine; None if they are."""
    cores = len(os.sched_getaffinity(0))
    if device == "cpu" and ranks == GOAL_RANKS and cores >= LEAST_CORES:
        return None
    return f"the goals are for {GOAL_RANKS} ranks on {LEAST_CORES} cores or more, in host memory"


def judge(results: Results) -> list[Verdict]:
    """All goals, in the order of GOALS."""
    return [_judge(goal, results) for goal in GOALS]


def _judge(goal: Goal, results: Results) -> Verdict:
    words = f"{'>=' if goal.at_least else '<='} {goal.limit:g} {goal.unit}" if goal.limit is not None else "-"
    try:
        reached = goal.reached(results)
    except NotMeasuredError as error:
        return Verdict(goal.work, words, None, goal.unit, "not measured", str(error))
    if goal.limit is None:
        return Verdict(goal.work, words, reached, goal.unit, "not judged", goal.reason)
    met = reached >= goal.limit if goal.at_least else reached <= goal.limit
    return Verdict(goal.work, words, reached, goal.unit, "met" if met else "missed", "" if met else goal.reason)


def _timing(results: Results, nbytes: int, name: str, tensors: str, wire: str | None = None) -> Timing:
    """Of float32. Raises NotMeasuredError where there is none."""
    for cell in results.cells:
        form = (cell.nbytes, cell.dtype, cell.wire, cell.name, cell.tensors)
        if form == (nbytes, "float32", wire, name, tensors):
            if cell.timing is None:
                raise NotMeasuredError(f"{cell.wrong:,} wrong elements")
            return cell.timing
    if name == "MPI" and not any(cell.name == "MPI" for cell in results.cells):
        raise NotMeasuredError(f"MPI: {results.mpi}")
    raise NotMeasuredError(NOT_MEASURED)


def _times_gloo(results: Results, name: str, *, tensors: str = "workspace", wire: str | None = None) -> float:
    """How many times as fast as gloo with the operations that its users write around it; geometric mean of SIZES."""
    return statistics.geometric_mean(
        _timing(results, nbytes, "gloo", "ordinary", wire).median / _timing(results, nbytes, name, tensors, wire).median
        for nbytes in SIZES
    )


def _copies(results: Results, nbytes: int) -> float:
    ours = _timing(results, nbytes, "fusedring auto", "workspace")
    return ours.median / _timing(results, nbytes, "copy", "ordinary").median


def _times_mpi(results: Results, nbytes: int) -> float:
    theirs = _timing(results, nbytes, "MPI", "ordinary")
    return theirs.median / _timing(results, nbytes, "fusedring auto", "workspace").median


def _latency(results: Results) -> float:
    if results.latency is None:
        raise NotMeasuredError(NOT_MEASURED)
    return 1e6 * results.latency.median


def _step(results: Results, model: str, way: str) -> Step:
    for step in results.steps:
        if (step.model, step.way) == (model, way):
            if step.wrong:
                raise NotMeasuredError(f"{step.wrong:,} wrong elements")
            return step
    raise NotMeasuredError(NOT_MEASURED)


def _exposed(results: Results, model: str) -> float:
    """Exposed communication, in multiples of torch's. What noise has made negative is none."""
    ours, theirs = (_step(results, model, way).exposed for way in (FUSEDRING, TORCH))
    assert ours is not None
    assert theirs is not None
    if theirs <= 0:
        raise NotMeasuredError("torch DDP's is too small to be told from noise")
    return max(0.0, ours) / theirs


def _times_torch(results: Results, model: str) -> float:
    ours, theirs = (_step(results, model, way).step for way in (FUSEDRING, TORCH))
    assert ours is not None
    assert theirs is not None
    return theirs.median / ours.median


def _crowd_timing(results: Results, ranks: int, nbytes: int, name: str, tensors: str) -> Timing:
    for measured in results.crowds.get(ranks, []):
        timing = measured.timing_of(name, tensors)
        if measured.cells[0].nbytes == nbytes and timing is not None:
            return timing
    raise NotMeasuredError(NOT_MEASURED)


def _crowd_times_gloo(results: Results, ranks: int) -> float:
    return statistics.geometric_mean(
        _crowd_timing(results, ranks, nbytes, "gloo", "ordinary").median
        / _crowd_timing(results, ranks, nbytes, "fusedring auto", "workspace").median
        for nbytes in CROWD_SIZES
    )


def _crowd_tail(results: Results, ranks: int) -> float:
    """The largest p99 in multiples of its median, of those sizes that were reduced often enough."""
    timings = [_crowd_timing(results, ranks, nbytes, "fusedring auto", "workspace") for nbytes in CROWD_SIZES]
    return max(timing.p99 / timing.median for timing in timings if timing.repeats >= LEAST_REPEATS_OF_P99)


def _memory(results: Results) -> float:
    if not results.memory:
        raise NotMeasuredError(NOT_MEASURED)
    return results.memory[FUSEDRING] / (results.memory[TORCH] + GOAL_RANKS * STATED_SLOTS)


def _start_up(results: Results, cache: str) -> float:
    if cache not in results.start_up:
        raise NotMeasuredError(NOT_MEASURED)
    return results.start_up[cache]


def size_in_words(nbytes: int) -> str:
    """'64 KiB', '100 MiB', '100 B'."""
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale and nbytes % scale == 0:
            return f"{nbytes // scale} {unit}"
    return f"{nbytes:,} B"


_SIZES = f"{size_in_words(SIZES[0])} to {size_in_words(SIZES[-1])}"

GOALS: tuple[Goal, ...] = (
    Goal(f"auto, {_SIZES}: speed / gloo's", 15, True, "x", partial(_times_gloo, name="fusedring auto")),
    Goal(f"ring, {_SIZES}: speed / gloo's", 10, True, "x", partial(_times_gloo, name="fusedring ring")),
    Goal(
        f"auto, bf16 wire, {_SIZES}: speed / torch's bf16 hook over gloo's",
        12,
        True,
        "x",
        partial(_times_gloo, name="fusedring auto", wire="bfloat16"),
    ),
    Goal(
        f"auto, ordinary tensors, {_SIZES}: speed / gloo's",
        5,
        True,
        "x",
        partial(_times_gloo, name="fusedring auto", tensors="ordinary"),
    ),
    Goal("auto, 100 MiB: time / concurrent copy's", 1.1, False, "x", partial(_copies, nbytes=100 << 20)),
    *(
        Goal(f"auto, {size_in_words(nbytes)}: speed / MPI's", limit, True, "x", partial(_times_mpi, nbytes=nbytes))
        for nbytes, limit in zip(SIZES, (2.5, 6, 3, 3.5, 4), strict=True)
    ),
    Goal(f"auto, {LATENCY_BYTES} bytes, call after call: latency", 25, False, "us", _latency),
    *(
        Goal(f"{model}: exposed communication / torch DDP's", 0.25, False, "x", partial(_exposed, model=model))
        for model in (LINEARS, GPT_3M, RESNET, LORA, MLP)
    ),
    Goal(f"{LINEARS}: speed of a step / torch DDP's", 1.4, True, "x", partial(_times_torch, model=LINEARS)),
    Goal(f"{MANY}: speed of a step / torch DDP's", 1.5, True, "x", partial(_times_torch, model=MANY)),
    *(
        Goal(
            f"auto, {ranks} ranks, {size_in_words(CROWD_SIZES[0])} to {size_in_words(CROWD_SIZES[-1])}: speed / gloo's",
            4,
            True,
            "x",
            partial(_crowd_times_gloo, ranks=ranks),
        )
        for ranks in CROWDS
    ),
    *(
        Goal(f"auto, {ranks} ranks: 99th percentile / median", 5, False, "x", partial(_crowd_tail, ranks=ranks))
        for ranks in CROWDS
    ),
    Goal(f"{LINEARS}: peak memory / (torch DDP's + slots)", 1, False, "x", _memory),
    *(
        Goal(f"import and first launch, {cache} cache", None, False, "s", partial(_start_up, cache=cache))
        for cache in ("cold", "warm")
    ),
)
