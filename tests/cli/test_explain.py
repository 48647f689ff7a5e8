"""`fusedring explain`: words, JSON and pictures against arithmetic that knows no plan."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusedring.cli import main
from fusedring.cli.explain import as_json
from fusedring.config import ALGORITHMS
from fusedring.observe.pictures import draw_walk
from fusedring.plan.plan import make_plan
from fusedring.plan.walk import gradient, subscript, walk

SIZES = (0, 1, 15, 16, 17, 100, 1000, 4096, 10_007)


def part_sizes(world: int, elements: int) -> list[int]:
    """Blocks of 16 are dealt out evenly; the last block may be short."""
    blocks = (elements + 15) // 16
    edges = [16 * (blocks * part // world) for part in range(world + 1)]
    return [min(b, elements) - min(a, elements) for a, b in pairwise(edges)]


def check(world: int, algorithm: str, elements: int) -> None:
    shown = as_json(make_plan("all_reduce", algorithm, world, elements))
    parts = part_sizes(world, elements)
    steps = shown["steps"]
    if world == 1:
        assert (steps, shown["elements_transferred"], shown["per_rank"]) == ([], 0, [0])
        return
    transfers = [[(t["src"], t["dst"], t["segment"], t["elements"]) for t in step["transfers"]] for step in steps]
    phases = [step["phase"] for step in steps]
    ranks = range(world)
    if algorithm == "ring":
        size = [parts[s - 1] for s in ranks]  # segment s ends at rank s-1, so it is that rank's part
        assert phases == ["reduce-scatter"] * (world - 1) + ["all-gather"] * (world - 1)
        for hop in range(world - 1):
            sent = [(r - hop) % world for r in ranks]
            assert transfers[hop] == [(r, (r + 1) % world, sent[r], size[sent[r]]) for r in ranks]
            sent = [(r + 1 - hop) % world for r in ranks]
            assert transfers[world - 1 + hop] == [(r, (r + 1) % world, sent[r], size[sent[r]]) for r in ranks]
        per_rank = [2 * elements - size[(r + 1) % world] - size[(r + 2) % world] for r in ranks]
        total = 2 * (world - 1) * elements
    elif algorithm == "two_shot":
        pairs = [(a, b) for a in ranks for b in ranks if a != b]
        assert phases == ["reduce-scatter", "all-gather"]
        assert transfers == [[(a, b, b, parts[b]) for a, b in pairs], [(a, b, a, parts[a]) for a, b in pairs]]
        per_rank = [elements - parts[r] + (world - 1) * parts[r] for r in ranks]
        total = 2 * (world - 1) * elements
    elif algorithm == "one_shot":
        assert phases == ["exchange"]
        assert transfers == [[(a, b, None, elements) for a in ranks for b in ranks if a != b]]
        per_rank = [(world - 1) * elements] * world
        total = world * (world - 1) * elements
    else:
        assert phases == ["gather", "broadcast"]
        assert transfers == [
            [(r, 0, None, elements) for r in range(1, world)],
            [(0, r, None, elements) for r in range(1, world)],
        ]
        per_rank = [(world - 1) * elements] + [elements] * (world - 1)
        total = 2 * (world - 1) * elements
    assert shown["per_rank"] == per_rank
    assert shown["elements_transferred"] == total


@pytest.mark.parametrize("world", range(1, 10))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_json_is_what_arithmetic_says(world, algorithm):
    for elements in SIZES:
        check(world, algorithm, elements)


@given(st.integers(1, 9), st.sampled_from(ALGORITHMS), st.integers(0, 10_007))
def test_the_json_is_what_arithmetic_says_for_any_size(world, algorithm, elements):
    check(world, algorithm, elements)


@given(st.integers(2, 9))
def test_the_ring_adds_hop_by_hop(world):
    iterations = walk(make_plan("all_reduce", "ring", world, 1000))
    for number, iteration in enumerate(iterations):
        for move in iteration.moves:
            if number < world - 1:
                first = (move.transfer.src - number) % world
                assert move.carried == tuple((first + i) % world for i in range(number + 1))
                assert move.transfer.segment == first
            else:
                assert sorted(move.carried) == list(range(world))
    assert all(sorted(held) == list(range(world)) for rank in iterations[-1].after for held in rank)


def explain(capsys, *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


def test_the_walk_of_four_gpus_in_words(capsys):
    text = explain(capsys, "--world", "4", "--elements", "64")
    for line in (
        "GPU1 sends a₁ to GPU2 (added to b₁): 16 elements",
        "GPU2 sends b₂ to GPU3 (added to c₂): 16 elements",
        "GPU3 sends c₃ to GPU4 (added to d₃): 16 elements",
        "GPU4 sends d₄ to GPU1 (added to a₄): 16 elements",
        "GPU2 sends a₁+b₁ to GPU3 (added to c₁): 16 elements",
        "GPU3 sends a₁+b₁+c₁ to GPU4 (added to d₁): 16 elements",
        "GPU4 sends Σ₁ to GPU1 (kept): 16 elements",
    ):
        assert f"  {line}\n" in text
    assert text.index("GPU4 sends d₄") < text.index("Step 2 of 6") < text.index("a₁+b₁ to GPU3")


def test_all_totals_stand_side_by_side(capsys):
    for algorithm in ALGORITHMS:
        rows = dict(
            line.lstrip("* ").split(maxsplit=1)
            for line in explain(capsys, "--algorithm", algorithm, "--elements", "1000000").splitlines()[-4:]
        )
        assert rows["ring"].split() == ["6,000,000", "1,500,000", "6"]
        assert rows["two_shot"].split() == ["6,000,000", "1,500,000", "2"]
        assert rows["one_shot"].split() == ["12,000,000", "3,000,000", "1"]
        assert rows["master"].split() == ["6,000,000", "3,000,000", "2"]


def test_one_gpu_has_no_steps(capsys):
    assert "No steps" in explain(capsys, "--world", "1")


def test_json_is_all_that_stdout_gets():
    command = [sys.executable, "-m", "fusedring", "explain", "--world", "3", "--elements", "100", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == as_json(make_plan("all_reduce", "ring", 3, 100))
    assert set(json.loads(done.stdout)) == {
        "world",
        "algorithm",
        "elements",
        "steps",
        "elements_transferred",
        "per_rank",
    }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--world", "0"), "argument --world: must be a whole number of at least 1, got '0'"),
        (("--world", "four"), "must be a whole number of at least 1, got 'four'"),
        (("--world", "129"), "must be at most 128, got '129'"),
        (("--elements", "-1"), "must be a whole number of at least 0, got '-1'"),
        (("--algorithm", "tree"), "invalid choice: 'tree'"),
    ],
)
def test_wrong_arguments_exit_with_2(capsys, arguments, text):
    with pytest.raises(SystemExit) as raised:
        main(["explain", *arguments])
    assert raised.value.code == 2
    assert text in capsys.readouterr().err


def test_a_picture_needs_matplotlib_and_few_gpus(capsys, monkeypatch, tmp_path):
    assert main(["explain", "--world", "17", "--png", str(tmp_path / "x.png")]) == 2
    assert "16 GPUs at most, got 17" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["explain", "--png", str(tmp_path / "x.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def texts_drawn(world: int, algorithm: str, monkeypatch, path) -> list[tuple[float, float, float, float, str]]:
    """The boxes, in pixels, of all texts in the panels of a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figures = []
    real = Figure.savefig

    def remember(self, *arguments, **options):
        figures.append(self)
        real(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", remember)
    draw_walk(make_plan("all_reduce", algorithm, world, 1_000_000), path)
    renderer = FigureCanvasAgg(figures[0]).get_renderer()
    boxes = []
    for axes in figures[0].axes:
        for text in axes.texts:
            box = text.get_window_extent(renderer)
            boxes.append((box.x0, box.y0, box.x1, box.y1, text.get_text()))
    return boxes


@pytest.mark.parametrize("world", [2, 3, 4, 5, *(pytest.param(world, marks=pytest.mark.slow) for world in (6, 7, 8))])
def test_nothing_overlaps_in_the_picture_of_a_ring(world, monkeypatch, tmp_path):
    from matplotlib.image import imread

    boxes = texts_drawn(world, "ring", monkeypatch, tmp_path / "ring.png")
    assert imread(tmp_path / "ring.png").shape[1] == 1200
    steps = 2 * (world - 1)
    # In each panel: a label per arrow, a name per GPU, and a number per segment of each GPU.
    assert len(boxes) == steps * (world + world + world * world)
    for index, (left, bottom, right, top, text) in enumerate(boxes):
        assert 0 <= left < right <= 1200, text
        for other_left, other_bottom, other_right, other_top, other in boxes[:index]:
            apart = left >= other_right or other_left >= right or bottom >= other_top or other_bottom >= top
            assert apart, f"{text} and {other} overlap"


def test_names_of_many_gradients_and_segments():
    assert [gradient(rank) for rank in (0, 25, 26, 27, 701, 702)] == ["a", "z", "aa", "ab", "zz", "aaa"]
    assert subscript(120) == "₁₂₀"
