"""Where a part runs, and how many programs find room there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.device.sheet import NotRunError, Sheet
from fusedring.engines.cuda import CHANNELS

UNMEASURED = "not measured under the interpreter"

CHANNEL_COUNTS = tuple(sorted({4, 8, 16, 32, 64, CHANNELS}))
"""What is tried where channels matter."""


def device_of(sheet: Sheet) -> torch.device:
    """The device of a part. Raises NotRunError without a GPU."""
    if sheet.dry:
        sheet.fact(gpu=None, gpus=0)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        sheet.fact(gpu=None, gpus=0)
        raise NotRunError("no GPU")
    sheet.fact(gpu=torch.cuda.get_device_name(), gpus=torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def fitting(world: int, counts: Sequence[int], device: torch.device) -> list[int]:
    """Those numbers of channels with which all programs of `world` virtual ranks find room at once."""
    places = torch.cuda.get_device_properties(device).multi_processor_count
    return [channels for channels in counts if world * channels <= places]
