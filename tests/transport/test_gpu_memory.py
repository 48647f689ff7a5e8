"""GPUs' memory as torch maps it into each other: where a peer's tensor begins, and which links there are."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusedring.transport.gpu_memory import Peers

CHANNELS = 2


@pytest.mark.parametrize("same_index", [False, True])
def test_addresses_of_peers(monkeypatch, same_index):
    """Pointers are those of allocations, in which the tensor begins somewhere; the same place at all ranks."""
    from torch.distributed import _symmetric_memory

    allocation = torch.zeros(4096, dtype=torch.uint8)

    class Handle:
        buffer_ptrs = (1_000_000, allocation.data_ptr(), 3_000_000)

    asked = {}
    monkeypatch.setattr(_symmetric_memory, "empty", lambda nbytes, dtype, device: allocation[512 : 512 + nbytes])
    monkeypatch.setattr(
        _symmetric_memory, "rendezvous", lambda tensor, group: asked.update(group=group, tensor=tensor) or Handle()
    )
    monkeypatch.setattr(dist, "get_rank", lambda group: {"the group": 1}[group])
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    way = Peers(_Device(), "the group", same_index=same_index)
    memory = way.allocate(100)
    assert memory.numel() == 100
    assert way.map(memory) == [1_000_512, memory.data_ptr(), 3_000_512]
    assert asked["tensor"] is memory
    assert ("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES" in os.environ) is same_index
    way.close()


class _Device:
    device = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("matrix", "world", "full"),
    [
        ([[0, 18, 18], [18, 0, 18], [18, 18, 0]], 3, True),
        ([[0, 4, 0], [4, 0, 4], [0, 4, 0]], 3, False),
        ([[0]], 2, False),
        (RuntimeError("no such detector"), 2, False),
    ],
)
def test_whether_every_two_gpus_have_links_of_their_own(monkeypatch, matrix, world, full):
    from torch._C import _distributed_c10d

    def detect(device_type: Any, connection: str) -> Any:
        assert connection == "nvlink"
        if isinstance(matrix, Exception):
            raise matrix
        return type("Connectivity", (), {"matrix": matrix})

    monkeypatch.setattr(_distributed_c10d, "_detect_dma_connectivity", detect)
    monkeypatch.setattr(dist, "get_world_size", lambda group: world)
    assert Peers(_Device(), "the group", same_index=False).is_full_mesh() is full
    assert not Peers(_Device(), "the group", same_index=True).is_full_mesh()
