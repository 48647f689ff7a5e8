"""Pictures of plans: PNG files 1200 pixels wide. They need matplotlib, an optional dependency."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedring.plan.plan import Plan
from fusedring.plan.walk import Move, WalkedStep, gpu, sum_in_words, walk

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MATPLOTLIB_MISSING = "a picture needs matplotlib: pip install matplotlib"

MOST_GPUS_DRAWN = 16
"""Above that nobody could read the picture."""

DPI = 100
WIDTH_INCHES = 12.0
_RING, _NODE = 0.78, 0.15
"""Radii, in a panel that is 3.4 units wide."""

_OWN, _PARTIAL, _FULL = "#eceff1", "#ffcc66", "#81c784"
COLOURS = ("#1f77b4", "#d95f02", "#2ca02c", "#c2185b", "#7b52ab", "#8c564b", "#00838f", "#827717")
"""Arrows are coloured by segment, or by sender where a whole tensor travels."""


def has_matplotlib() -> bool:
    """Whether pictures can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_walk(plan: Plan, path: Path) -> None:
    """One panel per step: the GPUs in a circle, what they send, and what each holds afterwards."""
    from matplotlib.patches import Patch

    steps = walk(plan)
    columns = _columns(steps, plan.world_size)
    rows = -(-len(steps) // columns) or 1
    figure = new_figure(rows * (0.79 * WIDTH_INCHES / columns + 0.5) + 1.1)
    many = "GPUs" if plan.world_size > 1 else "GPU"
    _headline(figure, f"{plan.algorithm}: {plan.world_size} {many}, {plan.elements:,} elements")
    if not steps:
        figure.text(0.5, 0.5, "no steps: one GPU has nobody to send to", ha="center", fontsize=14)
    for number, step in enumerate(steps, 1):
        axes = figure.add_subplot(rows, min(columns, len(steps)), number)
        axes.set_title(f"step {number} of {len(steps)}: {step.phase}", fontsize=13)
        _draw_step(axes, plan, step)
    meanings = (("own contribution", _OWN), ("partial sum", _PARTIAL), ("full sum", _FULL))
    figure.legend(
        handles=[Patch(facecolor=colour, edgecolor="#546e7a", label=label) for label, colour in meanings],
        title="a GPU's segments after the step",
        loc="lower center",
        ncols=3,
        frameon=False,
        fontsize=11,
    )
    height = figure.get_figheight()
    figure.subplots_adjust(left=0.01, right=0.99, top=1 - 0.75 / height, bottom=0.6 / height, wspace=0.02, hspace=0.1)
    figure.savefig(path, dpi=DPI, format="png")


def _columns(steps: Sequence[WalkedStep], world: int) -> int:
    """Panels in a row: few enough that every arrow keeps a legible label at 1200 pixels."""
    if any(_crowded(step, world) for step in steps) and world > 4:
        return 1
    return 2


def _crowded(step: WalkedStep, world: int) -> bool:
    return len(step.moves) > world


def _draw_step(axes: Axes, plan: Plan, step: WalkedStep) -> None:
    from matplotlib.patches import Circle, Rectangle

    world = plan.world_size
    axes.set_xlim(-1.7, 1.7)
    axes.set_ylim(-1.3, 1.3)
    axes.set_aspect("equal")
    axes.axis("off")
    nodes = [_on_circle(rank, world) for rank in range(world)]
    for move in step.moves:
        _draw_arrow(axes, plan, move, nodes, crowded=_crowded(step, world))
    cell, height = min(0.16, 0.68 / world), 0.17
    for rank, (x, y) in enumerate(nodes):
        axes.add_patch(Circle((x, y), _NODE, facecolor="#37474f", zorder=3))
        axes.text(x, y, gpu(rank), ha="center", va="center", fontsize=8, weight="bold", color="white", zorder=5)
        outwards = x / _RING, y / _RING
        centre_x = x + outwards[0] * (_NODE + 0.07 + cell * world / 2)
        centre_y = y + outwards[1] * (_NODE + 0.07 + height / 2)
        for segment, held in enumerate(step.after[rank]):
            left = centre_x + cell * (segment - world / 2)
            colour = _FULL if len(held) == world else _PARTIAL if len(held) > 1 else _OWN
            axes.add_patch(
                Rectangle(
                    (left, centre_y - height / 2), cell, height, facecolor=colour, edgecolor="#546e7a", linewidth=0.8
                )
            )
            axes.text(left + cell / 2, centre_y, str(segment + 1), ha="center", va="center", fontsize=8)


def _draw_arrow(axes: Axes, plan: Plan, move: Move, nodes: Sequence[tuple[float, float]], *, crowded: bool) -> None:
    from matplotlib.patches import FancyArrowPatch

    t = move.transfer
    colour = COLOURS[(t.src if t.segment is None else t.segment) % len(COLOURS)]
    length = math.dist(nodes[t.src], nodes[t.dst])
    start, stop = (_between(nodes[a], nodes[b], _NODE / length) for a, b in ((t.src, t.dst), (t.dst, t.src)))
    bend = 0.12 if crowded or plan.world_size == 2 else 0.0
    axes.add_patch(
        FancyArrowPatch(
            start,
            stop,
            connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-|>",
            mutation_scale=9 if crowded else 14,
            linewidth=1.0 if crowded else 1.8,
            color=colour,
            shrinkA=0,
            shrinkB=0,
            zorder=2,
        )
    )
    text = sum_in_words(move.carried, t.segment, plan.world_size, short=True)
    look: dict[str, Any] = {"color": colour, "fontsize": 9 if crowded else 11, "ha": "center", "va": "center"}
    if plan.algorithm == "ring" and plan.world_size > 2:  # beside the arrow, within the ring
        middle = _between(start, stop, 0.5)
        above_or_below = abs(middle[1]) > 1.2 * abs(middle[0])
        x, y = _between(middle, (0.0, 0.0), (0.09 if above_or_below else 0.06) / math.hypot(*middle))
        look["ha"] = "center" if above_or_below else "right" if x > 0 else "left"
        look["va"] = "center" if abs(y) < 0.1 else "top" if y > 0 else "bottom"
    else:  # on the arrow; where many cross, near the sender
        x, y = _on_curve(start, stop, bend, min(0.4, 0.2 / math.dist(start, stop)) if crowded else 0.5)
        look["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.9}
    axes.text(x, y, text, zorder=4, **look)


def _on_circle(rank: int, world: int) -> tuple[float, float]:
    """The ring runs clockwise and begins at the top."""
    angle = math.pi / 2 - 2 * math.pi * rank / world
    return _RING * math.cos(angle), _RING * math.sin(angle)


def _between(start: tuple[float, float], stop: tuple[float, float], at: float) -> tuple[float, float]:
    return start[0] + at * (stop[0] - start[0]), start[1] + at * (stop[1] - start[1])


def _on_curve(start: tuple[float, float], stop: tuple[float, float], bend: float, at: float) -> tuple[float, float]:
    """A point of matplotlib's arc3: a quadratic curve whose control point stands `bend` lengths off the middle."""
    dx, dy = stop[0] - start[0], stop[1] - start[1]
    control = ((start[0] + stop[0]) / 2 + bend * dy, (start[1] + stop[1]) / 2 - bend * dx)
    return _between(_between(start, control, at), _between(control, stop, at), at)


def new_figure(height_inches: float) -> Figure:
    """An empty figure of the usual width."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_INCHES, height_inches))


def _headline(figure: Figure, text: str) -> None:
    figure.text(0.5, 1 - 0.3 / figure.get_figheight(), text, ha="center", va="center", fontsize=15, weight="bold")
