"""Plans, without hardware: who sends what, how much, and that every contribution arrives exactly once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusedring.config import ALGORITHMS
from fusedring.plan.plan import ALIGNMENT, COLLECTING, make_plan, split_evenly

worlds = st.integers(1, 9)
sizes = st.integers(0, 10_007)


@given(worlds, sizes)
def test_parts_cover_the_tensor_in_aligned_runs(world, elements):
    parts = split_evenly(elements, world)
    assert [start for start, _ in parts] + [elements] == [0] + [stop for _, stop in parts]
    assert all(start % ALIGNMENT == 0 for start, _ in parts if start < elements)
    lengths = [stop - start for start, stop in parts]
    assert max(lengths) - min(lengths) < 2 * ALIGNMENT


@given(worlds, sizes, st.sampled_from(ALGORITHMS))
def test_totals_are_those_of_the_algorithm(world, elements, algorithm):
    plan = make_plan("all_reduce", algorithm, world, elements)
    senders = world * (world - 1) if algorithm == "one_shot" else 2 * (world - 1)
    assert plan.elements_transferred == senders * elements == sum(plan.elements_per_rank)


@given(worlds, sizes)
def test_every_rank_of_the_ring_carries_its_share(world, elements):
    plan = make_plan("all_reduce", "ring", world, elements)
    share = 2 * (world - 1) / world * elements
    assert all(abs(sent - share) <= 2 * ALIGNMENT * (world - 1) for sent in plan.elements_per_rank)


@given(worlds, sizes, st.sampled_from(ALGORITHMS), st.sampled_from(["all_reduce", "reduce_scatter"]))
def test_every_contribution_arrives_exactly_once(world, elements, algorithm, kind):
    """Follow the transfers with multisets of contributors instead of numbers."""
    plan = make_plan(kind, algorithm, world, elements)
    held = [[{rank: 1} for _ in range(world)] for rank in range(world)]
    for step in plan.steps:
        before = [[dict(segment) for segment in rank] for rank in held]
        for t in step.transfers:
            for segment in range(world) if t.segment is None else [t.segment]:
                arrived = before[t.src][segment]
                if step.phase in COLLECTING:
                    mine = held[t.dst][segment]
                    for contributor, count in arrived.items():
                        mine[contributor] = mine.get(contributor, 0) + count
                else:
                    held[t.dst][segment] = dict(arrived)
    complete = dict.fromkeys(range(world), 1)
    for rank in range(world):
        for segment in range(world):
            if kind == "all_reduce" or plan.owner(segment) == rank:
                assert held[rank][segment] == complete


def test_the_first_iteration_with_four_ranks():
    first = make_plan("all_reduce", "ring", 4, 64).steps[0]
    assert [(t.src, t.dst, t.segment) for t in first.transfers] == [(0, 1, 0), (1, 2, 1), (2, 3, 2), (3, 0, 3)]


@given(worlds, sizes, st.sampled_from(ALGORITHMS))
def test_all_gather_brings_every_part_to_every_rank(world, elements, algorithm):
    """Rank r begins with part r alone; each transfer must carry something that its sender has."""
    plan = make_plan("all_gather", algorithm, world, elements)
    segment_at = {plan.owner(segment): segment for segment in range(world)}
    assert [plan.bounds(segment_at[rank]) for rank in range(world)] == list(split_evenly(elements, world))
    held = [{segment_at[rank]} for rank in range(world)]
    for step in plan.steps:
        before = [set(segments) for segments in held]
        for t in step.transfers:
            carried = before[t.src] if t.segment is None else {t.segment}
            assert carried <= before[t.src]
            held[t.dst] |= carried
    assert all(segments == set(range(world)) for segments in held)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("all_reduce", "ring", 0, 1), "world_size must be at least 1, got 0"),
        (("all_reduce", "ring", 1, -1), "elements must be at least 0, got -1"),
        (("all_reduce", "tree", 1, 1), "algorithm must be one of ring, two_shot, one_shot, master, got 'tree'"),
        (("reduce", "ring", 1, 1), "kind must be one of"),
    ],
)
def test_wrong_arguments_name_the_choices(arguments, text):
    with pytest.raises(ValueError, match=text):
        make_plan(*arguments)
