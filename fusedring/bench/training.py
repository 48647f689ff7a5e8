"""Train the same model the same way under FusedRingDDP and under torch's DDP over gloo, and time both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedring.bench.gpt import GPT, GPTConfig, batch_at, corpus, loss_of
from fusedring.ddp import FusedRingDDP
from fusedring.plan import make_plan

WARM_UP_STEPS = 2
"""Not timed: the first steps allocate, and torch's DDP rebuilds its buckets after the first."""


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


def train(
    wrapper: str,
    *,
    steps: int,
    batch_size: int,
    config: GPTConfig,
    wire: str | None,
    algorithm: str,
    progress: Callable[[float], None],
) -> TrainingRun:
    """Train on this rank of the default group for `steps` steps; every rank returns the same figures.

    wrapper: 'fusedring' or 'torch_ddp'. progress: called after each step with its local loss.
    """
    torch.manual_seed(0)
    model, wrapped = GPT(config), None
    if wrapper == "fusedring":
        wrapped = model_in_ring = FusedRingDDP(model, wire_dtype=wire, algorithm=algorithm)  # type: ignore[arg-type]
        bytes_moved = _ring_bytes(model_in_ring, wire)
    else:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        world = dist.get_world_size()
        bytes_moved = 2 * (world - 1) * sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data, rank = corpus(), dist.get_rank()
    losses, times = [], []
    for step in range(steps):
        batch = batch_at(data, config, step=step, rank=rank, size=batch_size)
        start = time.perf_counter()
        loss = _step(wrapped, optimizer, batch)
        if step >= WARM_UP_STEPS or steps <= WARM_UP_STEPS:
            times.append(time.perf_counter() - start)
        losses.append(loss)
        progress(loss)
    return losses, times  # type: ignore[return-value]
