"""How ways of doing the same thing are timed."""

from __future__ import annotations

import os
import time

import pytest

from fusedring.bench.clock import Timing, begin_together, in_turn, seconds_of, slowest_rank
from tests.ranks import run_ranks


def test_ways_take_turns_and_none_always_follows_the_same_other():
    order: list[str] = []

    def way(name: str, seconds: float) -> float:
        order.append(name)
        return seconds + len(order)

    times = in_turn({"a": lambda: way("a", 0.25), "b": lambda: way("b", 0.5)}, 2, warm_up=1)
    assert "".join(order) == "abbaab"
    assert times == {"a": [4.25, 5.25], "b": [3.5, 6.5]}


def check_slowest(rank: int, world: int) -> None:
    assert slowest_rank([1.0 + rank, 5.0 - rank]) == [float(world), 5.0]
    assert seconds_of(lambda: None) >= 0


def test_the_slowest_rank_counts():
    run_ranks(3, check_slowest)


def test_what_raises_is_not_timed():
    with pytest.raises(ZeroDivisionError):
        seconds_of(lambda: 1 / 0)


def test_median_and_percentile():
    timing = Timing(tuple(float(number) for number in range(200, 0, -1)))
    assert timing.summary() == {"repeats": 200, "median": 100.5, "p99": 198.0}
    assert Timing((3.0, 1.0, 2.0)).p99 == 3.0


def check_begins_together(rank: int, world: int) -> tuple[float, float]:
    time.sleep(0.3 * rank)
    came = time.perf_counter()
    begin_together()
    return came, time.perf_counter()


@pytest.mark.parametrize("world", [2, len(os.sched_getaffinity(0)) + 1])
def test_none_begins_before_all_have_come(world):
    came, began = zip(*run_ranks(world, check_begins_together), strict=True)
    assert min(began) >= max(came)
