"""What ranks tell each other at the end of a step: which gradients came, and what the averages are like."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fusedring import FusedRingDDP
from fusedring.data_parallel.buckets import Entry
from fusedring.data_parallel.flags import Flags
from fusedring.plan.launch import FLAGS
from tests import reference
from tests.ranks import run_ranks


def flags_of(entries: int, buckets: int = 1) -> Flags:
    nobody = [Entry(f"p{i}", nn.Parameter(torch.zeros(1)), 0, torch.zeros(1)) for i in range(entries)]
    memory = torch.full((Flags.elements_of(entries, buckets),), math.nan)
    return Flags(memory, nobody, buckets, None, knows_norm=True)


@pytest.mark.parametrize(
    ("world", "algorithm"), [(1, "ring"), (3, "ring"), (49, "two_shot"), (300, "ring"), (2049, "ring")]
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


def check_float32_whatever_the_wire(rank: int, world: int) -> None:
    model = FusedRingDDP(nn.Linear(3, 2).bfloat16(), wire_dtype="bf16", find_unused_parameters=True)
    scheduler = model._scheduler
    launches = []
    submit = scheduler._communicator.submit

    def noted(engine, launch, *args, **kwargs):
        launches.append(launch)
        return submit(engine, launch, *args, **kwargs)

    scheduler._communicator.submit = noted
    model(torch.ones(1, 3).bfloat16()).sum().backward()
    bucket, flags = launches
    assert (bucket.dtype, bucket.wire) == ("bfloat16", "bfloat16")
    assert (flags.dtype, flags.wire, flags.factor, flags.bucket) == ("float32", "float32", 1.0, FLAGS)


def test_flags_travel_in_float32_whatever_the_wire():
    run_ranks(2, check_float32_whatever_the_wire)
