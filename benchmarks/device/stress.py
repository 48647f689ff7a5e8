"""Part b: thousands of launches with random delays, and a rank that never comes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from itertools import product

import torch

from benchmarks.device.cases import Case, all_cases, warmed_up
from benchmarks.device.cooperative import cooperative_launches
from benchmarks.device.machine import device_of
from benchmarks.device.sheet import NotRunError, Sheet
from fusedring.config import ALGORITHMS
from fusedring.errors import CollectiveTimeoutError
from fusedring.plan.plan import split_evenly
from fusedring.testing import VirtualRanks, virtual_ranks


def stress(sheet: Sheet) -> None:
    """The part: mixed launches with random delays; then a rank that never launches, and what comes after."""
    device = device_of(sheet)
    world, channels, epochs, sizes = (2, 2, 6, (17, 517)) if sheet.dry else (4, 8, 2000, (17, 5_000, 100_003))
    cases = [case for case in all_cases() if case.dtype == case.wire == torch.float32]
    if sheet.dry:
        cases = [case for case in cases if case.kind == "all_reduce"]
    cases = warmed_up(sheet, device, cases, (channels,))
    with virtual_ranks(world, device, channels=channels) as ranks:
        with sheet.attempt("mixed launches"):
            _mixed_launches(sheet, ranks, device, cases, sizes, epochs)
        for algorithm in ("ring",) if sheet.dry else ALGORITHMS:
            with sheet.attempt(f"{algorithm}, a rank that never launches"):
                ranks.reset()  # of a failure of what came before
                _missing_rank(sheet, ranks, device, algorithm)
    with sheet.attempt("cooperative launches next to each other"):
        if device.type != "cuda":
            raise NotRunError("no cooperative launches under the interpreter")
        sheet.row("cooperative launches of 2 virtual ranks", cooperative_launches(device))


def _mixed_launches(
    sheet: Sheet,
    ranks: VirtualRanks,
    device: torch.device,
    cases: Sequence[Case],
    sizes: Sequence[int],
    epochs: int,
) -> None:
    """Whole numbers, so that sums are exact; other ones in each epoch, so that what is left of an earlier one shows."""
    world = ranks.world_size
    numbers = random.Random(0)
    pattern = (torch.arange(max(sizes) + 1024, device=device) % 1009).float()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    launches = []
    for case, elements in product(cases, sizes):
        tensors = [torch.empty(elements, device=device) for _ in range(world)]
        launches.append((case, tensors, ranks.prepare(case.kind, tensors, op="sum", **case.how)))

    def delay(_: int) -> None:
        length = numbers.random() ** 4  # most are short, some long
        if device.type == "cuda":
            torch.cuda._sleep(int(4e5 * length))  # type: ignore[no-untyped-call]
        else:
            time.sleep(0.05 * length)

    done = 0
    while done < epochs and (done == 0 or sheet.seconds_left > 20):
        case, tensors, collective = numbers.choice(launches)
        first = numbers.randrange(1024)
        x = pattern[first : first + tensors[0].numel()]
        for rank, tensor in enumerate(tensors):
            torch.add(x, rank, out=tensor)
        collective.run(before=delay)
        for found, want in _results(case.kind, tensors, x):
            wrong += (found != want).sum()
        done += 1
        if done % 100 == 0:
            collective.check()
    collective.check()
    on_the_host = sum(
        not torch.equal(found.cpu(), want.cpu()) for found, want in _results(case.kind, tensors, x) if found.numel()
    )
    sheet.expect(
        int(wrong) == 0 and on_the_host == 0,
        f"{len(launches)} different launches in random order with random delays, W={world}",
        f"{done} epochs",
        f"{int(wrong)} elements were wrong, and {on_the_host} ranks in the last epoch",
        epochs=done,
        wrong=int(wrong),
    )
    if done < epochs:
        sheet.row("the rest of the epochs", verdict="not run", reason=f"no time for {epochs - done}")


def _results(
    kind: str, tensors: Sequence[torch.Tensor], x: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What each rank holds, and what it must hold, if rank r put in x + r and asked for the sum."""
    world = len(tensors)
    parts = split_evenly(x.numel(), world)
    total = x * world + world * (world - 1) // 2
    for rank, tensor in enumerate(tensors):
        if kind == "reduce_scatter":
            start, stop = parts[rank]
            yield tensor[start:stop], total[start:stop]
        elif kind == "all_reduce":
            yield tensor, total
        else:
            yield tensor, torch.cat([x[start:stop] + owner for owner, (start, stop) in enumerate(parts)])


def _missing_rank(sheet: Sheet, ranks: VirtualRanks, device: torch.device, algorithm: str) -> None:
    """Rank 1 never launches: the others leave in time, say so, and leave NaN. Then all is well again."""
    world, missing, timeout = ranks.world_size, 1, 1.0
    others = [rank for rank in range(world) if rank != missing]
    tensors = [torch.full((5_000 if not sheet.dry else 65,), float(rank), device=device) for rank in range(world)]
    collective = ranks.prepare("all_reduce", tensors, algorithm=algorithm, op="sum")
    started = time.monotonic()
    collective.run(timeout=timeout, ranks=others)
    if device.type == "cuda":
        torch.cuda.synchronize()
    took = time.monotonic() - started
    text = "nobody raised"
    try:
        collective.check()
    except CollectiveTimeoutError as error:
        text = str(error)
    poisoned = all(bool(tensors[rank].isnan().all()) for rank in others)
    problems = {
        f"the others left after {took:.1f} s": took > timeout + (10 if sheet.dry else 1),
        f"rank {missing} was not named: {text}": f"for rank {missing} " not in text,
        "their tensors are not NaN": not poisoned,
    }
    ranks.reset()
    for rank, tensor in enumerate(tensors):
        tensor.fill_(rank)
    collective.run()
    collective.check()
    problems["the next launch was wrong"] = any(bool((x != world * (world - 1) / 2).any()) for x in tensors)
    sheet.expect(
        not any(problems.values()),
        f"{algorithm}, a rank that never launches, W={world}",
        f"the others left after {took:.2f} s, named it, and left NaN; the next launch was right",
        "; ".join(problem for problem, is_there in problems.items() if is_there),
        seconds=took,
    )
