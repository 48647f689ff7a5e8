"""The slow, obvious reference: what every element of a reduction is, rounding by rounding, in the plan's order."""

from __future__ import annotations

import numpy as np
import torch

from fusedring.plan.plan import make_plan

NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16}


def round_to(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """`values` (float32 or float64) rounded to nearest even to `dtype`, given in the dtype they came in."""
    if dtype == torch.bfloat16:
        bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
        return rounded.astype(values.dtype)
    narrow = values.astype(np.float32) if dtype == torch.float16 else values
    with np.errstate(over="ignore"):
        return narrow.astype(NUMPY[dtype]).astype(values.dtype)


def all_reduce(
    inputs: list[torch.Tensor], algorithm: str, wire: torch.dtype | None, op: str = "avg", scale: float = 1.0
) -> torch.Tensor:
    """What every rank must hold afterwards, bit for bit. inputs: one flat tensor per rank."""
    dtype, world = inputs[0].dtype, len(inputs)
    wire = wire or dtype
    accumulate = np.float64 if dtype == torch.float64 else np.float32
    factor = accumulate(scale / world if op == "avg" else scale)
    wide = [x.to(torch.float64 if dtype == torch.float64 else torch.float32).numpy() for x in inputs]
    scaled = [factor * x for x in wide]
    elements = len(wide[0])
    total = np.zeros(elements, accumulate)
    if algorithm == "ring":
        plan = make_plan("all_reduce", "ring", world, elements)
        for segment in range(world):
            start, stop = plan.bounds(segment)
            partial = round_to(scaled[segment][start:stop], wire)
            for hop in range(1, world):
                partial = round_to(partial + scaled[(segment + hop) % world][start:stop], wire)
            total[start:stop] = partial
    else:
        for rank in range(world):
            total = round_to(scaled[0], wire) if rank == 0 else total + round_to(scaled[rank], wire)
        total = round_to(total, wire)
    return torch.tensor(total).to(dtype)
