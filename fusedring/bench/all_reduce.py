"""Time all_reduce in every way, for one size, dtype and wire: all ways take turns, and the slowest rank counts.

algbw and busbw are those of nccl-tests: bytes of the tensor over seconds, and that times 2(W-1)/W. The bound is a copy:
every rank has to read its contribution and write the result, so that no way is faster than all ranks copying as many
bytes at the same time. The share of the bound is the copy's time over the way's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fusedring.bench.against import Case, Way, others
from fusedring.bench.clock import Timing, in_turn, seconds_of, settle, slowest_rank
from fusedring.bench.exact import ExactInputs
from fusedring.bench.place import Place, total
from fusedring.config import dtype_name
from fusedring.group.collectives import all_reduce, empty

WARM_UP_TURNS = 2
"""Not counted: pages are touched, gloo makes its buffers."""

LATENCY_CALLS = 100
"""One after another, between two looks at the clock."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What one way achieved. wrong: elements that were not exact, of all ranks; where there are any, nothing was timed.

    tensors: 'workspace', 'ordinary' or 'symmetric'. algbw, busbw: bytes per second. share: of the bound, 0 to 1.
    times_baseline: how many times as fast as the first of the other libraries.
    """

    nbytes: int
    dtype: str
    wire: str | None
    library: str
    algorithm: str
    tensors: str
    wrong: int
    timing: Timing | None
    algbw: float | None = None
    busbw: float | None = None
    share: float | None = None
    times_baseline: float | None = None

    @property
    def name(self) -> str:
        """Of the way: 'fusedring ring', 'gloo'."""
        return f"{self.library} {self.algorithm}".rstrip()


@dataclass(frozen=True, slots=True)
class Measured:
    """All cells of one case, the copy's first, and why there are none of some libraries."""

    cells: tuple[Cell, ...]
    missing: dict[str, str]

    def timing_of(self, name: str, tensors: str) -> Timing | None:
        """Of the way of that name on such tensors; None if it was wrong or is not there."""
        return next((cell.timing for cell in self.cells if (cell.name, cell.tensors) == (name, tensors)), None)


def measure_case(
    case: Case,
    place: Place,
    algorithms: Sequence[str],
    *,
    turns: int,
    makers: Callable[[Case, Place], tuple[list[Way], dict[str, str]]] = others,
) -> Measured:
    """Verify every way, then time those that are right (collective; all ranks return the same).

    algorithms: for tensors in the workspace; ordinary tensors are reduced by the first of them. makers: of the ways of
    other libraries.
    """
    theirs, missing = makers(case, place)
    ways = [_copy(case, place), *theirs, *_ours(case, place, algorithms)]
    inputs = ExactInputs(case.dtype, case.wire, place.world, place.device)
    wrong = [_wrong(way, inputs, place) for way in ways]
    right = [number for number, elements in enumerate(wrong) if elements == 0]
    acts = {str(number): partial(seconds_of, ways[number].act, place.device) for number in right}
    times = in_turn(acts, turns, warm_up=WARM_UP_TURNS)
    timings = {int(number): Timing(tuple(slowest_rank(seconds))) for number, seconds in times.items()}
    bound = timings.get(0)
    baseline = next((timings[number] for number in right if number > 0 and ways[number] in theirs), None)
    cells = [
        _cell(case, place.world, way, wrong[number], timings.get(number), bound, baseline)
        for number, way in enumerate(ways)
    ]
    return Measured(tuple(cells), missing)


def latency(place: Place, *, nbytes: int, rounds: int) -> Timing:
    """Of one of LATENCY_CALLS calls of all_reduce on a workspace tensor, one after another (collective)."""
    tensor = _workspace(nbytes // 4, torch.float32, place)
    tensor.zero_()

    def calls() -> None:
        for _ in range(LATENCY_CALLS):
            all_reduce(tensor)

    calls()
    seconds = slowest_rank([seconds_of(calls, place.device) / LATENCY_CALLS for _ in range(rounds)])
    return Timing(tuple(seconds))


def _copy(case: Case, place: Place) -> Way:
    source = torch.empty(case.elements, dtype=case.dtype, device=place.device)
    target = torch.empty_like(source)
    return Way("copy", "", "ordinary", source, lambda: target.copy_(source))


def _ours(case: Case, place: Place, algorithms: Sequence[str]) -> list[Way]:
    shared = _workspace(case.elements, case.dtype, place)
    ordinary = torch.empty(case.elements, dtype=case.dtype, device=place.device)
    how: dict[str, Any] = {"wire_dtype": case.wire}
    return [
        Way("fusedring", algorithm, tensors, tensor, partial(all_reduce, tensor, algorithm=algorithm, **how))
        for tensors, tensor, names in (("workspace", shared, algorithms), ("ordinary", ordinary, algorithms[:1]))
        for algorithm in names
    ]


def _workspace(elements: int, dtype: torch.dtype, place: Place) -> torch.Tensor:
    return empty(elements, dtype=dtype, device=place.device)


def _wrong(way: Way, inputs: ExactInputs, place: Place) -> int:
    """Elements of all ranks that are not what they have to be after one call."""
    inputs.fill(way.tensor, place.rank)
    result = way.act()
    settle(place.device)
    return total(inputs.changed(result, place.rank) if way.library == "copy" else inputs.wrong(result))


def _cell(
    case: Case, world: int, way: Way, wrong: int, timing: Timing | None, bound: Timing | None, baseline: Timing | None
) -> Cell:
    cell = Cell(
        nbytes=case.nbytes,
        dtype=dtype_name(case.dtype),
        wire=dtype_name(case.wire) if case.wire else None,
        library=way.library,
        algorithm=way.algorithm,
        tensors=way.tensors,
        wrong=wrong,
        timing=timing,
        algbw=case.nbytes / timing.median if timing else None,
        busbw=2 * (world - 1) / world * case.nbytes / timing.median if timing else None,
        share=bound.median / timing.median if timing and bound else None,
        times_baseline=baseline.median / timing.median if timing and baseline and way.library != "copy" else None,
    )
    assert (cell.timing is None) == (wrong > 0)
    return cell
