"""Whose turn it is: the order of wrappers within a backward, and of buckets within a turn."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusedring import FusedRingDDP
from fusedring.data_parallel import turns
from fusedring.data_parallel.turns import Turn, Turns
from tests.ranks import run_ranks


class Wrapper:
    """Takes part in turns: `ready` buckets go as soon as they may, the rest at the end. launched: what all launched."""

    def __init__(self, turns: Turns, name: str, launched: list[str], order: tuple[int, ...] = (0, 1)) -> None:
        self.turns, self.name, self.launched = turns, name, launched
        self.turn = Turn(turns.number(), order)
        self.ready: set[int] = set()
        turns.join(self)

    def begin(self, run: int) -> None:
        self.turns.begin(self.turn, run)

    def arrive(self, bucket: int) -> None:
        self.ready.add(bucket)
        self.advance()

    def advance(self) -> None:
        if self.turns.may_launch(self.turn):
            while self.turn.next in self.ready:
                self._launch()
            if self.turn.next is None:
                self.turns.pass_on(self.turn)

    def launch_rest(self) -> None:
        self.turn.expecting = False
        while self.turn.next is not None:
            self._launch()

    def launch_flags(self) -> None:
        self.launched.append(f"{self.name} flags")

    def _launch(self) -> None:
        self.launched.append(f"{self.name}{self.turn.next}")
        self.turn.launched()


@pytest.fixture
def two(monkeypatch) -> tuple[Wrapper, Wrapper, list[str]]:
    group, launched = Turns(), []
    monkeypatch.setattr(turns, "_turns", {0: group})
    return Wrapper(group, "a", launched), Wrapper(group, "b", launched), launched


def test_the_last_forward_launches_first_whatever_comes_first(two):
    a, b, launched = two
    for wrapper in (a, b):
        wrapper.turn.expect(late=False)
    for wrapper in (a, b):
        wrapper.begin(run=7)
    a.arrive(0)
    assert launched == []  # b's forward came later
    b.arrive(0)
    b.arrive(1)
    assert launched == ["b0", "b1", "a0"]
    a.turns.launch_rest(a.turn)
    assert launched == ["b0", "b1", "a0", "a1", "b flags", "a flags"]


def test_who_held_back_in_vain_waits_for_the_end(two):
    a, teacher, launched = two
    for _ in range(2):
        for wrapper in (a, teacher):
            wrapper.turn.expect(late=False)
        a.begin(run=1)
        a.arrive(0)
        a.arrive(1)
        launched.append("end")
        a.turns.launch_rest(a.turn)
        a.turn.end()
    assert launched == ["end", "a0", "a1", "a flags", "a0", "a1", "end", "a flags"]


def test_a_second_backward_that_no_forward_announced_launches_last(two):
    a, b, launched = two
    a.turn.expect(late=False)
    b.begin(run=1)
    b.arrive(0)
    b.arrive(1)
    a.begin(run=1)
    a.arrive(0)
    assert launched == ["a0"]
    a.turns.launch_rest(a.turn)
    assert launched == ["a0", "a1", "b0", "b1", "a flags", "b flags"]


def test_other_runs_are_not_touched(two):
    a, b, launched = two
    a.begin(run=1)
    b.begin(run=2)
    a.turns.launch_rest(a.turn)
    assert launched == ["a0", "a1", "a flags"]


def test_at_the_end_wrappers_of_other_groups_launch_before_anybody_waits(monkeypatch):
    launched: list[str] = []
    groups = [Turns(), Turns()]
    monkeypatch.setattr(turns, "_turns", dict(enumerate(groups)))
    a, b = Wrapper(groups[0], "a", launched), Wrapper(groups[1], "b", launched)
    for wrapper in (a, b):
        wrapper.begin(run=3)
    b.turns.launch_rest(b.turn)
    assert launched == ["a0", "a1", "b0", "b1", "a flags", "b flags"]


def test_buckets_go_in_the_order_of_the_turn():
    launched: list[str] = []
    alone = Wrapper(Turns(), "a", launched, order=(2, 0, 1))
    alone.begin(run=1)
    alone.arrive(0)
    assert not alone.turn.is_last
    alone.arrive(2)
    assert alone.turn.is_last
    alone.arrive(1)
    assert launched == ["a2", "a0", "a1"]


def check_another_order(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = FusedRingDDP(nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))), bucket_cap_mb=1e-5)
    grads, orders = [], []
    for backwards in (False, True):
        model.zero_grad()
        if backwards:
            model._scheduler.turn.order = tuple(reversed(model._scheduler.turn.order))
        model(torch.full((2, 8), rank + 1.0)).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        orders.append([launch.bucket for launch in model.report().launches])
    assert orders == [[*range(10)], [*reversed(range(10))]]
    assert all(map(torch.equal, *grads))


def test_buckets_may_be_launched_in_another_order():
    run_ranks(2, check_another_order)
