"""Whether cooperative launches of two virtual ranks, as ranks on several GPUs use, run next to each other here."""

from __future__ import annotations

import torch

from benchmarks.device.exact_inputs import exact_inputs
from fusedring.errors import CollectiveTimeoutError
from fusedring.testing import virtual_ranks

SIDE_BY_SIDE = "they run next to each other"
ONE_BY_ONE = "one waits for the other to end"


def cooperative_launches(device: torch.device) -> str:
    """SIDE_BY_SIDE or ONE_BY_ONE. Either is right: it is the driver's answer."""
    answer = SIDE_BY_SIDE
    for world in (1, 2):  # the lone rank, so that its kernel is loaded
        with virtual_ranks(world, device, cooperative=True) as ranks:
            collective = ranks.prepare("all_reduce", exact_inputs(world, 5_003, torch.float32, device))
            collective.run(timeout=2.0)
            try:
                collective.check()
            except CollectiveTimeoutError:
                answer = ONE_BY_ONE
    return answer
