"""What ranks write down of their launches on a GPU, and what they find by comparing it."""

from __future__ import annotations

import pytest
import torch

import fusedring
from fusedring.transport.launch_log import ENTRIES, LOG_BYTES, LaunchLog

CHANNELS = 2


def headers(*scales: float) -> list[bytes]:
    from fusedring.plan.launch import Launch
    from fusedring.transport.agreement import pack

    return [pack(Launch("all_reduce", "ring", 16, "float32", "float32", scale), None) for scale in scales]


def test_launch_logs():
    memory = [torch.zeros(LOG_BYTES, dtype=torch.uint8) for _ in range(3)]
    ranks = [LaunchLog(rank, memory) for rank in range(3)]
    same, other = headers(1.0, 2.0)
    for _ in range(ENTRIES // 2):
        for rank in ranks:
            rank.enter(same)
    for rank in ranks:
        rank.compare()
    ranks[0].enter(same)
    ranks[1].enter(other)
    ranks[0].compare()  # rank 2 may still launch whatever it likes
    ranks[2].enter(same)
    texts = set()
    for rank in ranks:
        with pytest.raises(fusedring.MismatchError) as raised:
            rank.compare()
        texts.add(str(raised.value))
    assert len(texts) == 1
    assert "ranks 0, 2" in texts.pop()


def test_a_launch_log_that_runs_far_ahead():
    memory = [torch.zeros(LOG_BYTES, dtype=torch.uint8) for _ in range(2)]
    fast, slow = (LaunchLog(rank, memory) for rank in range(2))
    same, other = headers(1.0, 2.0)
    for _ in range(ENTRIES + 3):
        fast.enter(same)
    slow.enter(other)  # overwritten at the fast rank, so it cannot be compared any more
    slow.compare()
    for _ in range(9):
        slow.enter(same)
    slow.compare()
    slow.enter(other)
    with pytest.raises(fusedring.MismatchError):
        slow.compare()
