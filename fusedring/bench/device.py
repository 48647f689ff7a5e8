"""What a GPU has to show: the parts of benchmarks/device_check.py.

    a  correctness   every kernel on virtual ranks, to the bit and against float64
    b  stress        thousands of epochs with delays, and a rank that never comes
    c  speed         of all_reduce, against the bytes that it must move
    d  slowdown      of matmuls beside it
    e  training      the wrapper in a lone process
    f  ranks         several processes on several GPUs, against NCCL
    g  memcheck      compute-sanitizer on every kernel

With `sheet.dry` the same code runs on the CPU under Triton's interpreter, with tiny sizes; speed is not measured then.
Every part first launches each kernel that it will use as a lone rank: a kernel that is loaded while another waits for
it would wait for ever.
"""

from __future__ import annotations

import gc
import importlib
import math
import multiprocessing
import os
import platform
import random
import re
import secrets
import shutil
import statistics
import subprocess
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fusedring.bench.gpt import GPT, GPTConfig, batch_at, corpus, loss_of
from fusedring.bench.parts import NotRunError, Part, Sheet, part_command
from fusedring.bench.reference import different_bits, error_bound, exact, gathered, reduced
from fusedring.collectives import all_reduce, close
from fusedring.config import DTYPES, scale_factor
from fusedring.cuda_engine import CHANNELS, PARITY_BYTES
from fusedring.ddp import FusedRingDDP
from fusedring.errors import CollectiveTimeoutError
from fusedring.gpu import Event, Stream
from fusedring.plan import ALGORITHMS, KINDS, make_plan, split_evenly
from fusedring.testing import VirtualCollective, VirtualRanks, virtual_ranks

PARTS = (
    Part("a", "correctness", "fusedring.bench.device:correctness", 100),
    Part("b", "stress", "fusedring.bench.device:stress", 45),
    Part("c", "speed", "fusedring.bench.device:speed", 125),
    Part("d", "slowdown of matmuls", "fusedring.bench.device:slowdown", 35),
    Part("e", "training", "fusedring.bench.device:training", 70),
    Part("f", "several GPUs", "fusedring.bench.device:several_gpus", 60),
    Part("g", "memcheck", "fusedring.bench.device:memcheck", 40),
)
"""Their deadlines add up to less than 8 minutes."""

UNMEASURED = "not measured under the interpreter"
SPEED_TARGET = 0.85
"""Of the bandwidth of a copy, at TARGET_MB and above, with the best number of channels."""
TARGET_MB = 64
SLOWDOWN_TARGET = 1.10

_ADVISED = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Virtual ranks wait for each other, so none may queue behind another; cuBLAS then gives the same bits every time."""

_CHANNEL_COUNTS = tuple(sorted({4, 8, 16, 32, 64, CHANNELS}))
_PAIRS: tuple[tuple[torch.dtype, torch.dtype], ...] = (
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
)
"""dtype and wire of what is timed."""

_MB = 1 << 20
_LARGEST_MB = 1024
"""Of what is timed; with few numbers of channels, since to cut it into tiles takes the host most of a second."""
_COPY_BYTES = 1 << 30
_LEAD_CYCLES = 2_000_000
"""About a millisecond, in which the host gives the GPU all of what is timed next."""
_UNCACHED_BYTES = 128 * _MB
"""Inputs of one size take more than that in all, and so do not stay in a GPU's L2 cache."""


def environment(*, dry: bool) -> dict[str, str | None]:
    """Variables for the processes of the parts, set before CUDA or Triton starts."""
    if dry:
        return {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return {**_ADVISED, "TRITON_INTERPRET": None}


def versions() -> dict[str, Any]:
    """What runs here, without asking the GPU through torch."""
    try:
        triton = importlib.import_module("triton").__version__
    except ImportError:
        triton = None
    return {"python": platform.python_version(), "torch": torch.__version__, "triton": triton, "driver": _driver()}


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip()


def _device(sheet: Sheet) -> torch.device:
    """Where the part runs. Raises NotRunError without a GPU."""
    if sheet.dry:
        sheet.fact(gpu=None, gpus=0)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        sheet.fact(gpu=None, gpus=0)
        raise NotRunError("no GPU")
    sheet.fact(gpu=torch.cuda.get_device_name(), gpus=torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Kernels


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel: what it does, and for which dtypes."""

    kind: str
    algorithm: str
    dtype: torch.dtype
    wire: torch.dtype

    @property
    def how(self) -> dict[str, Any]:
        """Its arguments of a collective."""
        return {"algorithm": self.algorithm, "wire_dtype": None if self.wire == self.dtype else self.wire}

    def __str__(self) -> str:
        return f"{self.algorithm} {self.kind} {_short(self.dtype)}, wire {_short(self.wire)}"


def _all_cases() -> list[Case]:
    wires = {dtype: dict.fromkeys((dtype, torch.float16, torch.bfloat16)) for dtype in DTYPES}
    pairs = [(dtype, wire) for dtype in DTYPES for wire in wires[dtype]]
    return [Case(kind, algorithm, *pair) for algorithm in ALGORITHMS for kind in KINDS for pair in pairs]


def _launch_alone(device: torch.device, channels: int, cases: Sequence[Case]) -> dict[Case, str]:
    """Launch each as a lone rank. What was wrong, for those that fail."""
    failures = {}
    with virtual_ranks(1, device, channels=channels, parity_bytes=_MB) as alone:
        for case in cases:
            try:
                x = torch.ones(17 if device.type == "cpu" else 5003, dtype=case.dtype, device=device)
                collective = alone.prepare(case.kind, [x], **case.how)
                collective.run()
                collective.check()
                if not bool((x == 1).all()):
                    failures[case] = "as a lone rank it changes ones"
            except Exception as error:
                failures[case] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return failures


def _warmed_up(sheet: Sheet, device: torch.device, cases: Sequence[Case], counts: Sequence[int]) -> list[Case]:
    """The cases whose kernels work as a lone rank, with all these numbers of channels; a row tells of the others."""
    started = time.monotonic()
    if device.type == "cuda":
        _compile_ahead(device, cases, counts)
    failures: dict[Case, str] = {}
    launches = 0
    for channels in counts:
        working = [case for case in cases if case not in failures]
        launches += len(working)
        failures |= _launch_alone(device, channels, working)
    for case, why in failures.items():
        sheet.row(f"{case}, W=1", verdict="failed", reason=why)
    sheet.expect(
        not failures,
        "every kernel as a lone rank (W=1)",
        f"{launches} launches in {time.monotonic() - started:.1f} s",
        "see the rows above",
    )
    return [case for case in cases if case not in failures]


def _compile_ahead(device: torch.device, cases: Sequence[Case], counts: Sequence[int]) -> None:
    """Fill Triton's cache from several processes: a kernel takes 2 s to compile (Triton 3.7.1), and there are many.

    What fails in them fails again in this process, which tells of it.
    """
    workers = min(12, len(os.sched_getaffinity(0)) - 1, len(cases) * len(counts) // 2)
    if workers < 2:
        return
    shares = [(channels, cases[share::workers]) for share in range(workers) for channels in counts]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(_launch_alone, device, channels, share) for channels, share in shares]:
            future.exception()


# (a) Correctness


def correctness(sheet: Sheet) -> None:
    """Every kernel on W virtual ranks, with fresh numbers: to the bit, and against float64."""
    device = _device(sheet)
    seed = secrets.randbelow(1 << 31)
    sheet.row("seed of the inputs", str(seed))
    worlds, sizes = ((2,), (17, 2_133)) if sheet.dry else ((2, 4, 8), (1, 17, 4_611, 100_003, _MB + 7))
    cases = _all_cases()
    if sheet.dry:  # each algorithm and kind once, and among them all dtypes and wires
        cases = [cases[10 * place + place % 10] for place in range(len(cases) // 10)]
    cases = _warmed_up(sheet, device, cases, (2 if sheet.dry else 8,))
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


# (b) Stress


def stress(sheet: Sheet) -> None:
    """Mixed launches with random delays; then a rank that never launches, and what comes after."""
    device = _device(sheet)
    world, channels, epochs, sizes = (2, 2, 6, (17, 517)) if sheet.dry else (4, 8, 2000, (17, 5_000, 100_003))
    cases = [case for case in _all_cases() if case.dtype == case.wire == torch.float32]
    if sheet.dry:
        cases = [case for case in cases if case.kind == "all_reduce"]
    cases = _warmed_up(sheet, device, cases, (channels,))
    with virtual_ranks(world, device, channels=channels) as ranks:
        with sheet.attempt("mixed launches"):
            _mixed_launches(sheet, ranks, device, cases, sizes, epochs)
        for algorithm in ("ring",) if sheet.dry else ALGORITHMS:
            with sheet.attempt(f"{algorithm}, a rank that never launches"):
                _missing_rank(sheet, ranks, device, algorithm)
    with sheet.attempt("cooperative launches next to each other"):
        _cooperative_launches(sheet, device)


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


def _cooperative_launches(sheet: Sheet, device: torch.device) -> None:
    """Whether virtual ranks may launch as ranks on several GPUs do. Either answer is right: it is the driver's."""
    if device.type != "cuda":
        raise NotRunError("no cooperative launches under the interpreter")
    for world in (1, 2):
        with virtual_ranks(world, device, cooperative=True) as ranks:
            collective = ranks.prepare("all_reduce", _exact_inputs(world, 5_003, torch.float32, device))
            collective.run(timeout=2.0)
            try:
                collective.check()
                answer = "they run next to each other"
            except CollectiveTimeoutError:
                answer = "one waits for the other to end"
    sheet.row("cooperative launches of 2 virtual ranks", answer)


# (c) Speed


@dataclass(frozen=True, slots=True)
class Setting:
    """What is timed: all_reduce of nbytes bytes at each of W ranks."""

    world: int
    nbytes: int
    algorithm: str
    dtype: torch.dtype
    wire: torch.dtype

    @property
    def elements(self) -> int:
        """Of one rank's tensor."""
        return self.nbytes // self.dtype.itemsize

    @property
    def least_bytes(self) -> int:
        """Bytes that all ranks together read and write in one memory, if nothing is read or written twice.

        Every rank reads its input and writes its result once, in the tensor's dtype; every element that is sent, as the
        plan counts them, is written once and read once, in the wire dtype. With N elements of d bytes, w on the wire,
        that is for each rank N·2d + 4(W-1)/W·N·w for ring and two_shot, and for master in the mean of the ranks, and
        N·2d + 2(W-1)·N·w for one_shot.
        """
        plan = make_plan("all_reduce", self.algorithm, self.world, self.elements)
        own = 2 * self.world * self.elements * self.dtype.itemsize
        return own + 2 * plan.elements_transferred * self.wire.itemsize

    @property
    def parity_bytes(self) -> int:
        """Slots, of one parity, into which the whole bucket goes at once."""
        from fusedring.kernels.direct import direct_rows
        from fusedring.kernels.ring import ring_rows

        rows = ring_rows(self.world) if self.algorithm == "ring" else direct_rows(self.algorithm, self.world)
        segment = max(stop - start for start, stop in split_evenly(self.elements, self.world))
        row = segment * (1 if self.algorithm in ("ring", "two_shot") else self.world)
        return rows * (-(-row * self.wire.itemsize // 256) * 256)

    def __str__(self) -> str:
        wire = "" if self.wire == self.dtype else f", wire {_short(self.wire)}"
        return f"{self.algorithm} {_short(self.dtype)}{wire}, W={self.world}, {self.nbytes // _MB} MB"


def speed(sheet: Sheet) -> None:
    """All algorithms against the bytes that they must move, at the speed of a copy."""
    device = _device(sheet)
    counts = (2,) if sheet.dry else _fitting(2, _CHANNEL_COUNTS, device)
    cases = [Case("all_reduce", algorithm, *pair) for pair in _PAIRS for algorithm in ALGORITHMS]
    cases = _warmed_up(sheet, device, cases[::3] if sheet.dry else cases, counts)
    if sheet.dry:
        for case in cases:
            with sheet.attempt(str(case)), virtual_ranks(2, device) as ranks:
                tensors = _exact_inputs(2, 4_099, case.dtype, device)
                ranks.all_reduce(tensors, **case.how)
                sheet.expect(_wrong(tensors) == 0, f"{case}, W=2, before it is timed", "exact", "wrong numbers")
        sheet.row("speed of all_reduce", target=_percent(SPEED_TARGET), verdict="not run", reason=UNMEASURED)
        return
    ceiling = _copy_bandwidth(device)
    sheet.row("copy of 1 GiB on the device, read and written", f"{ceiling / 1e9:.0f} GB/s", bytes_per_s=ceiling)
    best: dict[Case, int] = {}
    plan = [(2, 64), (2, 256), (4, 64), (8, 64), (2, 1), (2, 16), (2, _LARGEST_MB)]
    for number, (world, megabytes) in enumerate(plan):
        if sheet.seconds_left < 15:
            rest = ", ".join(f"{mb} MB with W={w}" for w, mb in plan[number:])
            sheet.row("the other sizes", verdict="not run", reason=f"no time for {rest}")
            break
        settings = {case: Setting(world, megabytes * _MB, case.algorithm, case.dtype, case.wire) for case in cases}
        fitting = set(_fitting(world, counts, device))
        tried = {case: {best.get(case, CHANNELS), CHANNELS} & fitting for case in cases}
        if megabytes < _LARGEST_MB:
            tried = dict.fromkeys(cases, fitting)
        with sheet.attempt(f"all_reduce, W={world}, {megabytes} MB"):
            found = _time_settings(sheet, device, settings, tried, ceiling)
            if (world, megabytes) == (2, 256):
                best = found
        gc.collect()
        torch.cuda.empty_cache()


def _fitting(world: int, counts: Sequence[int], device: torch.device) -> list[int]:
    places = torch.cuda.get_device_properties(device).multi_processor_count
    return [channels for channels in counts if world * channels <= places]


def _time_settings(
    sheet: Sheet, device: torch.device, settings: dict[Case, Setting], tried: dict[Case, set[int]], ceiling: float
) -> dict[Case, int]:
    """Rows for settings of one world size and size. tried: numbers of channels. Returns the best of them."""
    seconds: dict[Case, dict[int, float]] = {case: {} for case in settings}
    wrong: dict[Case, int] = dict.fromkeys(settings, 0)
    world = next(iter(settings.values())).world
    parity_bytes = max(setting.parity_bytes for setting in settings.values())
    for channels in sorted(set().union(*tried.values()), key=lambda count: (count != CHANNELS, count)):
        if sheet.seconds_left < 10:
            break
        with virtual_ranks(world, device, channels=channels, parity_bytes=parity_bytes) as ranks:
            for case in (case for case in settings if channels in tried[case]):
                took, bad = _time_collective(ranks, device, settings[case])
                seconds[case][channels] = took
                wrong[case] += bad
    default_slots = _with_default_slots(sheet, device, settings)
    theirs: dict[tuple[torch.dtype, torch.dtype], float] = {}
    for case, setting in settings.items():
        pair = (case.dtype, case.wire)
        if pair not in theirs:
            theirs[pair] = _time_torch(device, setting)
        if seconds[case]:
            _speed_row(sheet, setting, seconds[case], default_slots.get(case), theirs[pair], wrong[case], ceiling)
    return {case: min(found, key=found.__getitem__) for case, found in seconds.items() if found}


def _speed_row(
    sheet: Sheet,
    setting: Setting,
    seconds: dict[int, float],
    default_slots: float | None,
    torch_seconds: float,
    wrong: int,
    ceiling: float,
) -> None:
    fractions = {channels: setting.least_bytes / took / ceiling for channels, took in seconds.items()}
    best = max(fractions, key=fractions.__getitem__)
    value = f"{_percent(fractions[best])} of a copy with {best} channels ({1e3 * seconds[best]:.3f} ms)"
    if CHANNELS in fractions and best != CHANNELS:
        value += f", {_percent(fractions[CHANNELS])} with {CHANNELS}"
    if default_slots is not None:
        value += f", {_percent(setting.least_bytes / default_slots / ceiling)} in windows of the default slots"
    value += f"; {torch_seconds / seconds[best]:.2f} times as fast as torch"
    has_target = setting.nbytes >= TARGET_MB * _MB
    verdict = "missed" if has_target and fractions[best] < SPEED_TARGET else "ok"
    sheet.row(
        str(setting),
        value,
        _percent(SPEED_TARGET) if has_target else "",
        "failed" if wrong else verdict,
        f"{wrong} wrong numbers" if wrong else "",
        seconds=seconds,
        fractions=fractions,
        default_slots=default_slots,
        torch_seconds=torch_seconds,
        least_bytes=setting.least_bytes,
    )


def _with_default_slots(sheet: Sheet, device: torch.device, settings: dict[Case, Setting]) -> dict[Case, float]:
    """Seconds with the engine's own slots and channels, where the bucket goes into those in several windows."""
    world, nbytes = next((setting.world, setting.nbytes) for setting in settings.values())
    larger = {case: setting for case, setting in settings.items() if setting.parity_bytes > PARITY_BYTES}
    if world > 2 or nbytes == _LARGEST_MB * _MB or not larger or sheet.seconds_left < 30:
        return {}
    with virtual_ranks(world, device, channels=CHANNELS, parity_bytes=PARITY_BYTES) as ranks:
        return {case: _time_collective(ranks, device, setting)[0] for case, setting in larger.items()}


def _time_collective(ranks: VirtualRanks, device: torch.device, setting: Setting) -> tuple[float, int]:
    """Seconds of one launch, and how many numbers were wrong before or after it was timed."""
    how = Case("all_reduce", setting.algorithm, setting.dtype, setting.wire).how
    sets = [
        _exact_inputs(setting.world, setting.elements, setting.dtype, device)
        for _ in range(_sets_of(setting.world * setting.nbytes))
    ]
    collectives = [ranks.prepare("all_reduce", tensors, **how) for tensors in sets]
    for collective in collectives:
        collective.run()
    collectives[-1].check()
    wrong = _wrong(sets[0])
    seconds = _median_seconds([_timed_run(collective) for collective in collectives], hold_up=setting.world)
    collectives[-1].check()
    return seconds, wrong + _wrong(sets[-1])


def _timed_run(collective: VirtualCollective) -> Callable[[], tuple[Event, Event]]:
    def run() -> tuple[Event, Event]:
        events = collective.run()
        assert events is not None
        return events

    return run


def _time_torch(device: torch.device, setting: Setting) -> float:
    """Seconds of torch's own way to the same: cast, divide, add, copy back."""
    world = setting.world

    def run(tensors: Sequence[torch.Tensor]) -> tuple[Event, Event]:
        begun = _mark()
        narrow = [x.to(setting.wire).div_(world) if x.dtype != setting.wire else x.div(world) for x in tensors]
        total = narrow[0]
        for x in narrow[1:]:
            total += x
        for x in tensors:
            x.copy_(total)
        return begun, _mark()

    sets = [
        _exact_inputs(world, setting.elements, setting.dtype, device) for _ in range(_sets_of(world * setting.nbytes))
    ]
    return _median_seconds([lambda tensors=tensors: run(tensors) for tensors in sets])  # type: ignore[misc]


def _copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second."""
    source, target = (torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))

    def run() -> tuple[Event, Event]:
        begun = _mark()
        target.copy_(source)
        return begun, _mark()

    return 2 * _COPY_BYTES / _median_seconds([run], repeats=20)


def _median_seconds(runs: Sequence[Callable[[], tuple[Event, Event]]], *, repeats: int = 10, hold_up: int = 1) -> float:
    """Of events that each run returns. The runs take turns, and each is given to the GPU while that is held up."""
    runs[0]()
    spans = []
    for turn in range(repeats):
        _hold_up(hold_up)
        spans.append(runs[(turn + 1) % len(runs)]())
    torch.cuda.synchronize()
    return statistics.median(_seconds(begun, done) for begun, done in spans)


def _mark() -> Event:
    """When the current stream has done what it has been given."""
    return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]


def _seconds(first: Event, second: Event) -> float:
    return float(first.elapsed_time(second)) / 1e3


def _hold_up(times: int = 1) -> None:
    """Keep the current stream busy while the host gives it what comes next."""
    torch.cuda._sleep(times * _LEAD_CYCLES)  # type: ignore[no-untyped-call]


def _new_stream() -> Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _sets_of(nbytes: int) -> int:
    return max(1, min(32, -(-_UNCACHED_BYTES // nbytes)))


def _exact_inputs(world: int, elements: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """For each rank numbers whose mean, and all on the way to it, is exact in every dtype, for up to 8 ranks.

    Rank r has p + r, p from 0 to 3. Divided by W they are below 2 and multiples of 1/8, and so are sums of 8, below 8.
    """
    pattern = (torch.arange(elements, device=device, dtype=torch.int32) & 3).to(dtype)
    return [pattern + rank for rank in range(world)]


def _wrong(tensors: Sequence[torch.Tensor]) -> int:
    """Numbers that are not the mean of `_exact_inputs`."""
    world, first = len(tensors), tensors[0]
    want = (torch.arange(first.numel(), device=first.device, dtype=torch.int32) & 3).to(first.dtype) + (world - 1) / 2
    return sum(int((x != want).sum()) for x in tensors)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


# (d) Slowdown of what runs beside it


def slowdown(sheet: Sheet) -> None:
    """Matmuls alone, and while all_reduces run on the streams of virtual ranks."""
    device = _device(sheet)
    setting = Setting(2, 256 * _MB, "ring", torch.float32, torch.bfloat16)
    target = f"at most {SLOWDOWN_TARGET:.2f} times"
    if sheet.dry:
        sheet.row("matmuls beside all_reduce", target=target, verdict="not run", reason=UNMEASURED)
        return
    counts = _fitting(2, _CHANNEL_COUNTS, device)
    case = Case("all_reduce", setting.algorithm, setting.dtype, setting.wire)
    if not _warmed_up(sheet, device, [case], counts):
        return
    for size, repeats in ((4096, 40), (8192, 12)):
        a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)

        def matmul(a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor = out) -> None:
            torch.mm(a, b, out=out)

        alone = _repeat(matmul, repeats)
        for channels in counts:
            what = f"bf16 matmul of {size}, beside {channels} channels of each of 2 ranks"
            if sheet.seconds_left < 4:
                sheet.row(what, verdict="not run", reason="no time")
                continue
            with virtual_ranks(2, device, channels=channels, parity_bytes=setting.parity_bytes) as ranks:
                beside, enough = _beside_all_reduce(ranks, device, setting, matmul, repeats, alone)
            ratio = beside / alone
            decides = channels == CHANNELS
            verdict = "missed" if decides and ratio > SLOWDOWN_TARGET else "ok"
            value = f"{ratio:.2f} times as long ({1e3 * beside:.2f} instead of {1e3 * alone:.2f} ms)"
            if not enough:
                verdict, value = "not run", ""
            sheet.row(
                what,
                value,
                target if decides else "",
                verdict,
                "" if enough else "the all_reduces were over before the matmuls",
                ratio=ratio,
                alone=alone,
                beside=beside,
            )


def _repeat(act: Callable[[], None], repeats: int) -> float:
    """Median seconds of `act` on the current stream, one after another."""
    act()
    _hold_up()
    marks = [_mark()]
    for _ in range(repeats):
        act()
        marks.append(_mark())
    torch.cuda.synchronize()
    return statistics.median(_seconds(i, j) for i, j in pairwise(marks))


def _beside_all_reduce(
    ranks: VirtualRanks,
    device: torch.device,
    setting: Setting,
    act: Callable[[], None],
    repeats: int,
    alone: float,
) -> tuple[float, bool]:
    """Median seconds of `act` while all_reduces run in a loop, and whether they ran until the end.

    Everything is given to the GPU while that is held up, so that the host's pace does not matter.
    """
    tensors = _exact_inputs(setting.world, setting.elements, setting.dtype, device)
    how = Case("all_reduce", setting.algorithm, setting.dtype, setting.wire).how
    collective = ranks.prepare("all_reduce", tensors, **how)
    each = _median_seconds([_timed_run(collective)], repeats=3)
    side = _new_stream()  # where the loop is ordered; the current stream is left to `act`
    launches = 2 + math.ceil(1.5 * repeats * alone / each)
    beside, last = 0.0, 0.0
    for _ in range(3):
        _hold_up(launches)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(launches):
                done = _timed_run(collective)()[1]
        marks = []
        for _ in range(repeats + 1):
            act()  # the first one comes before the first mark, while the all_reduces get under way
            marks.append(_mark())
        torch.cuda.synchronize()
        beside = statistics.median(_seconds(i, j) for i, j in pairwise(marks))
        last = _seconds(marks[-1], done)
        if last >= 0:
            break
        launches *= 2
    collective.check()
    return beside, last >= 0


# (e) Training


@dataclass(frozen=True, slots=True)
class Trainer:
    """What the small GPT is trained with."""

    device: torch.device
    config: GPTConfig
    batch_size: int
    steps: int
    data: torch.Tensor

    @classmethod
    def on(cls, device: torch.device, *, dry: bool) -> Trainer:
        """Tiny if `dry`."""
        if dry:
            return cls(device, GPTConfig(context=8, width=32, heads=2, layers=1), 2, 2, corpus()[:10_000])
        return cls(device, GPTConfig(context=128, width=512, heads=8, layers=6), 16, 20, corpus())

    def model(self) -> GPT:
        """The same every time."""
        torch.manual_seed(0)
        return GPT(self.config).to(self.device)

    def wrap(self, model: nn.Module, **options: Any) -> FusedRingDDP:
        """In the wrapper, by way of the kernels."""
        device_ids: Any = [self.device.index] if self.device.type == "cuda" else None
        return FusedRingDDP(model, device_ids=device_ids, engine="triton", **options)

    def batch(self, step: int, rank: int = 0) -> torch.Tensor:
        """Of one rank at one step."""
        return batch_at(self.data, self.config, step=step, rank=rank, size=self.batch_size).to(self.device)

    def gradients(self, model: nn.Module, step: int = 0, rank: int = 0) -> list[torch.Tensor]:
        """Copies of the gradients of one forward and backward."""
        model.zero_grad()
        loss_of(model, self.batch(step, rank)).backward()  # type: ignore[no-untyped-call]
        return [_gradient(p).clone() for p in model.parameters()]


def training(sheet: Sheet) -> None:
    """The wrapper around a small GPT in a lone process, where averaging changes nothing but the rounding."""
    device = _device(sheet)
    trainer = Trainer.on(device, dry=sheet.dry)
    with _reproducible():
        with sheet.attempt("memory beyond the unwrapped model's"):
            _memory(sheet, trainer)
        with sheet.attempt("gradients"):
            _gradients(sheet, trainer)
        with sheet.attempt("exposed communication"):
            _exposed(sheet, trainer)
        with sheet.attempt("autocast and GradScaler"):
            _mixed_precision(sheet, trainer)
        with sheet.attempt("whole step in a CUDA graph"):
            _graph(sheet, trainer)
        with sheet.attempt("torch.compile(FusedRingDDP(model))"):
            _compiled(sheet, trainer)
    close()


@contextmanager
def _reproducible() -> Iterator[None]:
    """The same bits from the same model every time, where torch can."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.simplefilter("ignore")
        yield


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _same(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


def _memory(sheet: Sheet, trainer: Trainer) -> None:
    """The peak of a step with the wrapper and without, against what it says that it needs: buckets and slots."""
    from fusedring.kernels.region import region_bytes

    if trainer.device.type != "cuda":
        raise NotRunError("no GPU memory under the interpreter")

    def peak(wrapped: bool) -> tuple[int, int]:
        model = trainer.wrap(trainer.model()) if wrapped else trainer.model()
        trainer.gradients(model)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        model.zero_grad()
        loss_of(model, trainer.batch(1)).backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        report = model.report() if isinstance(model, FusedRingDDP) else None
        buckets = sum(bucket.bytes for bucket in report.buckets) if report is not None else 0
        return torch.cuda.max_memory_allocated(), buckets

    peak(wrapped=False)  # libraries get their own memory
    without, _ = peak(wrapped=False)
    gc.collect()
    within, buckets = peak(wrapped=True)
    extra, allowed = within - without, buckets + region_bytes(1, PARITY_BYTES)
    sheet.row(
        "memory beyond the unwrapped model's",
        f"{extra / _MB:.1f} MiB",
        f"{allowed / _MB:.1f} MiB: {buckets / _MB:.1f} of buckets, the rest slots",
        "ok" if extra <= 1.02 * allowed + _MB else "missed",
        extra=extra,
        buckets=buckets,
        allowed=allowed,
    )


def _gradients(sheet: Sheet, trainer: Trainer) -> None:
    """Alone, the mean is the gradient itself, narrowed to the wire."""
    plain = trainer.gradients(trainer.model())
    reproduces = _same(plain, trainer.gradients(trainer.model()))
    for wire in (None, torch.bfloat16):
        for algorithm in ("ring",) if sheet.dry else ("ring", "two_shot"):
            what = f"gradients, {algorithm}, wire {'None' if wire is None else _short(wire)}, W=1"
            with sheet.attempt(what):
                found = trainer.gradients(trainer.wrap(trainer.model(), wire_dtype=wire, algorithm=algorithm))
                want = [g if wire is None else g.to(wire).to(g.dtype) for g in plain]
                _compare(sheet, what, found, want, reproduces)


def _compare(
    sheet: Sheet, what: str, found: Sequence[torch.Tensor], want: Sequence[torch.Tensor], reproduces: bool
) -> None:
    """To the bit, if the model alone gives the same bits twice; if not, nothing can be demanded of the wrapper."""
    same = _same(found, want)
    if same or reproduces:
        far = max(float((a - b).abs().max()) for a, b in zip(found, want, strict=True))
        sheet.expect(same, what, "equal to the bit", f"they differ, by {far:.3g} at most", far=far)
    else:
        sheet.row(what, verdict="not run", reason="the unwrapped model does not give the same bits twice")


def _exposed(sheet: Sheet, trainer: Trainer) -> None:
    """What the wrapper's own report says of the last of several backwards."""
    model = trainer.wrap(trainer.model(), wire_dtype="bf16")
    for step in range(1 if sheet.dry else 5):
        trainer.gradients(model, step)
    report = model.report()
    assert report is not None
    if sheet.dry:
        sheet.row("exposed communication, W=1", verdict="not run", reason=UNMEASURED)
        return
    backward = report.backward_end - report.backward_start
    sheet.row(
        "exposed communication, wire bf16, W=1",
        f"{1e3 * report.exposed_wait:.3f} ms after a backward of {1e3 * backward:.2f} ms, {_percent(report.overlap)} "
        f"overlapped, {len(report.launches)} launches",
        exposed_wait=report.exposed_wait,
        backward=backward,
        overlap=report.overlap,
    )


def _mixed_precision(sheet: Sheet, trainer: Trainer) -> None:
    """Steps with autocast and GradScaler end with the same parameters as without the wrapper."""
    kind = trainer.device.type

    def train(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler(kind, init_scale=1024.0)
        for step in range(2 if sheet.dry else 5):
            with torch.autocast(kind, torch.bfloat16):
                loss = loss_of(model, trainer.batch(step))
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    plain = train(trainer.model())
    reproduces = _same(plain, train(trainer.model()))
    _compare(sheet, "parameters after autocast and GradScaler", train(trainer.wrap(trainer.model())), plain, reproduces)


def _graph(sheet: Sheet, trainer: Trainer) -> None:
    """A training step, captured and replayed, gives the losses of as many steps that were not captured."""
    if trainer.device.type != "cuda":
        raise NotRunError("no CUDA graphs under the interpreter")
    before = 3

    def parts(model: nn.Module) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        batch = trainer.batch(0)

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss.detach()

        return batch, step

    batch, step = parts(trainer.model())
    want = []
    for number in range(before + trainer.steps):
        batch.copy_(trainer.batch(number))
        want.append(float(step()))
    batch, step = parts(trainer.wrap(trainer.model()))
    side = _new_stream()  # as torch's documentation of graphs demands of steps before a capture
    side.wait_stream(torch.cuda.current_stream())
    found = []
    with torch.cuda.stream(side):
        for number in range(before):
            batch.copy_(trainer.batch(number))
            found.append(float(step()))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for number in range(before, before + trainer.steps):
        batch.copy_(trainer.batch(number))
        graph.replay()
        found.append(float(loss))
    far = max(abs(a - b) for a, b in zip(found, want, strict=True))
    sheet.expect(
        far == 0,
        "whole step in a CUDA graph",
        f"{trainer.steps} replays with the losses of uncaptured steps, {want[0]:.4f} to {want[-1]:.4f}",
        f"losses differ by up to {far:.3g}: {found[-1]:.6f} instead of {want[-1]:.6f} at the end",
        far=far,
    )


def _compiled(sheet: Sheet, trainer: Trainer) -> None:
    """The compiled wrapper against the compiled model: compilation alone may change bits."""
    backend = "aot_eager" if sheet.dry else "inductor"  # Inductor takes minutes on a busy CPU
    trainer = replace(trainer, config=replace(trainer.config, layers=1))
    if sheet.seconds_left < (0 if sheet.dry else 25):
        raise NotRunError("no time for the compiler")

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        torch._dynamo.reset()
        compiled: Any = torch.compile(model, backend=backend)
        trainer.gradients(compiled)
        return trainer.gradients(compiled, step=1)

    try:
        plain = gradients(trainer.model())
    except Exception as error:
        raise NotRunError(f"torch.compile of the model alone: {type(error).__name__}: {str(error)[:120]}") from error
    reproduces = _same(plain, gradients(trainer.model()))
    found = gradients(trainer.wrap(trainer.model()))
    what = f"gradients of torch.compile(FusedRingDDP(model)), {backend}"
    if _same(found, plain):
        sheet.expect(True, what, "equal to the bit to those of the compiled model")
        return
    # The wrapper may split the graph elsewhere, so that Inductor fuses otherwise. A gradient element is a sum over all
    # tokens of the batch, each rounded a few times: T terms give at most T roundings of a sum of magnitudes, of which
    # the largest gradient of the tensor, times the square root of T, is taken as the size.
    terms = trainer.batch_size * trainer.config.context
    unit = torch.finfo(torch.float32).eps
    far = max(
        float((a - b).abs().max() / (b.abs().max() * unit * terms**1.5)) for a, b in zip(found, plain, strict=True)
    )
    value = f"{far:.3g} of what other roundings explain" + ("" if reproduces else "; the model alone varies, too")
    sheet.expect(far <= 1, what, value, "further from those of the compiled model than rounding explains", far=far)


# (f) Several GPUs


def several_gpus(sheet: Sheet) -> None:
    """One process for each GPU, against NCCL; in the dry mode two processes over gloo, for correctness only."""
    _device(sheet)
    world = 2 if sheet.dry else torch.cuda.device_count()
    if world < 2:
        raise NotRunError("1 GPU")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, str(Path(folder) / "store"), sheet)
        torch.multiprocessing.spawn(_as_rank, args=arguments, nprocs=world)  # type: ignore[attr-defined, no-untyped-call]


def _as_rank(rank: int, world: int, store: str, sheet: Sheet) -> None:
    """A rank's process. Only rank 0's rows are kept."""
    if rank != 0:
        sheet.path = None
    if sheet.dry:
        device, backend = torch.device("cpu"), "gloo"
    else:
        device, backend = torch.device("cuda", rank), "nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=30),
        device_id=None if sheet.dry else device,
    )
    try:
        _check_ranks(sheet, device)
        _train_ranks(sheet, device)
        if sheet.dry:
            sheet.row("busbw and step time", verdict="not run", reason=UNMEASURED)
        else:
            _race(sheet, device)
        close()
    except BaseException:
        traceback.print_exc()
        raise
    dist.destroy_process_group()


def _sum_of_ranks(number: int, device: torch.device) -> int:
    total = torch.tensor(number, device=device)
    dist.all_reduce(total)
    return int(total)


def _check_ranks(sheet: Sheet, device: torch.device) -> None:
    """Every rank knows all inputs, and so what must come out, to the bit."""
    rank, world = dist.get_rank(), dist.get_world_size()
    elements = 517 if sheet.dry else 1_000_003
    for dtype, wire in _PAIRS:
        wrong = 0
        for algorithm in ALGORITHMS if dtype != wire or not sheet.dry else ("ring",):
            inputs = [
                torch.randn(elements, generator=torch.Generator().manual_seed(r)).to(device, dtype)
                for r in range(world)
            ]
            x = inputs[rank].clone()
            how = Case("all_reduce", algorithm, dtype, wire).how
            all_reduce(x, engine="triton", **how)
            wrong += different_bits(x, reduced(inputs, algorithm, wire, scale_factor("avg", None, world, dtype)))
        total = _sum_of_ranks(wrong, device)
        what = f"all_reduce of {_short(dtype)}, wire {_short(wire)}, on {world} processes"
        sheet.expect(total == 0, what, "to the bit", f"{total} elements differ", wrong=total)


def _train_ranks(sheet: Sheet, device: torch.device) -> None:
    """Gradients are the same bits on all ranks, and the mean of the ranks' own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    trainer = Trainer.on(device, dry=sheet.dry)
    with _reproducible():
        own = torch.cat([g.view(-1) for g in trainer.gradients(trainer.model(), rank=rank)])
        model = trainer.wrap(trainer.model(), algorithm="two_shot")
        found = torch.cat([g.view(-1) for g in trainer.gradients(model, rank=rank)])
    everyone = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(everyone, own)
    factor = scale_factor("avg", None, world, own.dtype)
    far = (found.double() - exact(everyone, factor)).abs()
    beyond = int((far > error_bound(everyone, "two_shot", own.dtype, factor)).sum())
    dist.all_gather(everyone, found)
    differ = sum(different_bits(x, found) for x in everyone)
    problems = _sum_of_ranks(beyond + differ, device)
    sheet.expect(
        problems == 0,
        f"gradients of FusedRingDDP on {world} processes",
        "the same bits everywhere, and the mean within rounding",
        f"{beyond} elements are not the mean, {differ} differ between ranks",
    )


def _race(sheet: Sheet, device: torch.device) -> None:
    """busbw against NCCL and torch's symmetric memory, and the step time of the GPT against torch's wrapper."""
    for (dtype, wire), megabytes in product(_PAIRS, (1, 4, 16, 64, 256)):
        what = f"busbw of {_short(dtype)}, wire {_short(wire)}, {megabytes} MB"
        if _sum_of_ranks(int(sheet.seconds_left < 15), device):  # all ranks go on, or none does
            sheet.row(what, verdict="not run", reason="no time")
            continue
        with sheet.attempt(what):
            _race_all_reduce(sheet, device, dtype, wire, megabytes * _MB)
    with sheet.attempt("step of the GPT"):
        _race_training(sheet, device)


def _race_all_reduce(sheet: Sheet, device: torch.device, dtype: torch.dtype, wire: torch.dtype, nbytes: int) -> None:
    world = dist.get_world_size()
    x = torch.ones(nbytes // dtype.itemsize, dtype=dtype, device=device)
    how = Case("all_reduce", "auto", dtype, wire).how

    def with_nccl() -> None:
        narrow = x.to(wire)
        dist.all_reduce(narrow)
        x.copy_(narrow.div_(world))

    ways: dict[str, Callable[[], object]] = {
        "fusedring": lambda: all_reduce(x, **how),
        "NCCL": with_nccl,
    }
    missing = {}
    for name in ("two_shot_all_reduce_", "one_shot_all_reduce"):
        way = (
            _symmetric(name, nbytes // dtype.itemsize, dtype, device)
            if dtype == wire
            else "its wire is the dtype itself"
        )
        if isinstance(way, str):
            missing[name] = way
        else:
            ways[name] = way
    seconds = {name: _slowest(_repeat_events(way, 20), device) for name, way in ways.items()}
    busbw = {name: 2 * (world - 1) / world * nbytes / took / 1e9 for name, took in seconds.items()}
    value = ", ".join(f"{name} {speed:.1f}" for name, speed in busbw.items()) + " GB/s"
    slower = busbw["fusedring"] < busbw["NCCL"]
    what = f"busbw of {_short(dtype)}, wire {_short(wire)}, {nbytes // _MB} MB"
    without = "; ".join(f"without {name}: {why}" for name, why in missing.items())
    sheet.row(what, value, "NCCL's", "missed" if slower else "ok", without, seconds=seconds, missing=missing)


def _symmetric(name: str, elements: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object] | str:
    """torch's all_reduce over symmetric memory, or why it cannot be had, the same on all ranks."""
    way: Callable[[], object] | None = None
    try:
        from torch.distributed import _symmetric_memory

        memory = _symmetric_memory.empty(elements, dtype=dtype, device=device)
        assert dist.group.WORLD is not None
        _symmetric_memory.rendezvous(memory, dist.group.WORLD)
        operator, group = getattr(torch.ops.symm_mem, name), dist.group.WORLD.group_name
        operator(memory, "sum", group)
        way, why = lambda: operator(memory, "sum", group), ""
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"
    failed = _sum_of_ranks(int(way is None), device)
    if way is None or failed:
        return why or "it failed on another rank"
    return way


def _repeat_events(act: Callable[[], object], repeats: int) -> float:
    """Seconds of one of `repeats` calls, one after another."""
    for _ in range(3):
        act()
    dist.barrier()
    begun = _mark()
    for _ in range(repeats):
        act()
    done = _mark()
    torch.cuda.synchronize()
    return _seconds(begun, done) / repeats


def _slowest(seconds: float, device: torch.device) -> float:
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _race_training(sheet: Sheet, device: torch.device) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    trainer, rank = Trainer.on(device, dry=False), dist.get_rank()
    theirs = DistributedDataParallel(trainer.model(), device_ids=[device.index], gradient_as_bucket_view=True)
    theirs.register_comm_hook(None, bf16_compress_hook)
    replicas = {"fusedring": trainer.wrap(trainer.model(), wire_dtype="bf16"), "torch": theirs}
    spans: dict[str, float] = {}
    exposed: dict[str, float] = {}
    batch = trainer.batch(0, rank)
    for name, replica in replicas.items():

        def step(synced: bool, replica: Any = replica) -> None:
            around: AbstractContextManager[None] = nullcontext() if synced else replica.no_sync()
            with around:
                loss_of(replica, batch).backward()  # type: ignore[no-untyped-call]
            replica.zero_grad()

        with_sync, without = (_slowest(_repeat_events(lambda s=s: step(s), 10), device) for s in (True, False))  # type: ignore[misc]
        spans[name], exposed[name] = with_sync, max(0.0, with_sync - without)
    value = "; ".join(
        f"{name} {1e3 * spans[name]:.2f} ms, {1e3 * exposed[name]:.2f} of it exposed communication" for name in spans
    )
    sheet.row(
        "forward and backward of the GPT, wire bf16",
        value,
        "torch's with bf16_compress_hook",
        "ok" if spans["fusedring"] <= spans["torch"] else "missed",
        seconds=spans,
        exposed=exposed,
    )


# (g) Memcheck


def memcheck(sheet: Sheet) -> None:
    """compute-sanitizer looks at all accesses of a launch of every kernel as a lone rank."""
    if sheet.dry:
        raise NotRunError("compute-sanitizer has nothing to look at under the interpreter")
    _device(sheet)
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        raise NotRunError("no compute-sanitizer on PATH")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        seconds = sheet.seconds_left - 3
        command = part_command(
            "fusedring.bench.device:launch_every_kernel", path, deadline=time.monotonic() + seconds, dry=False
        )
        try:
            done = subprocess.run(
                [sanitizer, "--tool", "memcheck", *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds,
                check=False,
                # It looks at all code that is loaded, and a lone rank does not mind if that is late.
                env={**os.environ, "CUDA_MODULE_LOADING": "LAZY"},
            )
        except subprocess.TimeoutExpired:
            raise NotRunError(f"compute-sanitizer did not come to an end in {seconds:.0f} s") from None
        launched = path.exists() and '"verdict": "ok"' in path.read_text()
    summary = re.search(r"ERROR SUMMARY: (\d+) error", done.stdout)
    if summary is None:
        raise NotRunError(f"compute-sanitizer gave no summary: {done.stdout.strip()[-200:]}")
    errors = int(summary[1])
    sheet.expect(
        errors == 0 and launched,
        "compute-sanitizer memcheck, every kernel, W=1",
        f"{errors} errors",
        f"{errors} errors" if errors else "a kernel failed",
        errors=errors,
    )


def launch_every_kernel(sheet: Sheet) -> None:
    """What memcheck looks at."""
    device = _device(sheet)
    cases = [case for case in _all_cases() if (case.dtype, case.wire) == (torch.float32, torch.bfloat16)]
    failures = _launch_alone(device, 8, cases)
    sheet.expect(not failures, "every kernel as a lone rank", f"{len(cases)} launches", str(failures))
