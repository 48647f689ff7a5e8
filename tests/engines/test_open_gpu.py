"""How GPUs' memory is opened: which way is taken, that all ranks take the same, and what is said of the others."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch

import fusedring
from fusedring.group.groups import communicator_of
from fusedring.plan.plan import split_evenly
from fusedring.transport.gpu_memory import Alone, HostPages, Lent, Pinned
from tests.engines.recording_gpu import PARITY_BYTES, NoPeers, RecordingGpu, pretend_ways
from tests.ranks import run_ranks

CHANNELS = 2


class DropsWrites(Pinned):
    """Some machines claim peer access and drop what is written: here, what goes to another rank."""

    name = "memory that drops writes"

    def map(self, memory: torch.Tensor) -> list[int]:
        addresses = super().map(memory)
        rank = self._workspace.rank
        self._decoys = [torch.zeros_like(region) for region in self._registered]
        return [a if r == rank else self._decoys[r].data_ptr() for r, a in enumerate(addresses)]


class FailsOn(Pinned):
    """`step` fails on one rank only."""

    def __init__(self, gpu: Any, workspace: Any, timeout: float, *, step: str, rank: int) -> None:
        super().__init__(gpu, workspace, timeout)
        self.name = f"a way whose {step} fails"
        self._step, self._failing = step, rank

    def allocate(self, nbytes: int) -> torch.Tensor:
        memory = super().allocate(nbytes)
        self._maybe_fail("allocate")
        return memory

    def map(self, memory: torch.Tensor) -> list[int]:
        self._maybe_fail("map")
        return super().map(memory)

    def _maybe_fail(self, step: str) -> None:
        if step == self._step and self._workspace.rank == self._failing:
            raise OSError(f"no luck with {step}")


def check_ways(rank: int, world: int) -> list[tuple[str, ...]]:
    os.environ["TRITON_INTERPRET"] = "1"

    from fusedring.engines.open_gpu import Probe, lend

    communicator = communicator_of()
    workspace = communicator._workspace
    gpu = RecordingGpu()

    def exchange(text: str, purpose: str) -> list[str]:
        return communicator._rendezvous.exchange(text, timeout=60, purpose=purpose)

    def attempt(*ways: Any) -> Lent | list[str]:
        pages = HostPages(workspace, CHANNELS, 60)
        return lend(
            gpu,
            workspace,
            pages,
            ways,
            exchange,
            channels=CHANNELS,
            parity_bytes=PARITY_BYTES,
            probe=Probe(elements=4096, seconds=2.0),
        )

    def pinned() -> Pinned:
        return Pinned(gpu, workspace, 60)

    told = []
    for bad in (
        NoPeers(),
        FailsOn(gpu, workspace, 60, step="allocate", rank=1),
        FailsOn(gpu, workspace, 60, step="map", rank=world - 1),
        DropsWrites(gpu, workspace, 60),
    ):
        good = pinned()
        lent = attempt(bad, good)
        assert isinstance(lent, Lent)
        assert lent.way is good
        assert lent.region.rank == rank
        assert not lent.pages.status.failed
        told.append(lent.why_not)
        lent.close(gpu)
        assert gpu.registered == set()
    reasons = attempt(NoPeers(), DropsWrites(gpu, workspace, 60))
    assert isinstance(reasons, list)
    assert len(reasons) == 2
    assert gpu.registered == set()
    told.append(tuple(reasons))

    def refuses(memory: torch.Tensor) -> int:
        if rank == 0:
            raise RuntimeError("no pages may be locked here")
        return RecordingGpu.register(gpu, memory)

    gpu.register = refuses
    reasons = attempt(pinned())
    assert isinstance(reasons, list)
    told.append(tuple(reasons))
    assert gpu.registered == set()
    return told


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_all_ranks_take_the_first_way_that_works_for_all(world):
    told = run_ranks(world, check_ways, deadline=200)
    assert all(each == told[0] for each in told)  # the same words everywhere
    texts = [text for (text, *_) in told[0]]
    assert texts[0] == (
        "rank 0 cannot allocate (peer memory): RuntimeError: peer access is not supported between these two devices"
    )
    assert texts[1] == "rank 1 cannot allocate (a way whose allocate fails): OSError: no luck with allocate"
    assert f"rank {world - 1} cannot map what the peers have (a way whose map fails)" in texts[2]
    assert "cannot probe with two_shot (memory that drops writes): FusedRingError: no answer within 2 s" in texts[3]
    assert texts[5] == "rank 0 cannot register a page of host memory: RuntimeError: no pages may be locked here"


def check_wrong_data(rank: int, world: int) -> str:
    """The flags come, the data is not what was sent."""
    os.environ["TRITON_INTERPRET"] = "1"

    from fusedring.engines.open_gpu import Probe, lend
    from fusedring.kernels.prepared import Prepared

    communicator = communicator_of()
    real = Prepared.launch

    def garble(self: Prepared, output: torch.Tensor, patience: int) -> None:
        real(self, output, patience)
        if rank == 1 and output.numel() > 1000:
            output[700] += 1

    Prepared.launch = garble
    gpu = RecordingGpu()
    reasons = lend(
        gpu,
        communicator._workspace,
        HostPages(communicator._workspace, CHANNELS, 60),
        [Pinned(gpu, communicator._workspace, 60)],
        lambda text, purpose: communicator._rendezvous.exchange(text, timeout=60, purpose=purpose),
        channels=CHANNELS,
        parity_bytes=PARITY_BYTES,
        probe=Probe(elements=4096, seconds=20.0),
    )
    assert isinstance(reasons, list)
    return reasons[0]


def test_data_that_does_not_arrive_is_noticed():
    for text in run_ranks(2, check_wrong_data):
        assert text.startswith("rank 1 cannot probe with two_shot (pinned host memory)")
        assert text.endswith("1 of 4096 numbers did not arrive")


def check_backend(rank: int, world: int) -> tuple[list[str], str]:
    """Where kernels cannot run, the group's own backend reduces; 'triton' by name is refused."""
    os.environ["TRITON_INTERPRET"] = "1"
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("fusedring").addHandler(handler)
    engine = pretend_ways(communicator_of(), RecordingGpu(), [NoPeers(), NoPeers()])
    assert engine.title.startswith("the group's backend")
    x = torch.randn(1003, generator=torch.Generator().manual_seed(rank))
    everyone = [torch.randn(1003, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    mean = torch.stack(everyone).double().mean(0)
    for wire, unit in ((None, 2.0**-24), ("bf16", 2.0**-9), ("fp16", 2.0**-12)):
        y = x.clone()
        fusedring.all_reduce(y, wire_dtype=wire)
        largest = float(torch.stack(everyone).abs().sum(0).max())
        # Each of at most 2W roundings, and as many of sums, is off by at most `unit` of the largest partial sum.
        assert float((y.double() - mean).abs().max()) <= 4 * world * unit * largest
        part = fusedring.reduce_scatter(x.clone(), wire_dtype=wire)
        start = sum(stop - begin for begin, stop in split_evenly(1003, world)[:rank])
        assert torch.equal(part, y[start : start + part.numel()])
        z = torch.full_like(x, float("nan"))
        z[start : start + part.numel()] = y[start : start + part.numel()]
        fusedring.all_gather(z, wire_dtype=wire)
        assert torch.equal(z, y)
    model = fusedring.FusedRingDDP(torch.nn.Linear(64, 64))
    model(x[:64].view(1, 64)).sum().backward()
    want = torch.stack([e[:64] for e in everyone]).mean(0)
    assert torch.allclose(model.module.weight.grad, want.expand(64, 64), rtol=1e-5, atol=1e-6)
    with pytest.raises(fusedring.FusedRingError) as refused:
        fusedring.all_reduce(x, engine="triton")
    fusedring.all_reduce(x)
    return [text for text in records if "differ" in text], str(refused.value)


def test_where_kernels_cannot_run_the_groups_backend_reduces_and_says_so_once():
    (warnings, refused), (silent, refused_too) = run_ranks(2, check_backend)
    assert len(warnings) == 1
    assert silent == []  # rank 0 speaks for all
    assert "gloo" in warnings[0]
    assert "peer access is not supported" in warnings[0]
    assert "engine='auto'" in refused
    assert refused == refused_too


def test_a_lone_rank_needs_no_peers():
    gpu = RecordingGpu.__new__(RecordingGpu)
    way = Alone(gpu)
    memory = way.allocate(1024)
    assert way.map(memory) == [memory.data_ptr()]
    way.close()
