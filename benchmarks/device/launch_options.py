"""What all_reduce gains or loses by more tiles on their way at once, and by cooperative launches."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.device.cases import Case, LaunchOptions, compile_ahead, launch_alone
from benchmarks.device.cooperative import SIDE_BY_SIDE, cooperative_launches
from benchmarks.device.setting import Setting, time_all_reduce
from benchmarks.device.sheet import NotRunError, Sheet
from benchmarks.device.units import MB

OTHER_STAGES = (2, 3)
"""Tiles on their way at once, instead of 1."""

_PAIR = (torch.float32, torch.bfloat16)
"""dtype and wire, the same for all: those of float32 gradients on a narrow wire."""
_LEAST_SECONDS = 15
"""Left to the part before a row is begun: a launch that hangs takes 10."""


def compare_launch_options(
    sheet: Sheet, device: torch.device, settings: Mapping[Case, Setting], best: Mapping[Case, int]
) -> None:
    """For each algorithm a row for each of OTHER_STAGES, and one row for cooperative launches of all.

    settings: all of one world size and one size. best: numbers of channels.
    """
    channels = {case: count for case, count in best.items() if (case.dtype, case.wire) == _PAIR}
    if sheet.seconds_left < 2 * _LEAST_SECONDS:
        sheet.row("stages and cooperative launches", verdict="not run", reason="no time")
        return
    wanted: dict[LaunchOptions, list[Case]] = {}
    for case, count in channels.items():
        wanted.setdefault(LaunchOptions(count, cooperative=True), []).append(case)
        for stages in OTHER_STAGES:
            wanted.setdefault(LaunchOptions(count, stages), []).append(case)
    compile_ahead(device, wanted)
    plain: dict[Case, float] = {}
    for case, count in channels.items():
        for stages in OTHER_STAGES:
            what = f"{settings[case]}, {count} channels: stages {stages} instead of 1"
            with sheet.attempt(what):
                _need_time(sheet)
                if case not in plain:
                    plain[case] = _seconds_of(device, case, settings[case], LaunchOptions(count))
                _need_time(sheet)
                took = _seconds_of(device, case, settings[case], LaunchOptions(count, stages))
                value = (
                    f"{plain[case] / took:.2f} times as fast ({1e3 * took:.3f} instead of {1e3 * plain[case]:.3f} ms)"
                )
                sheet.row(what, value, ratio=plain[case] / took, seconds=took, with_one=plain[case])
    if plain:
        world, nbytes = next((settings[case].world, settings[case].nbytes) for case in plain)
        with sheet.attempt(what := f"cooperative launches instead of others, W={world}, {nbytes // MB} MB"):
            _need_time(sheet)
            answer = cooperative_launches(device)
            if answer != SIDE_BY_SIDE:
                raise NotRunError(answer)
            ratios = {}
            for case, with_others in plain.items():
                _need_time(sheet)
                took = _seconds_of(device, case, settings[case], LaunchOptions(channels[case], cooperative=True))
                ratios[case.algorithm] = with_others / took
            value = ", ".join(f"{algorithm} {ratio:.2f}" for algorithm, ratio in ratios.items()) + " times as fast"
            sheet.row(what, value, ratios=ratios)


def _seconds_of(device: torch.device, case: Case, setting: Setting, options: LaunchOptions) -> float:
    """Of one launch, after a lone one. Raises RuntimeError if either is wrong."""
    if why := launch_alone(device, options, [case]).get(case):
        raise RuntimeError(f"{options} as a lone rank: {why}")
    with options.ranks(setting.world, device, setting.parity_bytes) as ranks:
        seconds, wrong = time_all_reduce(ranks, device, setting)
    if wrong:
        raise RuntimeError(f"{options}: {wrong} wrong numbers")
    return seconds


def _need_time(sheet: Sheet) -> None:
    if sheet.seconds_left < _LEAST_SECONDS:
        raise NotRunError("no time")
