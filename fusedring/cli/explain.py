"""Show how gradients travel: every step of an algorithm in words, as JSON, or as a picture."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from fusedring.cli.arguments import whole_number
from fusedring.config import ALGORITHMS
from fusedring.observe.pictures import MATPLOTLIB_MISSING, MOST_GPUS_DRAWN, draw_walk, has_matplotlib
from fusedring.plan.plan import COLLECTING, Plan, make_plan
from fusedring.plan.walk import Move, WalkedStep, gpu, gradient, sum_in_words, walk

_PHASES = {
    "reduce-scatter": "share and add",
    "all-gather": "share only",
    "exchange": "everybody sends everything to everybody",
    "gather": "everybody sends to GPU1, which adds",
    "broadcast": "GPU1 hands the sum out",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `fusedring explain`."""
    parser.add_argument("--world", type=whole_number(1, 128), default=4, metavar="W", help="number of GPUs (default 4)")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="ring", help="default ring")
    parser.add_argument(
        "--elements", type=whole_number(0), default=1_000_000, metavar="N", help="gradient elements (default 1000000)"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, ranks and segments from 0")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the steps, one panel each")


def run(options: argparse.Namespace) -> int:
    """Print (and draw) the walk. Exit code 2 if a picture is asked for and cannot be made."""
    plan = make_plan("all_reduce", options.algorithm, options.world, options.elements)
    if options.png is not None:
        if options.world > MOST_GPUS_DRAWN:
            print(f"--png: a picture can show {MOST_GPUS_DRAWN} GPUs at most, got {options.world}", file=sys.stderr)
            return 2
        if not has_matplotlib():
            print(MATPLOTLIB_MISSING, file=sys.stderr)
            return 2
        try:
            options.png.parent.mkdir(parents=True, exist_ok=True)
            draw_walk(plan, options.png)
        except OSError as error:
            print(f"--png: cannot write {options.png}: {error.strerror}", file=sys.stderr)
            return 2
        print(f"wrote {options.png}", file=sys.stderr)
    if options.json:
        print(json.dumps(as_json(plan)))
    else:
        print("\n".join(_in_words(plan)))
    return 0


def as_json(plan: Plan) -> dict[str, object]:
    """The plan with ranks and segments counted from 0; a transfer of a whole tensor has segment null."""
    return {
        "world": plan.world_size,
        "algorithm": plan.algorithm,
        "elements": plan.elements,
        "steps": [
            {"phase": step.phase, "transfers": [asdict(transfer) for transfer in step.transfers]} for step in plan.steps
        ],
        "elements_transferred": plan.elements_transferred,
        "per_rank": list(plan.elements_per_rank),
    }


def _in_words(plan: Plan) -> list[str]:
    world = plan.world_size
    lines = [f"{plan.algorithm}: all-reduce of {plan.elements:,} elements on {world} GPU{'s' if world > 1 else ''}"]
    if world == 1:
        lines += ["", "No steps: one GPU has nobody to send to. Its gradient is scaled and rounded as with many."]
    else:
        lines += [
            f"Every GPU has a gradient: {gradient(0)} on {gpu(0)} to {gradient(world - 1)} on {gpu(world - 1)}, in "
            f"{world} segments. {sum_in_words((0,), 0, world)} is segment 1 of {gradient(0)}, "
            f"{sum_in_words(range(world), 0, world)} the sum of segment 1 over all GPUs.",
            "",
        ]
        for number, walked_step in enumerate(walk(plan), 1):
            lines += _step_in_words(plan, number, walked_step)
    return [*lines, "", *_totals(plan)]


def _step_in_words(plan: Plan, number: int, walked_step: WalkedStep) -> list[str]:
    lines = [f"Step {number} of {len(plan.steps)}, {walked_step.phase} ({_PHASES[walked_step.phase]}):"]
    lines += [f"  {_move_in_words(plan, move, walked_step)}" for move in walked_step.moves]
    return lines


def _move_in_words(plan: Plan, move: Move, walked_step: WalkedStep) -> str:
    t = move.transfer
    carried, own = (sum_in_words(whose, t.segment, plan.world_size) for whose in (move.carried, (t.dst,)))
    what_then = f"added to {own}" if walked_step.phase in COLLECTING else "kept"
    return f"{gpu(t.src)} sends {carried} to {gpu(t.dst)} ({what_then}): {t.elements:,} elements"


def _totals(plan: Plan) -> list[str]:
    """All four algorithms side by side."""
    rows = [("", "sent by all GPUs", "by the busiest", "steps")]
    for algorithm in ALGORITHMS:
        other = make_plan("all_reduce", algorithm, plan.world_size, plan.elements)
        marker = "* " if algorithm == plan.algorithm else "  "
        busiest = max(other.elements_per_rank)
        rows.append((marker + algorithm, f"{other.elements_transferred:,}", f"{busiest:,}", str(len(other.steps))))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [f"Elements sent for {plan.elements:,} elements on {plan.world_size} GPU(s):"]
    for name, *figures in rows:
        lines.append(
            "  ".join([name.ljust(widths[0]), *(f.rjust(w) for f, w in zip(figures, widths[1:], strict=True))])
        )
    return lines
