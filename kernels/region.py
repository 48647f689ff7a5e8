"""What a launch is given beside its bucket: a rank's view of the regions, and where it leaves what it learns."""

from dataclasses import dataclass

import torch

from fusedring.kernels.layout import MOST_CHANNELS


@dataclass(frozen=True)
class Region:
    """One rank's view of all regions (see layout.py).

    bases: their addresses in this process, and that of this rank's status page, int64 (W + 1,), on the device.
    parity_bytes: size of one of the two sets of slots, a multiple of 256. channels: programs of every launch; always
    the same number, since each counts its own epochs. platform: INTERPRETER, NVIDIA or AMD of layout.py.
    """

    bases: torch.Tensor
    rank: int
    world: int
    parity_bytes: int
    channels: int
    platform: int
    cooperative: bool = True
    stages: int = 1

    def __post_init__(self) -> None:
        assert 1 <= self.channels <= MOST_CHANNELS
        assert self.parity_bytes % 256 == 0


@dataclass(frozen=True)
class Totals:
    """What a launch learns of the values that this rank completed, by channel.

    squares: float32 (channels,), the sum of their squares; unbounded: int32 (channels,), 1 if one is inf or NaN.
    """

    squares: torch.Tensor
    unbounded: torch.Tensor
