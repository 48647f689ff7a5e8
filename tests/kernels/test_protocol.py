"""The protocol of the kernels, by trying every interleaving of a model of it (protocol.py, interleavings.py).

First the rules as they are: no violation in any of the collectives, repeated, mixed, with empty segments and with
several channels. Then each rule broken: the search must find what goes wrong, else it would not have seen it above.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import fields

import pytest

from fusedring.config import Kind
from fusedring.plan.plan import ALIGNMENT, make_plan
from tests.kernels.interleavings import Result, explore
from tests.kernels.protocol import Launch, Put, Rules, programs

KIND: dict[str, Kind] = {"": "all_reduce", ":scatter": "reduce_scatter", ":gather": "all_gather"}
HALVED = ("ring", "two_shot", "master")
COLLECTIVES = ("one_shot", *(name + half for name in HALVED for half in KIND))

EVEN = {2: (1, 1), 3: (1, 1, 1), 4: (1, 1, 1, 1)}
SHORT = {2: (0, 1), 3: (0, 0, 1), 4: (0, 0, 0, 1)}
"""Chunks of each part: of a bucket that fills all, and of one of a few elements."""


def launches(names: str, chunks: tuple[int, ...]) -> tuple[Launch, ...]:
    """The launches that `names` lists, all with the same chunks."""
    found = []
    for name in names.split():
        algorithm, colon, half = name.partition(":")
        found.append(Launch(algorithm, chunks, KIND[colon + half]))
    return tuple(found)


def check(result: Result) -> None:
    assert result.violation is None, "\n".join([*result.trace, result.violation])


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_model_moves_what_the_plan_says(name, world):
    (launch,) = launches(name, EVEN[world])
    plan = make_plan(launch.kind, launch.algorithm, world, world * ALIGNMENT)
    planned = Counter(
        (t.src, t.dst, segment)
        for step in plan.steps
        for t in step.transfers
        for segment in (range(world) if t.segment is None else [t.segment])
    )
    modelled = Counter(
        (program.rank, store.span[0], store.chunk.segment)
        for program in programs((launch,), Rules())
        for _, store in program.stores
        if isinstance(store, Put)
    )
    assert modelled == planned


@pytest.mark.parametrize("chunks", [(1, 1), (2, 2), (0, 1), (2, 1), (0, 0), (1, 1, 1), (2, 2, 2), (0, 0, 1), (0, 1, 2)])
def test_every_collective_repeated(chunks):
    for name in COLLECTIVES:
        check(explore(launches(f"{name} {name} {name}", chunks)))


FULL = pytest.param((1, 1, 1, 1), marks=pytest.mark.slow)
"""The most interleavings."""


@pytest.mark.parametrize("chunks", [FULL, (0, 0, 0, 1), (0, 1, 0, 1)])
def test_every_collective_repeated_by_four_ranks(chunks):
    for name in COLLECTIVES:
        check(explore(launches(f"{name} {name} {name}", chunks)))


@pytest.mark.parametrize("chunks", [(1, 1), (0, 1), pytest.param((2, 1), marks=pytest.mark.slow)])
def test_every_mixture_of_three_launches_by_two_ranks(chunks):
    for names in itertools.product(COLLECTIVES, repeat=3):
        check(explore(launches(" ".join(names), chunks)))


@pytest.mark.parametrize("chunks", [(1, 1, 1), (0, 0, 1), (0, 1, 1)])
def test_every_alternation_by_three_ranks(chunks):
    for one, other in itertools.product(COLLECTIVES, repeat=2):
        check(explore(launches(f"{one} {other} {one}", chunks)))


@pytest.mark.parametrize(
    "names",
    [
        "ring one_shot two_shot",
        "one_shot ring one_shot",
        "ring two_shot ring",
        "two_shot ring two_shot",
        "ring master ring",
        "ring:scatter ring:gather ring:scatter ring:gather",
        "two_shot:scatter two_shot:gather two_shot:scatter two_shot:gather",
        "ring:scatter two_shot:gather ring:scatter",
    ],
)
@pytest.mark.parametrize("chunks", [FULL, (0, 0, 0, 1), (0, 1, 0, 1)])
def test_mixtures_by_four_ranks(names, chunks):
    check(explore(launches(names, chunks)))


SIZES = [
    ("one_shot one_shot one_shot", (2, 1, 2)),
    ("ring one_shot two_shot", (2, 1, 2)),
    ("ring:scatter ring:gather one_shot", (3, 2, 1)),
    ("one_shot ring one_shot", (1, 2, 3)),
    ("master two_shot master", (1, 3, 2)),
]
"""Mixtures, and for each launch how many chunks its segments have."""


def sized(names: str, sizes: tuple[int, ...], world: int) -> tuple[Launch, ...]:
    """Launches with segments of different sizes: a signal may change from one channel to another."""
    pairs = zip(names.split(), sizes, strict=True)
    return tuple(launch for name, size in pairs for launch in launches(name, (size,) * world))


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(("names", "sizes"), SIZES)
def test_launches_of_different_sizes(names, sizes, channels):
    check(explore(sized(names, sizes, 2), channels=channels))


def test_two_channels_of_three_ranks():
    check(explore(sized("ring two_shot ring", (2, 1, 2), 3), channels=2))
    check(explore(sized("two_shot:scatter ring:gather two_shot", (2, 1, 2), 3), channels=2))


BROKEN = (
    Rules(),
    Rules(parity=False),
    Rules(release=False),
    Rules(compare_epochs=False),
    Rules(post_empty=False),
    Rules(post_empty=False, await_empty=False),
    Rules(separate_rows=False),
    Rules(no_wait=(0, 0)),
    Rules(no_wait=(1, 1)),
)


def differences(rules: Rules) -> str:
    """What is broken, as the name of a test."""
    broken = (f.name for f in fields(Rules) if getattr(rules, f.name) != f.default)
    return "-".join(broken) or "none"


@pytest.mark.parametrize("rules", BROKEN, ids=differences)
def test_skipping_interleavings_changes_no_verdict(rules):
    """Against a search that skips none, with each rule kept and broken."""

    def verdicts(tried: tuple[Launch, ...]) -> set[bool]:
        return {explore(tried, rules, reduce=reduce).violation is None for reduce in (True, False)}

    for one, other in itertools.product(COLLECTIVES, repeat=2):
        for chunks in (EVEN[2], SHORT[2]):
            tried = launches(f"{one} {other} {one}", chunks)
            assert len(verdicts(tried)) == 1, tried
    for name in set(COLLECTIVES) - {"one_shot"}:
        tried = launches(f"{name} {name} {name}", SHORT[3])
        assert len(verdicts(tried)) == 1, tried


def found(names: str, chunks: tuple[int, ...], rules: Rules) -> str:
    """What the search finds under these rules; nothing is ''."""
    return explore(launches(names, chunks), rules).violation or ""


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("world", [2, 3])
class TestBroken:
    def test_a_signal_before_its_chunk(self, name, world):
        assert "finds nothing" in found(name, EVEN[world], Rules(release=False))

    def test_a_wait_for_any_epoch(self, name, world):
        rules = Rules(compare_epochs=False)
        assert not found(name, EVEN[world], rules)
        assert "of epoch 2, finds" in found(f"{name} {name}", EVEN[world], rules)

    def test_no_signal_where_one_is_awaited(self, name, world):
        assert found(name, SHORT[world], Rules(post_empty=False)) == "deadlock"

    def test_a_missing_wait(self, name, world):
        """Any, of ring and two_shot. Elsewhere some are implied by others: a signal vouches for all sent before it."""
        tried = launches(f"{name} {name}", EVEN[world])
        all_needed = name.startswith(("ring", "two_shot"))
        for program in programs(tried, Rules()):
            for number in range(program.waits if all_needed else 1):
                result = explore(tried, Rules(no_wait=(program.rank, number)))
                assert f"rank {program.rank} wants" in (result.violation or ""), (program.rank, number)


def test_one_set_of_slots():
    """Without parity, a launch must not write where the one before may still be read."""
    rules = Rules(parity=False)
    halves = ("ring", "two_shot")
    survives = {
        *itertools.product(halves, halves),
        ("master", "master"),
        *((f"{a}:scatter", f"{b}:gather") for a, b in itertools.product(halves, halves)),
        *((f"{a}:gather", f"{b}:scatter") for a, b in itertools.product(halves, halves)),
        ("master:scatter", "master:gather"),
        ("master:gather", "master:scatter"),
    }
    for one, other in itertools.product(COLLECTIVES, repeat=2):
        violation = found(f"{one} {other} {one}", EVEN[3], rules)
        if (one, other) in survives:
            assert not violation, (one, other, violation)
        else:
            assert "finds chunk" in violation, (one, other, violation)


@pytest.mark.parametrize("name", ["ring", "two_shot", "master"])
@pytest.mark.parametrize("chunks", [(1, 1), (2, 2), (0, 1), (1, 1, 1), (2, 2, 2), (0, 0, 1), (1, 1, 1, 1)])
def test_all_reduces_that_survive_one_set_of_slots(name, chunks):
    assert not found(f"{name} {name} {name}", chunks, Rules(parity=False))


@pytest.mark.parametrize("half", [":scatter", ":gather"])
def test_no_signals_at_all_for_empty_segments(half):
    """Then nobody knows that a rank whose own part is empty has begun."""
    rules = Rules(post_empty=False, await_empty=False)
    for name in HALVED:
        violation = found(" ".join([name + half] * 3), SHORT[3], rules)
        assert "of epoch 1, finds" in violation
        assert "of epoch 3" in violation


def test_an_epoch_without_signals():
    """Hence nothing to do consumes no epoch."""
    tried = (Launch("one_shot", (1, 1)), Launch("one_shot", (0, 0)), Launch("one_shot", (1, 1)))
    check(explore(tried))
    violation = explore(tried, Rules(post_empty=False, await_empty=False)).violation
    assert violation is not None
    assert "of epoch 3" in violation


def test_a_signal_with_two_writers():
    """The older number may land last. Two ranks are too few for it: each has one peer, who writes all its signals."""
    rules = Rules(separate_rows=False)
    assert found("one_shot ring", EVEN[3], rules) == "deadlock"
    assert found("ring one_shot ring", EVEN[3], rules) == "deadlock"
    assert "finds nothing" in found("ring:scatter two_shot", EVEN[3], rules)
    assert not found("one_shot ring", EVEN[2], rules)


@pytest.mark.parametrize(("names", "sizes"), SIZES)
def test_channels_that_do_not_wait_for_each_other_between_launches(names, sizes):
    """Stream order is needed: with another number of chunks, a slot or signal belongs to another channel."""
    result = explore(sized(names, sizes, 2), Rules(stream_order=False), channels=2)
    assert result.violation is not None
