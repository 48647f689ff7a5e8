"""What ranks tell each other at the end of a step: which gradients came, and what the averages are like."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fusedring import FusedRingDDP
from fusedring.data_parallel.buckets import Entry
from fusedring.data_parallel.flags import Flags
from fusedring.plan.launch import FLAGS, Launch
from tests import reference
from tests.ranks import run_ranks


def flags_of(entries: int, buckets: int = 1) -> Flags:
    nobody = [Entry(f"p{i}", nn.Parameter(torch.zeros(1)), 0, torch.zeros(1)) for i in range(entries)]
    memory = torch.full((Flags.elements_of(entries, buckets),), math.nan)
    return Flags(memory, nobody, buckets, None, knows_norm=True)


@pytest.mark.parametrize(
    ("world", "algorithm"), [(1, "ring"), (3, "ring"), (49, "two_shot"), (300, "two_shot"), (2049, "one_shot")]
)
def test_the_flags_of_many_ranks_are_counted_exactly(world, algorithm):
    counts = [0, 1, world // 2, world - 1, world]
    vectors = []
    for rank in range(world):
        flags = flags_of(len(counts))
        partial = {id(e) for e, count in zip(flags._entries, counts, strict=True) if rank < count}
        flags.write([rank < count for count in counts], partial)
        vectors.append(flags.vector)
    flags = flags_of(len(counts))
    flags.vector.copy_(reference.all_reduce(vectors, algorithm, None, op="sum"))
    told = flags.read()
    assert told.late == told.empty == told.partial == counts
    assert told.squares is None
    assert told.grad_norm is None
    assert told.found_inf is None


def test_flags_are_cleared_where_somebody_had_set_one():
    flags = flags_of(2)
    flags.write([True, False], set())
    assert flags.read().late == [1, 0]
    flags.write([False, False], set())
    assert flags.read().late == [0, 0]
    assert not flags.vector.any()


def noted_launches(model: FusedRingDDP) -> list[Launch]:
    communicator = model._scheduler._communicator
    launches, submit = [], communicator.submit

    def noted(engine, launch, *args, **kwargs):
        launches.append(launch)
        return submit(engine, launch, *args, **kwargs)

    communicator.submit = noted
    return launches


def check_float32_whatever_the_wire(rank: int, world: int) -> None:
    model = FusedRingDDP(nn.ModuleList(nn.Linear(3, 2).bfloat16() for _ in range(2)), wire_dtype="bf16", **UNUSED)
    launches = noted_launches(model)
    model.module.forward = lambda x, used: sum(part(x).sum() for part in list(model.module)[:used])
    x = torch.ones(1, 3).bfloat16()
    for used_by_rank_1 in (2, 1, 2):
        launches.clear()
        model(x, used_by_rank_1 if rank == 1 else 2).backward()
        bucket, *flags = launches
        assert (bucket.dtype, bucket.wire) == ("bfloat16", "bfloat16")
        # Nobody has anything to tell, so nothing is launched; one rank has, so all launch.
        assert len(flags) == (used_by_rank_1 == 1)
        for launch in flags:
            assert (launch.dtype, launch.wire, launch.factor, launch.bucket) == ("float32", "float32", 1.0, FLAGS)


UNUSED = {"find_unused_parameters": True}


def test_flags_travel_where_somebody_has_to_tell_and_in_float32_whatever_the_wire():
    run_ranks(2, check_float32_whatever_the_wire)
