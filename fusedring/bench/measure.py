"""All that one run of `fusedring bench` measures: what each rank does, and what the command starts ranks for."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import product

import torch

from fusedring.bench.against import Case
from fusedring.bench.all_reduce import Cell, Measured, latency, measure_case
from fusedring.bench.clock import Timing
from fusedring.bench.memory import peak_bytes
from fusedring.bench.models import MODELS, RESNET
from fusedring.bench.place import Place, take_place
from fusedring.bench.ranks import Mpi, run_ranks
from fusedring.bench.steps import FUSEDRING, TORCH, Step, measure_steps, wrappers
from fusedring.config import check_wire_dtype, torch_dtype

PARTS = ("all_reduce", "training", "goals")

SIZES = (64 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20)
"""The goals are about these."""

TURNS = ((1 << 20, 300, 200), (4 << 20, 200, 50), (16 << 20, 100, 25), (64 << 20, 40, 10))
"""Below so many bytes: turns of a full and of a quick run. Enough for a 99th percentile where it matters most."""

TURNS_OF_LARGE = (20, 5)

QUICK_LEAVES_OUT, QUICK_TURNS = (RESNET,), 12
QUICK_WAYS = (TORCH, FUSEDRING)

LATENCY_BYTES = 64

CROWDS = (4, 5)
CROWD_SIZES = (64 << 10, 1 << 20, 25 << 20)
"""How many ranks share the cores, and what they reduce."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What every rank is told. parts: of PARTS. dtypes, wires: names. device: 'cpu' or 'cuda'. talks: on stderr."""

    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    wires: tuple[str | None, ...]
    algorithms: tuple[str, ...]
    device: str
    quick: bool
    talks: bool

    @property
    def reduces(self) -> bool:
        """Whether anything asks for all_reduce."""
        return "goals" in self.parts or "all_reduce" in self.parts

    @property
    def cases(self) -> list[Case]:
        """In the order in which they are measured. A wire that is the dtype itself is none."""
        forms: dict[tuple[torch.dtype, torch.dtype | None], None] = {}
        for name, wire_name in product(self.dtypes, self.wires):
            dtype, wire = torch_dtype(name), check_wire_dtype(wire_name)  # type: ignore[arg-type]
            forms[dtype, None if wire == dtype else wire] = None
        return [Case(nbytes, dtype, wire) for dtype, wire in forms for nbytes in self.sizes]

    def turns(self, nbytes: int) -> int:
        """In which each way reduces so many bytes."""
        for below, full, quick in TURNS:
            if nbytes < below:
                return quick if self.quick else full
        return TURNS_OF_LARGE[self.quick]

    def says(self, place: Place, what: str) -> None:
        """Tell the user, once, what comes next."""
        if self.talks and place.rank == 0:
            print(f"measuring {what} ...", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Results:
    """What was measured; what was not is empty.

    latency: of all_reduce of LATENCY_BYTES. crowds: by the number of ranks that shared the cores. memory: peak bytes of
    all ranks, by wrapper. start_up: seconds of the import and the first launch, with a 'cold' and a 'warm' cache of
    compiled code; empty as long as nothing is compiled. mpi: the library's name and version, or why there is none.
    """

    measured: list[Measured] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    latency: Timing | None = None
    crowds: dict[int, list[Measured]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    start_up: dict[str, float] = field(default_factory=dict)
    mpi: str = ""

    @property
    def cells(self) -> list[Cell]:
        """Of the group's all_reduces, in the order of the cases."""
        return [cell for measured in self.measured for cell in measured.cells]

    @property
    def wrong(self) -> int:
        """Elements that were not exact, in all that was verified."""
        crowds = [cell for crowd in self.crowds.values() for measured in crowd for cell in measured.cells]
        return sum(cell.wrong for cell in (*self.cells, *crowds)) + sum(step.wrong for step in self.steps)


def measure(settings: Settings, ranks: int, mpi: Mpi | str) -> Results:
    """Start ranks and have them measure what the settings ask for.

    mpi: starts the ranks, or why there is none. Raises RanksFailedError if a rank fails, KeyboardInterrupt on Ctrl-C.
    """
    starter = mpi if isinstance(mpi, Mpi) else None
    results: Results = run_ranks(measure_here, ranks, settings, mpi=starter)[0]
    results.mpi = starter.library if starter is not None else str(mpi)
    if "goals" in settings.parts and not settings.quick:
        for crowd in CROWDS:
            results.crowds[crowd] = run_ranks(measure_crowd, crowd, settings)[0]
        for wrapper in (TORCH, FUSEDRING):
            results.memory[wrapper] = run_ranks(peak_bytes, ranks, wrapper)[0]
    return results


def measure_here(settings: Settings) -> Results:
    """On every rank."""
    place, results = take_place(settings.device), Results()
    if settings.reduces:
        for case in settings.cases:
            settings.says(place, str(case))
            results.measured.append(
                measure_case(case, place, settings.algorithms, turns=settings.turns(case.nbytes)),
            )
    if "goals" in settings.parts:
        settings.says(place, f"{LATENCY_BYTES} bytes")
        results.latency = latency(place, nbytes=LATENCY_BYTES, rounds=20 if settings.quick else 100)
    if "goals" in settings.parts or "training" in settings.parts:
        results.steps = _train(settings, place)
    return results


def _train(settings: Settings, place: Place) -> list[Step]:
    steps = []
    ways = wrappers(place)
    if settings.quick:
        ways = {name: ways[name] for name in QUICK_WAYS}
    for model in MODELS:
        if settings.quick and model.name in QUICK_LEAVES_OUT:
            continue
        settings.says(place, model.name)
        steps += measure_steps(model, place, turns=QUICK_TURNS if settings.quick else model.turns, ways=ways)
    return steps


def measure_crowd(settings: Settings) -> list[Measured]:
    """On every rank of more ranks than there are cores."""
    place, measured = take_place("cpu"), []
    for nbytes in CROWD_SIZES:
        case = Case(nbytes, torch.float32, None)
        settings.says(place, f"{case} on {place.world} ranks")
        measured.append(measure_case(case, place, ("auto",), turns=settings.turns(nbytes)))
    return measured
