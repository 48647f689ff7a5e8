"""Inputs whose average every way of reducing must give exactly, so that one wrong element shows.

Small whole numbers that depend on the place and on the rank. They are multiples of the number of ranks W, so that it
matters neither whether contributions are divided before they are added or their sum afterwards, nor in which dtype:
every contribution, every partial sum and every average is a whole number that dtype and wire can hold.
"""

from __future__ import annotations

import torch

PERIOD = 1_000_003
"""Elements after which the numbers repeat: a prime, so that no two segments of a tensor are the same."""

MOST_RANKS = 16
"""With more, bfloat16 cannot hold sums that still depend on the rank."""

_MOST_VALUES = 1021


class ExactInputs:
    """The inputs of all ranks, and their average, for one dtype and wire."""

    def __init__(self, dtype: torch.dtype, wire: torch.dtype | None, world: int, device: torch.device) -> None:
        """device: where the tensors are."""
        if not 1 <= world <= MOST_RANKS:
            raise ValueError(f"exact inputs are for 1 to {MOST_RANKS} ranks, got {world}")
        narrowest = max(torch.finfo(dtype).eps, torch.finfo(wire or dtype).eps)
        values = _averages(int(2 / narrowest), world)
        place = torch.arange(PERIOD)
        contributions = [values[(place % 8191 + 31 * rank) % len(values)] for rank in range(world)]
        self._inputs = [(world * each).to(device, dtype) for each in contributions]
        self._average = sum(contributions, torch.zeros_like(place)).to(device, dtype)

    def fill(self, tensor: torch.Tensor, rank: int, *, start: int = 0) -> None:
        """Write the input of `rank`. start: the place of the tensor's first element, if it is part of a larger one."""
        for part, numbers in _parts(tensor, self._inputs[rank], start):
            part.copy_(numbers)

    def wrong(self, tensor: torch.Tensor, *, start: int = 0) -> int:
        """How many elements are not the average."""
        return sum(int((part != numbers).sum()) for part, numbers in _parts(tensor, self._average, start))

    def changed(self, tensor: torch.Tensor, rank: int) -> int:
        """How many elements are not the input of `rank`."""
        return sum(int((part != numbers).sum()) for part, numbers in _parts(tensor, self._inputs[rank], 0))


def _averages(largest: int, world: int) -> torch.Tensor:
    """Whole numbers n such that W ranks may contribute W·n each: at most `largest` in sum, and exact when scaled.

    Contributions are scaled by 1/W as a float32, which is no exact division: numbers where that shows are left out.
    """
    numbers = torch.arange(min(max(2, largest // world**2 + 1), _MOST_VALUES))
    factor = torch.tensor(1 / world, dtype=torch.float32)
    return numbers[(world * numbers).float() * factor == numbers.float()]


def _parts(tensor: torch.Tensor, numbers: torch.Tensor, start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tensor in parts, each beside what belongs there: `numbers` over and over again, from place `start` on."""
    flat, parts, at = tensor.detach().view(-1), [], 0
    while at < flat.numel():
        place = (start + at) % PERIOD
        count = min(PERIOD - place, flat.numel() - at)
        parts.append((flat[at : at + count], numbers[place : place + count]))
        at += count
    return parts
