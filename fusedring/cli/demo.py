"""Train a small GPT on several ranks, with FusedRingDDP and with torch's DDP, and compare."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fusedring.bench.gpt import GPTConfig
from fusedring.bench.training import History, train
from fusedring.cli.arguments import whole_number
from fusedring.config import ALGORITHMS
from fusedring.group.spawn import RanksFailedError, spawn
from fusedring.observe.pictures import MATPLOTLIB_MISSING, has_matplotlib
from fusedring.observe.plots import draw_training
from fusedring.observe.tracing import trace

LOSS_TOLERANCE = {None: 0.02, "fp16": 0.05, "bf16": 0.1}
"""How far apart the two final losses may be, in nats: rounding differs and training amplifies that."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What every rank is told."""

    ranks: int
    steps: int
    wire: str | None
    algorithm: str
    quiet: bool
    trace: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `fusedring demo`."""
    parser.add_argument("--ranks", type=whole_number(1), default=2, help="processes to train with (default 2)")
    parser.add_argument("--steps", type=whole_number(1), default=40, help="training steps of each wrapper (default 40)")
    parser.add_argument("--wire", choices=("fp16", "bf16"), help="wire dtype of the ring (default: float32)")
    parser.add_argument("--algorithm", choices=("auto", *ALGORITHMS), default="ring", help="default ring")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write demo.json, a plot and a trace there")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(options: argparse.Namespace) -> int:
    """Start the ranks, wait for them and print what they measured. Exit code 1 if the losses disagree."""
    out: Path | None = options.out
    settings = DemoOptions(
        options.ranks, options.steps, options.wire, options.algorithm, options.json, out and out / "trace"
    )
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"--out: cannot make {out}: {error.strerror}", file=sys.stderr)
        return 2
    try:
        runs, histories = spawn(train_rank, settings.ranks, settings)[0]
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except RanksFailedError as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    result = {"ranks": settings.ranks, "steps": settings.steps, "wire": settings.wire, **runs}
    if out is not None and settings.trace is not None:
        result["plot"] = _plot(histories, out / "demo.png")
        result["trace"] = str(settings.trace / "trace.json")
        (out / "demo.json").write_text(json.dumps(result, indent=2) + "\n")
    apart = abs(runs["fusedring"]["loss_end"] - runs["torch_ddp"]["loss_end"])
    tolerance = LOSS_TOLERANCE[settings.wire]
    if options.json:
        print(json.dumps(result))
    else:
        _print_table(result, apart, tolerance)
        if out is not None:
            written = [str(out / "demo.json"), result["plot"], f"{result['trace']} (open it in ui.perfetto.dev)"]
            print("\n".join(["wrote", *(f"  {path}" for path in written if path)]))
    if apart > tolerance:
        print(f"the final losses differ by {apart:.4f}, more than {tolerance}", file=sys.stderr)
        return 1
    return 0


def _plot(histories: dict[str, History], path: Path) -> str | None:
    """Draw the runs; the path, or None with a word on stderr if matplotlib is missing."""
    if not has_matplotlib():
        print(MATPLOTLIB_MISSING, file=sys.stderr)
        return None
    report = histories["fusedring"].report
    assert report is not None
    draw_training(
        {name: history.losses for name, history in histories.items()},
        {name: history.step_ms for name, history in histories.items()},
        report,
        path,
    )
    return str(path)


def train_rank(settings: DemoOptions) -> tuple[dict[str, Any], dict[str, History]]:
    """One rank: train twice from the same start; rank 0's progress bar goes to stderr."""
    from rich.console import Console
    from rich.progress import Progress

    silent = settings.quiet or dist.get_rank() > 0
    runs: dict[str, Any] = {}
    histories: dict[str, History] = {}
    with Progress(console=Console(stderr=True), disable=silent) as bar:
        for wrapper in ("fusedring", "torch_ddp"):
            task = bar.add_task(wrapper, total=settings.steps)

            def advance(loss: float, task: Any = task, name: str = wrapper) -> None:
                bar.update(task, advance=1, description=f"{name} loss {loss:.3f}")

            traced = settings.trace if wrapper == "fusedring" else None
            with trace(traced) if traced is not None else nullcontext():
                run, histories[wrapper] = train(
                    wrapper,
                    steps=settings.steps,
                    batch_size=8,
                    config=GPTConfig(),
                    wire=settings.wire,
                    algorithm=settings.algorithm,
                    progress=advance,
                )
            runs[wrapper] = asdict(run)
    return runs, histories


def _print_table(result: dict[str, Any], apart: float, tolerance: float) -> None:
    from rich.console import Console
    from rich.table import Table

    ring, ddp = result["fusedring"], result["torch_ddp"]
    table = Table(title=f"{result['ranks']} ranks, {result['steps']} steps, wire {result['wire'] or 'float32'}")
    table.add_column("")
    table.add_column("FusedRingDDP", justify="right")
    table.add_column("torch DDP (gloo)", justify="right")
    for label, key, form in (
        ("loss at start", "loss_start", "{:.4f}"),
        ("loss at end", "loss_end", "{:.4f}"),
        ("step (ms)", "step_ms", "{:.1f}"),
        ("tokens/s", "tokens_per_s", "{:,.0f}"),
        ("exposed communication (ms)", "exposed_ms", "{:.1f}"),
        ("bytes sent per step, all ranks", "bytes_moved", "{:,}"),
    ):
        table.add_row(label, form.format(ring[key]), form.format(ddp[key]))
    console = Console()
    console.print(table)
    console.print(f"final losses differ by {apart:.4f} (tolerance {tolerance})")
