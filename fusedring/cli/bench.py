"""Measure all_reduce and training steps against other libraries, and say which goals are met."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fusedring.bench.against import LIBRARIES, baseline
from fusedring.bench.all_reduce import Cell
from fusedring.bench.conditions import Conditions, conditions
from fusedring.bench.exact import MOST_RANKS
from fusedring.bench.goals import GOAL_RANKS, Verdict, judge, size_in_words, why_not_judged
from fusedring.bench.measure import PARTS, SIZES, Results, Settings, measure
from fusedring.bench.ranks import find_mpi
from fusedring.bench.steps import TORCH, Step
from fusedring.cli.arguments import list_of, one_of, size_in_bytes, whole_number
from fusedring.config import ALGORITHMS, DTYPES, dtype_name
from fusedring.group.spawn import RanksFailedError
from fusedring.observe.pictures import MATPLOTLIB_MISSING, has_matplotlib
from fusedring.observe.plots import Bandwidths, draw_bandwidths

TABLE_WIDTH = 130

_DTYPES = tuple(map(dtype_name, DTYPES))
_WIRES = ("none", "fp16", "bf16")
_FULL: dict[str, tuple[str, ...]] = {
    "dtypes": ("float32", "bfloat16"),
    "wires": ("none", "bf16"),
    "algorithms": ("auto", *ALGORITHMS),
}
_QUICK: dict[str, tuple[str, ...]] = {**_FULL, "dtypes": ("float32",), "algorithms": ("auto", "ring")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `fusedring bench`."""
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw busbw over size, with the bound, as a PNG")
    parser.add_argument("--quick", action="store_true", help="measure less: a minute instead of ten")
    parser.add_argument(
        "--only",
        type=list_of(one_of(PARTS)),
        default=PARTS,
        metavar="PARTS",
        help=f"some of {','.join(PARTS)} (default: all)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPUs, where there are some")
    parser.add_argument(
        "--ranks",
        type=whole_number(1, MOST_RANKS),
        help=f"processes (default: {GOAL_RANKS} in host memory, otherwise one for each GPU)",
    )
    sizes = ",".join(size_in_words(nbytes).replace(" ", "").replace("iB", "") for nbytes in SIZES)
    parser.add_argument(
        "--sizes",
        type=list_of(size_in_bytes(torch.float64.itemsize)),
        default=SIZES,
        metavar="SIZES",
        help=f"bytes of a tensor (default {sizes})",
    )
    for name, choices in (("dtypes", _DTYPES), ("wires", _WIRES), ("algorithms", ("auto", *ALGORITHMS))):
        parser.add_argument(
            f"--{name}",
            type=list_of(one_of(choices)),
            metavar=name.upper(),
            help=f"some of {','.join(choices)} (default {','.join(_FULL[name])})",
        )


def run(options: argparse.Namespace) -> int:
    """Measure, print the tables, draw the plot. Exit code 1 if anything was wrong, whether goals are met or not."""
    device = options.device or ("cuda" if _gpus() else "cpu")
    ranks = options.ranks or (_gpus() if device == "cuda" else GOAL_RANKS)
    problem = _problem(options, device, ranks)
    if problem:
        print(f"fusedring bench: {problem}", file=sys.stderr)
        return 2
    not_judged = why_not_judged(ranks, device)
    settings = _settings(options, device, judged=not_judged is None)
    mpi = find_mpi(ranks) if device == "cpu" and settings.reduces else "not used"
    # Before the ranks start: they are a load themselves.
    where = conditions(ranks=ranks, device=device, mpi=mpi if isinstance(mpi, str) else mpi.library)
    try:
        results = measure(settings, ranks, mpi)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except RanksFailedError as error:
        print(f"the measurement failed: {error}", file=sys.stderr)
        return 1
    verdicts = judge(results) if "goals" in settings.parts else []
    if options.plot is not None:
        draw_bandwidths(_panels(results.cells), str(where), options.plot)
    if options.json:
        print(json.dumps(_as_json(where, settings, results, verdicts, options.plot, not_judged)))
    else:
        _print(where, settings, results, verdicts, not_judged)
        if options.plot is not None:
            print(f"wrote {options.plot}")
    if results.wrong:
        print(f"{results.wrong:,} elements were wrong: see #wrong", file=sys.stderr)
        return 1
    return 0


def _gpus() -> int:
    try:
        return min(torch.cuda.device_count(), MOST_RANKS)
    except RuntimeError:  # a driver that torch cannot use
        return 0


def _problem(options: argparse.Namespace, device: str, ranks: int) -> str | None:
    """What is wrong with options that argparse finds right, each for itself."""
    if device == "cuda" and ranks > _gpus():
        return f"--ranks {ranks} needs as many GPUs, and torch can use {_gpus()} here: --device cpu measures without"
    if options.only == ("goals",) and (why := why_not_judged(ranks, device)):
        return f"--only goals: {why}"
    if options.plot is not None:
        if options.only == ("training",):
            return "--plot draws all_reduce, which --only training leaves out"
        if not has_matplotlib():
            return MATPLOTLIB_MISSING
        if not options.plot.absolute().parent.is_dir():  # found now, not after minutes of measuring
            return f"--plot: {options.plot.parent} is not a folder"
    return None


def _settings(options: argparse.Namespace, device: str, *, judged: bool) -> Settings:
    defaults = _QUICK if options.quick else _FULL
    dtypes, wires, algorithms = (getattr(options, name) or defaults[name] for name in ("dtypes", "wires", "algorithms"))
    return Settings(
        parts=tuple(part for part in options.only if judged or part != "goals"),
        sizes=options.sizes,
        dtypes=dtypes,
        wires=tuple(None if wire == "none" else wire for wire in wires),
        algorithms=algorithms,
        device=device,
        quick=options.quick,
        talks=not options.json,
    )


def _panels(cells: Sequence[Cell]) -> list[Bandwidths]:
    """One for each dtype and wire. Ordinary tensors of ours are left out: there would be too many lines."""
    panels = []
    for dtype, wire in dict.fromkeys((cell.dtype, cell.wire) for cell in cells):
        rates: dict[str, dict[int, float]] = {}
        for cell in cells:
            ours_ordinary = cell.library == "fusedring" and cell.tensors == "ordinary"
            if (cell.dtype, cell.wire) == (dtype, wire) and cell.busbw is not None and not ours_ordinary:
                rates.setdefault(cell.name, {})[cell.nbytes] = cell.busbw
        panels.append(Bandwidths(_form(dtype, wire), rates, rates.pop("copy", {})))
    return panels


def _form(dtype: str, wire: str | None) -> str:
    return f"{dtype}, wire {wire}" if wire else dtype


def _missing(results: Results, device: str) -> dict[str, str]:
    """Of the libraries that took part nowhere: why."""
    there = {cell.library for cell in results.cells}
    found: dict[str, str] = {}
    for measured in results.measured:
        for library, why in measured.missing.items():
            if library not in there and library in LIBRARIES[device]:
                found.setdefault(library, results.mpi if library == "MPI" else why)
    return found


def _as_json(
    where: Conditions,
    settings: Settings,
    results: Results,
    verdicts: Sequence[Verdict],
    plot: Path | None,
    not_judged: str | None,
) -> dict[str, Any]:
    return {
        "conditions": asdict(where),
        "quick": settings.quick,
        "wrong": results.wrong,
        "baseline": baseline(settings.device),
        "all_reduce": [_cell_as_json(cell) for cell in results.cells],
        "missing": _missing(results, settings.device),
        "training": [_step_as_json(step) for step in results.steps],
        "latency": results.latency.summary() if results.latency else None,
        "crowds": {
            ranks: [_cell_as_json(cell) for measured in crowd for cell in measured.cells]
            for ranks, crowd in results.crowds.items()
        },
        "memory": results.memory,
        "start_up": results.start_up,
        "goals": [asdict(verdict) for verdict in verdicts],
        "not_judged": not_judged,
        "plot": str(plot) if plot is not None else None,
    }


def _cell_as_json(cell: Cell) -> dict[str, Any]:
    return {**asdict(cell), "timing": cell.timing.summary() if cell.timing else None}


def _step_as_json(step: Step) -> dict[str, Any]:
    synced, unsynced = (timing.summary() if timing else None for timing in (step.step, step.no_sync))
    return {**asdict(step), "step": synced, "no_sync": unsynced}


def _print(
    where: Conditions, settings: Settings, results: Results, verdicts: Sequence[Verdict], not_judged: str | None
) -> None:
    from rich.console import Console

    # A line that is too long for the terminal can still be read; a column that was cut cannot.
    console = Console(width=max(Console().width, TABLE_WIDTH))
    console.print(str(where), highlight=False, markup=False, soft_wrap=True)
    if "all_reduce" in settings.parts:
        _print_all_reduce(console, results.cells, baseline(settings.device))
        for library, why in _missing(results, settings.device).items():
            console.print(f"without {library}: {why}", markup=False)
    if "training" in settings.parts:
        _print_training(console, results.steps)
    if "goals" in settings.parts:
        _print_goals(console, verdicts)
    elif not_judged is not None:
        console.print(f"no verdicts: {not_judged}", markup=False)


def _print_all_reduce(console: Any, cells: Sequence[Cell], compared: str) -> None:
    """A table for each dtype and wire, as nccl-tests prints them."""
    for dtype, wire in dict.fromkeys((cell.dtype, cell.wire) for cell in cells):
        table = _table(
            f"all_reduce, mean, {_form(dtype, wire)}",
            ("size", "way", "tensor"),
            ("median us", "p99 us", "algbw GB/s", "busbw GB/s", "of bound", f"x {compared}", "#wrong"),
        )
        size = None
        for cell in cells:
            if (cell.dtype, cell.wire) != (dtype, wire):
                continue
            if size not in (None, cell.nbytes):
                table.add_section()
            row = (cell.name, cell.tensors, *_figures(cell), f"{cell.wrong:,}")
            table.add_row(size_in_words(cell.nbytes) if size != cell.nbytes else "", *row)
            size = cell.nbytes
        console.print(table)


def _figures(cell: Cell) -> list[str]:
    """Of a cell that was right; a way that was wrong has no speed."""
    if cell.timing is None:
        return ["refused"] + 5 * ["-"]
    numbers = (
        (1e6 * cell.timing.median, "{:,.1f}"),
        (1e6 * cell.timing.p99, "{:,.1f}"),
        (cell.algbw and cell.algbw / 1e9, "{:.2f}"),
        (cell.busbw and cell.busbw / 1e9, "{:.2f}"),
        (cell.share, "{:.0%}"),
        (cell.times_baseline, "{:.2f}"),
    )
    return [form.format(number) if number is not None else "-" for number, form in numbers]


def _print_training(console: Any, steps: Sequence[Step]) -> None:
    for model in dict.fromkeys(step.model for step in steps):
        rows = [step for step in steps if step.model == model]
        theirs = next(step for step in rows if step.way == TORCH)
        table = _table(
            f"{model}: forward and backward, {rows[0].parameters:,} trained parameters",
            ("way",),
            ("step ms", "p99 ms", "no_sync ms", "exposed ms", "overlap", f"x {TORCH}", "exposed / its", "#wrong"),
        )
        for step in rows:
            table.add_row(step.way, *_step_figures(step, theirs), f"{step.wrong:,}")
        console.print(table)


def _step_figures(step: Step, theirs: Step) -> list[str]:
    if step.step is None:
        return ["refused"] + 6 * ["-"]
    comparable = step.exposed is not None and theirs.exposed is not None and theirs.exposed > 0
    numbers = (
        (1e3 * step.step.median, "{:.2f}"),
        (1e3 * step.step.p99, "{:.2f}"),
        (1e3 * step.no_sync.median if step.no_sync else None, "{:.2f}"),
        (1e3 * step.exposed if step.exposed is not None else None, "{:.2f}"),
        (step.overlap, "{:.0%}"),
        (theirs.step.median / step.step.median if theirs.step else None, "{:.2f}"),
        (max(0.0, step.exposed or 0.0) / (theirs.exposed or 1.0) if comparable else None, "{:.2f}"),
    )
    return [form.format(number) if number is not None else "-" for number, form in numbers]


def _print_goals(console: Any, verdicts: Sequence[Verdict]) -> None:
    table = _table("goals", ("work",), ("goal", "reached"), ("verdict", "reason"))
    colours = {"met": "green", "missed": "bold red", "not judged": "yellow", "not measured": "yellow"}
    for verdict in verdicts:
        reached = f"{verdict.reached:.2f} {verdict.unit}" if verdict.reached is not None else "-"
        coloured = f"[{colours[verdict.verdict]}]{verdict.verdict}[/]"
        table.add_row(verdict.work, verdict.goal, reached, coloured, verdict.reason)
    console.print(table)


def _table(title: str, words: Sequence[str], numbers: Sequence[str], last_words: Sequence[str] = ()) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in words:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right")
    for heading in last_words:
        table.add_column(heading)
    return table
