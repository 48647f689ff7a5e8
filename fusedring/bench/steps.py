"""Time training steps, forward and backward, in every way: all ways take turns, and the slowest rank counts.

Exposed communication is what averaging adds to a step: the median of a step less the median of the same wrapper's step
under no_sync. '1 rank' is the bare module on rank 0, while the other ranks wait: what a step takes where nobody else
needs the machine.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from fusedring.bench.clock import Timing, in_turn, seconds_of, settle, slowest_rank
from fusedring.bench.exact import ExactInputs
from fusedring.bench.models import Model
from fusedring.bench.place import Place, total
from fusedring.data_parallel.ddp import FusedRingDDP

ONE_RANK, TORCH, TORCH_BF16 = "1 rank", "torch DDP", "torch DDP, bf16 hook"
FUSEDRING, FUSEDRING_BF16 = "FusedRingDDP", "FusedRingDDP, bf16 wire"

WARM_UP_TURNS = 5
"""Not counted, as torch's DDP rebuilds its buckets after the first step and allocators settle."""

VERIFIED_STEPS = 3
"""Before and after torch's DDP and FusedRingDDP have learnt in which order gradients come."""


@dataclass(frozen=True, slots=True)
class Step:
    """How the steps of one way went. wrong: inexact elements of gradients, of all ranks; if any, nothing was timed.

    step, no_sync: whole steps, synced and not. exposed: seconds that averaging adds, which noise can make negative.
    overlap: the part of the time in launches that lay within backward, 0 to 1, where the wrapper tells.
    """

    model: str
    way: str
    parameters: int
    wrong: int
    step: Timing | None
    no_sync: Timing | None
    exposed: float | None
    overlap: float | None


def wrappers(place: Place) -> Mapping[str, Callable[[nn.Module], nn.Module]]:
    """By name, what a module is wrapped in."""
    devices = [place.device.index] if place.device.type == "cuda" else None

    def torch_ddp(module: nn.Module, *, compress: bool) -> nn.Module:
        model = DistributedDataParallel(module, device_ids=devices, process_group=place.group)
        if compress:
            # Under its own name torch takes it over NCCL only; it works over gloo as well.
            model.register_comm_hook(place.group, lambda group, bucket: bf16_compress_hook(group, bucket))
        return model

    def fused(module: nn.Module, wire: Any) -> nn.Module:
        return FusedRingDDP(module, device_ids=devices, wire_dtype=wire)

    return {
        TORCH: partial(torch_ddp, compress=False),
        TORCH_BF16: partial(torch_ddp, compress=True),
        FUSEDRING: partial(fused, wire=None),
        FUSEDRING_BF16: partial(fused, wire="bf16"),
    }


def measure_steps(
    model: Model, place: Place, *, turns: int, ways: Mapping[str, Callable[[nn.Module], nn.Module]] | None = None
) -> list[Step]:
    """Verify every way, then time those that are right (collective; all ranks return the same)."""
    torch.manual_seed(0)
    module = model.make().to(place.device)
    parameters = sum(p.numel() for p in module.parameters() if p.requires_grad)
    torch.manual_seed(1 + place.rank)
    batch = model.batch().to(place.device)
    ways = wrappers(place) if ways is None else ways
    replicas = {name: wrap(copy.deepcopy(module)) for name, wrap in ways.items()}
    wrong = {name: _wrong(replica, batch, place, bf16="bf16" in name) for name, replica in replicas.items()}
    overlaps: dict[str, list[float]] = {name: [] for name in replicas}
    acts: dict[str, Callable[[], float]] = {ONE_RANK: partial(_alone, module, batch, place)}
    for name, replica in replicas.items():
        if wrong[name] == 0:
            acts[name] = partial(_timed, replica, batch, place, overlaps[name])
            acts[f"{name}, no_sync"] = partial(_unsynced, replica, batch, place)
    times = in_turn(acts, turns, warm_up=WARM_UP_TURNS)
    timings = {name: Timing(tuple(slowest_rank(seconds))) for name, seconds in times.items()}
    steps = [Step(model.name, ONE_RANK, parameters, 0, timings[ONE_RANK], None, None, None)]
    for name in replicas:
        synced, unsynced = timings.get(name), timings.get(f"{name}, no_sync")
        exposed = synced.median - unsynced.median if synced and unsynced else None
        # The last turns: the first launches of a wrapper follow another order.
        overlap = statistics.median(overlaps[name][-turns:]) if overlaps[name] else None
        steps.append(Step(model.name, name, parameters, wrong[name], synced, unsynced, exposed, overlap))
    return steps


def _backward(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()


def _timed(model: nn.Module, batch: torch.Tensor, place: Place, overlaps: list[float]) -> float:
    took = seconds_of(lambda: _backward(model, batch), place.device)
    report = model.report() if isinstance(model, FusedRingDDP) else None
    if report is not None:
        overlaps.append(report.overlap)
    model.zero_grad()
    return took


def _unsynced(model: Any, batch: torch.Tensor, place: Place) -> float:
    def act() -> None:
        with model.no_sync():
            _backward(model, batch)

    took = seconds_of(act, place.device)
    model.zero_grad()
    return took


def _alone(module: nn.Module, batch: torch.Tensor, place: Place) -> float:
    """A step of the bare module on rank 0, in which nobody else has anything to do."""
    took = seconds_of(lambda: _backward(module, batch) if place.rank == 0 else None, place.device)
    dist.barrier()
    module.zero_grad()
    return took if place.rank == 0 else 0.0


def _wrong(model: nn.Module, batch: torch.Tensor, place: Place, *, bf16: bool) -> int:
    """Elements of gradients that are not exact after a step, over all ranks.

    A hook of each parameter, which sees the gradient before any wrapper does, puts exact numbers in its place.
    """
    inputs = ExactInputs(torch.float32, torch.bfloat16 if bf16 else None, place.world, place.device)
    trained = [p for p in model.parameters() if p.requires_grad]
    starts = [0, *accumulate(p.numel() for p in trained)][: len(trained)]
    wrong = 0

    def replace(start: int, gradient: torch.Tensor) -> torch.Tensor:
        numbers = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        inputs.fill(numbers, place.rank, start=start)
        return numbers

    hooks = [partial(replace, start) for start in starts]
    handles = [p.register_hook(hook) for p, hook in zip(trained, hooks, strict=True)]  # type: ignore[no-untyped-call]
    for _ in range(VERIFIED_STEPS):
        _backward(model, batch)
        settle(place.device)
        for parameter, start in zip(trained, starts, strict=True):
            assert parameter.grad is not None
            wrong += inputs.wrong(parameter.grad.contiguous(), start=start)
        model.zero_grad()
    for handle in handles:
        handle.remove()
    return total(wrong)
