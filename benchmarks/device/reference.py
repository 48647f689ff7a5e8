"""What a reduction must give, in plain torch operations on any device: to the bit, and how far from the exact sum.

The order is the plan's, the arithmetic that of fusedring/engines/arithmetic.py: one product and one sum for each
contribution, rounded separately, and one rounding to the wire wherever values cross between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedring.config import accumulate_dtype
from fusedring.plan.plan import make_plan, split_evenly

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def reduced(inputs: Sequence[torch.Tensor], algorithm: str, wire: torch.dtype, factor: float) -> torch.Tensor:
    """What all_reduce leaves at every rank. inputs: one flat tensor for each rank; factor: of every contribution."""
    dtype, world = inputs[0].dtype, len(inputs)
    scaled = [x.to(accumulate_dtype(dtype)) * factor for x in inputs]
    if algorithm == "ring":
        total = torch.empty_like(scaled[0])
        plan = make_plan("all_reduce", "ring", world, total.numel())
        for segment in range(world):
            start, stop = plan.bounds(segment)
            partial = _rounded(scaled[segment][start:stop], wire)
            for hop in range(1, world):
                partial = _rounded(partial + scaled[(segment + hop) % world][start:stop], wire)
            total[start:stop] = partial
    else:
        total = _rounded(scaled[0], wire)
        for x in scaled[1:]:
            total = total + _rounded(x, wire)
        total = _rounded(total, wire)
    return total.to(dtype)


def gathered(inputs: Sequence[torch.Tensor], wire: torch.dtype) -> torch.Tensor:
    """What all_gather leaves at every rank: part r is rank r's, rounded to the wire."""
    dtype, parts = inputs[0].dtype, split_evenly(inputs[0].numel(), len(inputs))
    own = [x[start:stop].to(accumulate_dtype(dtype)) for x, (start, stop) in zip(inputs, parts, strict=True)]
    return torch.cat([_rounded(x, wire) for x in own]).to(dtype)


def exact(inputs: Sequence[torch.Tensor], factor: float) -> torch.Tensor:
    """The scaled sum in float64."""
    return torch.stack([x.double() for x in inputs]).sum(0) * factor


def error_bound(inputs: Sequence[torch.Tensor], algorithm: str, wire: torch.dtype, factor: float) -> torch.Tensor:
    """How far from `exact` a result without overflow may be, for each element, in float64.

    Rounding to a dtype multiplies by 1 + d with |d| <= u = eps / 2, or adds at most half the smallest subnormal. On its
    way into the result a contribution is rounded once as a product, by at most W - 1 sums in the accumulate dtype, n
    times to the wire, and once to the dtype of the result. On the ring n = W: where it starts and after each of W - 1
    hops. For the direct algorithms n = 2: as a contribution and as a sum. A float64 gets to a 16-bit wire by way of
    float32, which is one more rounding each time. So with S the sum of the contributions' magnitudes

        |result - exact| <= S * ((1 + u_accumulate)^W * ((1 + u_wire) * (1 + u_float32))^n * (1 + u_result) - 1) + m * t

    where m counts the roundings to the wire or the result in all (W + 1 and one more), and t is the smallest subnormal
    of the narrower of the two: twice what one of them can add, which leaves room for the factors that follow it.
    `exact` itself is rounded W times in float64, for which W more factors stand.
    """
    world, dtype = len(inputs), inputs[0].dtype
    narrowings = world if algorithm == "ring" else 2
    by_way_of = _unit(torch.float32) if wire.itemsize == 2 else 0.0
    growth = (
        (1 + _unit(accumulate_dtype(dtype))) ** world
        * ((1 + _unit(wire)) * (1 + by_way_of)) ** narrowings
        * (1 + _unit(dtype))
        * (1 + _unit(torch.float64)) ** world
    )
    # Unless the wire is float64, growth - 1 is far above the rounding of this very line.
    beyond = growth - 1 if wire != torch.float64 else (2 * world + narrowings + 2) * _unit(torch.float64)
    smallest = max(torch.finfo(d).smallest_normal * torch.finfo(d).eps for d in (wire, dtype))
    magnitude = torch.stack([x.double().abs() for x in inputs]).sum(0) * abs(factor)
    return magnitude * beyond + (world + 2) * smallest


def different_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements differ in a bit. NaN equals NaN, whatever its payload."""
    integers = _INTEGERS[a.element_size()]
    return int(((a.view(integers) != b.view(integers)) & ~(a.isnan() & b.isnan())).sum())


def _rounded(values: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    """`values`, in the accumulate dtype, as they come out of the wire."""
    narrow = values.to(torch.float32) if wire.itemsize == 2 else values
    return narrow.to(wire).to(values.dtype)


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2
