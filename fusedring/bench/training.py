"""Train the same model the same way under FusedRingDDP and under torch's DDP over gloo, and time both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fusedring.bench.clock import in_turn, seconds_of, slowest_rank
from fusedring.bench.gpt import GPT, GPTConfig, batch_at, corpus, loss_of
from fusedring.data_parallel.ddp import FusedRingDDP
from fusedring.observe.report import StepReport
from fusedring.plan.plan import make_plan

WARM_UP_STEPS = 2
"""Not timed: the first steps allocate, and torch's DDP rebuilds its buckets after the first."""

EXPOSED_PAIRS = 7


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """What one wrapper achieved.

    loss_start, loss_end: nats per character, mean over the ranks, of the first and the last step.
    step_ms: median over the timed steps of the slowest rank's step. tokens_per_s: of all ranks together.
    exposed_ms: median time per step that averaging gradients adds: step_ms less that of the same step under no_sync.
    bytes_moved: bytes that all ranks together send in one step.
    """

    loss_start: float
    loss_end: float
    step_ms: float
    tokens_per_s: float
    exposed_ms: float
    bytes_moved: int


@dataclass(frozen=True, slots=True)
class History:
    """How it went, step by step. losses: this rank's, in nats per character; step_ms: of the slowest rank.

    report: the last backward of a FusedRingDDP; None for torch's DDP.
    """

    losses: tuple[float, ...]
    step_ms: tuple[float, ...]
    report: StepReport | None


def train(
    wrapper: str,
    *,
    steps: int,
    batch_size: int,
    config: GPTConfig,
    wire: str | None,
    algorithm: str,
    progress: Callable[[float], None],
) -> tuple[TrainingRun, History]:
    """Train on this rank of the default group for `steps` steps; every rank returns the same TrainingRun.

    wrapper: 'fusedring' or 'torch_ddp'. progress: called after each step with this rank's loss.
    """
    torch.manual_seed(0)
    model, world, rank = GPT(config), dist.get_world_size(), dist.get_rank()
    replica: FusedRingDDP | DistributedDataParallel
    if wrapper == "fusedring":
        replica = FusedRingDDP(model, wire_dtype=wire, algorithm=algorithm)  # type: ignore[arg-type]
    else:
        replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = corpus()
    losses: list[float] = []
    times: list[float] = []
    for step in range(steps):
        batch = batch_at(data, config, step=step, rank=rank, size=batch_size)
        start = time.perf_counter()
        loss = loss_of(replica, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
        progress(losses[-1])
    report = replica.report() if isinstance(replica, FusedRingDDP) else None
    times = slowest_rank(times)
    exposed = _exposed(replica, batch_at(data, config, step=steps, rank=rank, size=batch_size))
    ends = torch.tensor([losses[0], losses[-1]], dtype=torch.float64)
    dist.all_reduce(ends)
    step_seconds = statistics.median(times[min(WARM_UP_STEPS, steps - 1) :])
    run = TrainingRun(
        loss_start=float(ends[0]) / world,
        loss_end=float(ends[1]) / world,
        step_ms=1e3 * step_seconds,
        tokens_per_s=world * batch_size * config.context / step_seconds,
        exposed_ms=1e3 * exposed,
        bytes_moved=_bytes_moved(replica, world),
    )
    return run, History(tuple(losses), tuple(1e3 * seconds for seconds in times), report)


def _exposed(replica: FusedRingDDP | DistributedDataParallel, batch: torch.Tensor) -> float:
    """Seconds that averaging adds to forward and backward: medians of synced and unsynced passes, taken in turn."""

    def timed() -> float:
        took = seconds_of(lambda: loss_of(replica, batch).backward())  # type: ignore[no-untyped-call]
        replica.zero_grad()
        return took

    def unsynced() -> float:
        with replica.no_sync():
            return timed()

    times = in_turn({"synced": timed, "unsynced": unsynced}, EXPOSED_PAIRS)
    with_sync, without = (statistics.median(slowest_rank(seconds)) for seconds in times.values())
    return max(0.0, with_sync - without)


def _bytes_moved(replica: FusedRingDDP | DistributedDataParallel, world: int) -> int:
    """What the plans say for FusedRingDDP's launches; for torch's DDP what gloo's ring needs for the same gradients."""
    report = replica.report() if isinstance(replica, FusedRingDDP) else None
    if report is None:
        return 2 * (world - 1) * sum(p.nbytes for p in replica.parameters())
    assert isinstance(replica, FusedRingDDP)
    wire = replica.config.wire or torch.float32
    return sum(
        make_plan("all_reduce", launch.algorithm, world, launch.bytes // 4).elements_transferred * wire.itemsize
        for launch in report.launches
    )
