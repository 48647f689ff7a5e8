"""A plan told step by step: which contributions travel in each transfer, and what every rank holds after each step.

Ranks and segments are written as on a whiteboard: GPUs are counted from 1, GPU1's gradient is a, GPU2's is b, and a₁ is
its segment 1. So a₁+b₁ is a partial sum of segment 1, and Σ₁ the full one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusedring.plan.plan import COLLECTING, Phase, Plan, Transfer

Contributors = tuple[int, ...]
"""The ranks whose contributions a (partial) sum holds, in the order in which they were added."""


@dataclass(frozen=True, slots=True)
class Move:
    """One transfer of a step, and whose contributions it carries."""

    transfer: Transfer
    carried: Contributors


@dataclass(frozen=True, slots=True)
class WalkedStep:
    """One step. after[rank][segment]: what that rank then holds of that segment."""

    phase: Phase
    moves: tuple[Move, ...]
    after: tuple[tuple[Contributors, ...], ...]


def walk(plan: Plan) -> list[WalkedStep]:
    """Follow the contributions through all steps of an all-reduce."""
    ranks = range(plan.world_size)
    held: list[list[Contributors]] = [[(rank,)] * plan.world_size for rank in ranks]
    walked = []
    for step in plan.steps:
        before = [list(segments) for segments in held]
        moves = []
        for t in step.transfers:
            segments = ranks if t.segment is None else (t.segment,)
            moves.append(Move(t, before[t.src][segments[0]]))
            for s in segments:
                held[t.dst][s] = _received(plan, step.phase, before[t.src][s], held[t.dst][s])
        walked.append(WalkedStep(step.phase, tuple(moves), tuple(map(tuple, held))))
    return walked


def _received(plan: Plan, phase: Phase, arrived: Contributors, own: Contributors) -> Contributors:
    if phase not in COLLECTING:
        return arrived
    # The ring adds hop by hop, the direct algorithms in rank order.
    return (*arrived, *own) if plan.algorithm == "ring" else tuple(sorted((*arrived, *own)))


def gpu(rank: int) -> str:
    """GPU1 for rank 0."""
    return f"GPU{rank + 1}"


def gradient(rank: int) -> str:
    """a for rank 0, b for rank 1, ..., z, then aa, ab and so on."""
    name = ""
    rank += 1
    while rank:
        rank, letter = divmod(rank - 1, 26)
        name = chr(ord("a") + letter) + name
    return name


def sum_in_words(contributors: Sequence[int], segment: int | None, world_size: int, *, short: bool = False) -> str:
    """a₁, a₁+b₁ or Σ₁; without an index for a whole tensor. short: a…d₁ instead of a₁+b₁+c₁+d₁."""
    index = "" if segment is None else subscript(segment + 1)
    if len(contributors) == world_size and world_size > 1:
        return f"Σ{index}"
    names = [gradient(rank) for rank in contributors]
    if short and len(names) > 2:
        return f"{names[0]}…{names[-1]}{index}"
    return "+".join(f"{name}{index}" for name in names)


def subscript(number: int) -> str:
    """12 as ₁₂."""
    return str(number).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))
