"""Plots of training runs and of bandwidths, as PNG files. They need matplotlib, as pictures.py does."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fusedring.observe.pictures import COLOURS, DPI, new_figure
from fusedring.observe.report import StepReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_training(
    losses: dict[str, Sequence[float]], step_ms: dict[str, Sequence[float]], report: StepReport, path: Path
) -> None:
    """The loss and the time of every step of each way to train, and how the last backward of `report` overlapped."""
    figure = new_figure(8.0)
    for place, (title, series) in enumerate((("loss (nats per character)", losses), ("step (ms)", step_ms)), 1):
        axes = figure.add_subplot(2, 2, place)
        for number, (name, values) in enumerate(series.items()):
            axes.plot(
                range(1, len(values) + 1),
                values,
                ("-", "--")[number % 2],
                label=name,
                color=COLOURS[number],
                linewidth=1.8,
            )
        axes.set_title(title)
        axes.set_xlabel("step")
        # The first steps are slow and the first losses high; what matters comes later.
        axes.set_ylim(0, 2 * statistics.median(value for values in series.values() for value in values))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    _draw_overlap(figure.add_subplot(2, 1, 2), report)
    figure.tight_layout()
    figure.savefig(path, dpi=DPI, format="png")


def draw_overlap(report: StepReport, path: Path) -> None:
    """A backward pass and its launches on one axis of time."""
    figure = new_figure(5.0)
    _draw_overlap(figure.add_subplot(), report)
    figure.tight_layout()
    figure.savefig(path, dpi=DPI, format="png")


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """What is drawn side by side: busbw in bytes per second by bytes of the tensor, for each way, and the bound's."""

    title: str
    ways: Mapping[str, Mapping[int, float]]
    bound: Mapping[int, float]


def draw_bandwidths(panels: Sequence[Bandwidths], conditions: str, path: Path) -> None:
    """busbw over size, each of `panels` in a panel, with the bound drawn in. conditions: written below."""
    columns = min(len(panels), 2)
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(5.0 * rows + 1.0)
    names = list(dict.fromkeys(name for panel in panels for name in panel.ways))
    for place, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, place)
        for name, rates in panel.ways.items():
            number = names.index(name)
            axes.plot(
                list(rates),
                [rate / 1e9 for rate in rates.values()],
                marker="o",
                linestyle=("-", "--", ":")[number // len(COLOURS) % 3],
                color=COLOURS[number % len(COLOURS)],
                label=name,
            )
        axes.plot(list(panel.bound), [rate / 1e9 for rate in panel.bound.values()], "k--", linewidth=2, label="bound")
        axes.set_title(panel.title)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("bytes")
        axes.set_ylabel("busbw (GB/s)")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=9)
    figure.text(0.01, 0.01, conditions, fontsize=8, va="bottom")
    figure.tight_layout(rect=(0.0, 0.8 / figure.get_figheight(), 1.0, 1.0))
    figure.savefig(path, dpi=DPI, format="png")


def _draw_overlap(axes: Axes, report: StepReport) -> None:
    def ms(seconds: float) -> float:
        return 1e3 * (seconds - report.backward_start)

    end = max(launch.end for launch in report.launches)
    axes.barh(0, ms(report.backward_end), left=0, color=COLOURS[0], label="backward")
    axes.barh(
        0, max(0.0, ms(end) - ms(report.backward_end)), left=ms(report.backward_end), color="#b0bec5", label="wait"
    )
    for launch in report.launches:
        row = 1 + launch.bucket
        axes.barh(row, ms(launch.end) - ms(launch.start), left=ms(launch.start), color=COLOURS[1])
        axes.text(ms(launch.end), row, f" {launch.bytes / 2**20:.1f} MiB", va="center", fontsize=9, color=COLOURS[1])
    names = [f"bucket {bucket}" for bucket in range(len(report.buckets))]
    axes.set_yticks(range(len(names) + 1), ["training loop", *names])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * ms(end))
    axes.set_xlabel("ms since backward began")
    axes.set_title(f"the last backward: {report.overlap:.0%} of the communication lay within it")
    axes.legend(frameon=False, loc="lower left")
