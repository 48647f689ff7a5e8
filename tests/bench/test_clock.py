"""How ways of doing the same thing are timed."""

from __future__ import annotations

import pytest

from fusedring.bench.clock import in_turn, seconds_of, slowest_rank
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
