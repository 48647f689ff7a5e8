"""Part d: how much longer matmuls take while all_reduces run beside them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from benchmarks.device.cases import Case, warmed_up
from benchmarks.device.exact_inputs import exact_inputs
from benchmarks.device.machine import CHANNEL_COUNTS, UNMEASURED, device_of, fitting
from benchmarks.device.setting import Setting
from benchmarks.device.sheet import Sheet
from benchmarks.device.stream_marks import (
    hold_up,
    mark,
    median_between,
    median_seconds,
    new_stream,
    seconds_between,
    timed_run,
)
from benchmarks.device.units import MB
from fusedring.engines.cuda import CHANNELS
from fusedring.testing import VirtualRanks, virtual_ranks

SLOWDOWN_TARGET = 1.10


def slowdown(sheet: Sheet) -> None:
    """The part: matmuls alone, and while all_reduces run on the streams of virtual ranks."""
    device = device_of(sheet)
    setting = Setting(2, 256 * MB, "ring", torch.float32, torch.bfloat16)
    target = f"at most {SLOWDOWN_TARGET:.2f} times"
    if sheet.dry:
        sheet.row("matmuls beside all_reduce", target=target, verdict="not run", reason=UNMEASURED)
        return
    counts = fitting(2, CHANNEL_COUNTS, device)
    case = Case("all_reduce", setting.algorithm, setting.dtype, setting.wire)
    if not warmed_up(sheet, device, [case], counts):
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
    hold_up()
    marks = [mark()]
    for _ in range(repeats):
        act()
        marks.append(mark())
    torch.cuda.synchronize()
    return median_between(marks)


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
    tensors = exact_inputs(setting.world, setting.elements, setting.dtype, device)
    how = Case("all_reduce", setting.algorithm, setting.dtype, setting.wire).how
    collective = ranks.prepare("all_reduce", tensors, **how)
    each = median_seconds([timed_run(collective)], repeats=3)
    side = new_stream()  # where the loop is ordered; the current stream is left to `act`
    launches = 2 + math.ceil(1.5 * repeats * alone / each)
    beside, last = 0.0, 0.0
    for _ in range(3):
        hold_up(launches)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(launches):
                done = timed_run(collective)()[1]
        marks = []
        for _ in range(repeats + 1):
            act()  # the first one comes before the first mark, while the all_reduces get under way
            marks.append(mark())
        torch.cuda.synchronize()
        beside = median_between(marks)
        last = seconds_between(marks[-1], done)
        if last >= 0:
            break
        launches *= 2
    collective.check()
    return beside, last >= 0
