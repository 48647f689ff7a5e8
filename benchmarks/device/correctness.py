"""Part a: every kernel on virtual ranks, with fresh numbers, to the bit and against float64."""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Sequence

import torch

from benchmarks.device.cases import Case, all_cases, warmed_up
from benchmarks.device.machine import device_of
from benchmarks.device.reference import different_bits, error_bound, exact, gathered, reduced
from benchmarks.device.sheet import Sheet
from benchmarks.device.units import MB
from fusedring.config import ALGORITHMS, scale_factor
from fusedring.plan.plan import split_evenly
from fusedring.testing import VirtualRanks, virtual_ranks


def correctness(sheet: Sheet) -> None:
    """The part: every kernel, for several world sizes and sizes of tensors."""
    device = device_of(sheet)
    seed = secrets.randbelow(1 << 31)
    sheet.row("seed of the inputs", str(seed))
    worlds, sizes = ((2,), (17, 2_133)) if sheet.dry else ((2, 4, 8), (1, 17, 4_611, 100_003, MB + 7))
    cases = all_cases()
    if sheet.dry:  # each algorithm and kind once, and among them all dtypes and wires
        cases = [cases[10 * place + place % 10] for place in range(len(cases) // 10)]
    cases = warmed_up(sheet, device, cases, (2 if sheet.dry else 8,))
    for world in worlds:
        with virtual_ranks(world, device, channels=2 if sheet.dry else 8) as ranks:
            for algorithm in ALGORITHMS:
                mine = [case for case in cases if case.algorithm == algorithm]
                if not mine:
                    continue
                numbers = random.Random(f"{seed} {world} {algorithm}")
                _check_algorithm(sheet, ranks, device, mine, sizes, numbers)


def _check_algorithm(
    sheet: Sheet,
    ranks: VirtualRanks,
    device: torch.device,
    cases: Sequence[Case],
    sizes: Sequence[int],
    numbers: random.Random,
) -> None:
    """Cases of one algorithm."""
    what = f"{cases[0].algorithm}, W={ranks.world_size}, {len(sizes)} sizes up to {sizes[-1]}"
    checks = [(case, size) for case in cases for size in sizes]
    if sheet.dry:
        checks = [(case, sizes[place % len(sizes)]) for place, case in enumerate(cases)]
    looked_at, wrong, worst = 0, 0, 0.0
    with sheet.attempt(what):
        ranks.reset()  # of a failure of the algorithm before
        for case, elements in checks:
            if sheet.seconds_left < 5:
                left = len(checks) - looked_at
                sheet.row(what, verdict="not run", reason=f"no time for {left} of {len(checks)} launches")
                break
            differ, ratio = check_case(ranks, device, case, elements, numbers.randrange(1 << 31))
            looked_at += 1
            if differ or not ratio <= 1:
                wrong += 1
                reason = f"{differ} elements differ in a bit, the error is {ratio:.3g} of its bound"
                sheet.row(f"{case}, W={ranks.world_size}, {elements} elements", verdict="failed", reason=reason)
            worst = max(worst, ratio)
        value = f"{looked_at - wrong} of {looked_at} to the bit, error at most {worst:.2f} of its bound"
        sheet.expect(not wrong, what, value, "see the rows above", looked_at=looked_at, wrong=wrong, worst=worst)


def check_case(ranks: VirtualRanks, device: torch.device, case: Case, elements: int, seed: int) -> tuple[int, float]:
    """How many elements, over all ranks, differ in a bit from the reference; the worst error, in parts of its bound."""
    inputs, ordinary = _inputs(ranks.world_size, device, case, elements, seed)
    tensors = [x.clone() for x in inputs]
    collective = ranks.prepare(case.kind, tensors, **case.how)
    collective.run()
    collective.check()
    world = ranks.world_size
    parts = split_evenly(elements, world)
    if case.kind == "all_gather":
        want = gathered(inputs, case.wire)
        return sum(different_bits(x, want) for x in tensors), 0.0
    factor = scale_factor("avg", None, world, case.dtype)
    want = reduced(inputs, case.algorithm, case.wire, factor)
    if case.kind == "reduce_scatter":
        differ = sum(different_bits(tensors[r][i:j], want[i:j]) for r, (i, j) in enumerate(parts))
    else:
        differ = sum(different_bits(x, want) for x in tensors)
    error = (want.double() - exact(inputs, factor)).abs() / error_bound(inputs, case.algorithm, case.wire, factor)
    return differ, float(error[ordinary].max())


def _inputs(
    world: int, device: torch.device, case: Case, elements: int, seed: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """A tensor for each rank, and where no rank has a number that is out of the ordinary.

    What all_gather must not read is NaN, and so would be an output that it did not write.
    """
    generator = torch.Generator(device).manual_seed(seed)
    special = torch.tensor([-0.0, 0.0, math.inf, math.nan, 65519.0, 1e-8, -1e-40], dtype=torch.float64, device=device)
    ordinary = torch.ones(elements, dtype=torch.bool, device=device)
    inputs = []
    for rank, (start, stop) in enumerate(split_evenly(elements, world)):
        x = torch.randn(elements, generator=generator, dtype=torch.float64, device=device)
        if elements > 100:
            x[11 : 11 + len(special)] = special.roll(rank)
            ordinary[11 : 11 + len(special)] = False
        x = x.to(case.dtype)
        if case.kind == "all_gather":
            x[:start] = math.nan
            x[stop:] = math.nan
        inputs.append(x)
    return inputs, ordinary
