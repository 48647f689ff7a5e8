"""Part c: all_reduce against the bytes that it must move, at the speed of a copy.

It stops adding rows when its time runs short, and says what it left out.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

import torch

from benchmarks.device.cases import TIMED_PAIRS, Case, LaunchOptions, warmed_up
from benchmarks.device.exact_inputs import exact_inputs, wrong_numbers
from benchmarks.device.launch_options import OTHER_STAGES, compare_launch_options
from benchmarks.device.machine import CHANNEL_COUNTS, UNMEASURED, device_of, fitting
from benchmarks.device.setting import Setting, time_all_reduce
from benchmarks.device.sheet import Sheet
from benchmarks.device.stream_marks import copy_bandwidth, mark, median_seconds
from benchmarks.device.units import MB, percent
from fusedring.config import ALGORITHMS
from fusedring.engines.cuda import CHANNELS, PARITY_BYTES
from fusedring.transport.gpu import Event

SPEED_TARGET = 0.85
"""Of the bandwidth of a copy, at TARGET_MB and above, with the best number of channels."""
TARGET_MB = 64

_LARGEST_MB = 1024
"""Of what is timed; with few numbers of channels, since to cut it into tiles takes the host most of a second."""
_SIZES = ((2, 64), (2, 256), (4, 64), (8, 64), (2, 1), (2, 16), (2, _LARGEST_MB))
"""World sizes and megabytes, the most telling first."""
_OPTIONS_SIZE = _SIZES[0]
"""Where other launch options are compared."""
_CHANNELS_SIZE = (2, 256)
"""What says the best number of channels for the largest size."""
_LEAST_SECONDS = 12
"""Left to the part before something is timed: a launch that hangs takes 10."""


def speed(sheet: Sheet) -> None:
    """The part: all algorithms, at several sizes, with several numbers of channels."""
    device = device_of(sheet)
    counts = (2,) if sheet.dry else fitting(2, CHANNEL_COUNTS, device)
    cases = [Case("all_reduce", algorithm, *pair) for pair in TIMED_PAIRS for algorithm in ALGORITHMS]
    cases = warmed_up(sheet, device, cases[::3] if sheet.dry else cases, counts)
    if not cases:
        return
    if sheet.dry:
        _check_small(sheet, device, cases)
        sheet.row("speed of all_reduce", target=percent(SPEED_TARGET), verdict="not run", reason=UNMEASURED)
        return
    ceiling = copy_bandwidth(device)
    sheet.row("copy of 1 GiB on the device, read and written", f"{ceiling / 1e9:.0f} GB/s", bytes_per_s=ceiling)
    best: dict[Case, int] = {}
    for number, (world, megabytes) in enumerate(_SIZES):
        if sheet.seconds_left < _LEAST_SECONDS + 3:
            rest = ", ".join(f"{mb} MB with W={w}" for w, mb in _SIZES[number:])
            sheet.row("the other sizes", verdict="not run", reason=f"no time for {rest}")
            break
        settings = {case: Setting(world, megabytes * MB, case.algorithm, case.dtype, case.wire) for case in cases}
        room = set(fitting(world, counts, device))
        tried = {case: {best.get(case, CHANNELS), CHANNELS} & room for case in cases}
        if megabytes < _LARGEST_MB:
            tried = dict.fromkeys(cases, room)
        with sheet.attempt(f"all_reduce, W={world}, {megabytes} MB"):
            found = _time_settings(sheet, device, settings, tried, ceiling)
            if (world, megabytes) == _CHANNELS_SIZE:
                best = found
            if (world, megabytes) == _OPTIONS_SIZE:
                with sheet.attempt("stages and cooperative launches"):
                    compare_launch_options(sheet, device, settings, found)
        gc.collect()
        torch.cuda.empty_cache()


def _check_small(sheet: Sheet, device: torch.device, cases: Sequence[Case]) -> None:
    """What would be timed, with few numbers; one case with other stages, too."""
    launches = [(case, LaunchOptions(2)) for case in cases]
    launches += [(cases[0], LaunchOptions(2, stages)) for stages in OTHER_STAGES]
    for case, options in launches:
        stages = "" if options.stages == 1 else f", stages {options.stages}"
        what = f"{case}, W=2{stages}, before it is timed"
        with sheet.attempt(what), options.ranks(2, device, MB) as ranks:
            tensors = exact_inputs(2, 4_099, case.dtype, device)
            ranks.all_reduce(tensors, **case.how)
            sheet.expect(wrong_numbers(tensors) == 0, what, "exact", "wrong numbers")


def _time_settings(
    sheet: Sheet,
    device: torch.device,
    settings: Mapping[Case, Setting],
    tried: Mapping[Case, set[int]],
    ceiling: float,
) -> dict[Case, int]:
    """Rows for settings of one world size and size. tried: numbers of channels. Returns the best of them."""
    seconds: dict[Case, dict[int, float]] = {case: {} for case in settings}
    wrong: dict[Case, int] = dict.fromkeys(settings, 0)
    parity_bytes = max(setting.parity_bytes for setting in settings.values())
    for channels in sorted(set().union(*tried.values()), key=lambda count: (count != CHANNELS, count)):
        chosen = {case: setting for case, setting in settings.items() if channels in tried[case]}
        for case, (took, bad) in _time_all(sheet, device, chosen, channels, parity_bytes).items():
            seconds[case][channels] = took
            wrong[case] += bad
    default_slots = _with_default_slots(sheet, device, settings)
    theirs: dict[tuple[torch.dtype, torch.dtype], float] = {}
    for case, setting in settings.items():
        if not seconds[case]:
            continue
        pair = (case.dtype, case.wire)
        if pair not in theirs:
            theirs[pair] = _time_torch(device, setting)
        with_default, bad = default_slots.get(case, (None, 0))
        _speed_row(sheet, setting, seconds[case], with_default, theirs[pair], wrong[case] + bad, ceiling)
    return {case: min(found, key=found.__getitem__) for case, found in seconds.items() if found}


def _time_all(
    sheet: Sheet, device: torch.device, settings: Mapping[Case, Setting], channels: int, parity_bytes: int
) -> dict[Case, tuple[float, int]]:
    """Seconds and wrong numbers of each. A row tells of what failed, and one of what there was no time for."""
    found: dict[Case, tuple[float, int]] = {}
    late = []
    with LaunchOptions(channels).ranks(next(iter(settings.values())).world, device, parity_bytes) as ranks:
        for case, setting in settings.items():
            if sheet.seconds_left < _LEAST_SECONDS:
                late.append(str(setting))
                continue
            with sheet.attempt(f"{setting}, {channels} channels"):
                found[case] = time_all_reduce(ranks, device, setting)
    if late:
        sheet.row(f"{channels} channels", verdict="not run", reason=f"no time for {'; '.join(late)}")
    return found


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
    value = f"{percent(fractions[best])} of a copy with {best} channels ({1e3 * seconds[best]:.3f} ms)"
    if CHANNELS in fractions and best != CHANNELS:
        value += f", {percent(fractions[CHANNELS])} with {CHANNELS}"
    if default_slots is not None:
        value += f", {percent(setting.least_bytes / default_slots / ceiling)} in windows of the default slots"
    value += f"; {torch_seconds / seconds[best]:.2f} times as fast as torch"
    has_target = setting.nbytes >= TARGET_MB * MB
    verdict = "missed" if has_target and fractions[best] < SPEED_TARGET else "ok"
    sheet.row(
        str(setting),
        value,
        percent(SPEED_TARGET) if has_target else "",
        "failed" if wrong else verdict,
        f"{wrong} wrong numbers" if wrong else "",
        seconds=seconds,
        fractions=fractions,
        default_slots=default_slots,
        torch_seconds=torch_seconds,
        least_bytes=setting.least_bytes,
    )


def _with_default_slots(
    sheet: Sheet, device: torch.device, settings: Mapping[Case, Setting]
) -> dict[Case, tuple[float, int]]:
    """As _time_all, with the engine's own slots and channels, where the bucket goes into those in several windows."""
    world, nbytes = next((setting.world, setting.nbytes) for setting in settings.values())
    larger = {case: setting for case, setting in settings.items() if setting.parity_bytes > PARITY_BYTES}
    if world > 2 or nbytes == _LARGEST_MB * MB or not larger or sheet.seconds_left < 30:
        return {}
    return _time_all(sheet, device, larger, CHANNELS, PARITY_BYTES)


def _time_torch(device: torch.device, setting: Setting) -> float:
    """Seconds of torch's own way to the same: cast, divide, add, copy back."""
    world = setting.world

    def run(tensors: Sequence[torch.Tensor]) -> tuple[Event, Event]:
        begun = mark()
        narrow = [x.to(setting.wire).div_(world) if x.dtype != setting.wire else x.div(world) for x in tensors]
        total = narrow[0]
        for x in narrow[1:]:
            total += x
        for x in tensors:
            x.copy_(total)
        return begun, mark()

    return median_seconds([lambda tensors=tensors: run(tensors) for tensors in setting.inputs(device)])  # type: ignore[misc]
