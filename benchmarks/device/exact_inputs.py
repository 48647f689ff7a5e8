"""Inputs whose mean is exact in every dtype, so that a wrong number shows without a reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def exact_inputs(world: int, elements: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """For each rank numbers whose mean, and all on the way to it, is exact in every dtype, for 2, 4 or 8 ranks.

    Rank r has p + r, p from 0 to 3. Divided by W they are below 2 and multiples of 1/8, and so are sums of 8, below 8.
    The mean of means, of a second run on the same tensors, is exact too: multiples of 1/16 below 8 have 7 bits.
    """
    pattern = (torch.arange(elements, device=device, dtype=torch.int32) & 3).to(dtype)
    return [pattern + rank for rank in range(world)]


def wrong_numbers(tensors: Sequence[torch.Tensor]) -> int:
    """How many are not the mean of `exact_inputs`."""
    world, first = len(tensors), tensors[0]
    want = (torch.arange(first.numel(), device=first.device, dtype=torch.int32) & 3).to(first.dtype) + (world - 1) / 2
    return sum(int((x != want).sum()) for x in tensors)
