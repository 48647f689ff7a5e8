"""Say what fusedring would use on this machine and why, and test that it works."""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from fusedring.bench.self_test import BANDWIDTH_BYTES, TIMEOUT_SECONDS, SelfTest, self_test
from fusedring.group.spawn import RanksFailedError, spawn
from fusedring.observe.pictures import MATPLOTLIB_MISSING, has_matplotlib
from fusedring.plan.policy import ENGINES_BY_DEVICE, Choice, Rule, rules_in_host_memory, rules_on_gpus
from fusedring.transport import memfd
from fusedring.transport.host_signals import check_machine, cores
from fusedring.version import OLDEST_TORCH, TESTED_TORCH, TESTED_TRITON, __version__

MOST_RANKS = 4
"""Ranks of the self-test, if there are as many cores."""

_PROBE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. status: 'ok'; 'note', which nobody has to act on; or 'broken', and then `remedy` says what to do."""

    name: str
    status: Literal["ok", "note", "broken"]
    finding: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `fusedring doctor`."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace) -> int:
    """Check everything, print the findings. Exit code 1 if something is broken."""
    chosen = autos(usable_gpus())
    checks = [*software(), gpus(), processor(), shared_memory(), *choices(chosen)]
    result = None
    if any(check.status == "broken" for check in checks):
        checks.append(Check("self-test", "note", "not run, because of what is broken above"))
    else:
        if not options.json:
            print("testing for about 10 seconds ...", file=sys.stderr)
        try:
            check, result = run_self_test()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        checks.append(check)
    healthy = all(check.status != "broken" for check in checks)
    if options.json:
        print(json.dumps(_as_json(checks, chosen, result, healthy=healthy)))
    else:
        _print(checks, healthy=healthy)
    return 0 if healthy else 1


def software() -> list[Check]:
    """Python, torch, triton, matplotlib."""
    python = Check("python", "ok", f"{platform.python_version()}; fusedring {__version__}")
    return [python, _torch(torch.__version__), _triton(_version_of("triton")), _matplotlib()]


def _torch(version: str) -> Check:
    if _numbers(version) < _numbers(OLDEST_TORCH):
        return Check(
            "torch", "broken", f"{version} is older than {OLDEST_TORCH}", f"pip install 'torch>={OLDEST_TORCH}'"
        )
    return _tested_or_not("torch", version, TESTED_TORCH)


def _triton(version: str | None) -> Check:
    if version is None:
        return Check("triton", "note", "not installed; only kernels on GPUs need it")
    return _tested_or_not("triton", version, TESTED_TRITON)


def _matplotlib() -> Check:
    if has_matplotlib():
        return Check("matplotlib", "ok", _version_of("matplotlib") or "installed")
    return Check("matplotlib", "note", f"not installed; {MATPLOTLIB_MISSING}")


def gpus() -> Check:
    """Which GPUs there are, and which reach each other's memory."""
    try:
        count = torch.cuda.device_count()
        names = ", ".join(sorted({torch.cuda.get_device_name(device) for device in range(count)}))
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        reached = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    except RuntimeError as error:
        return Check("GPUs", "note", f"torch cannot use them: {error}")
    if count == 0:
        return Check("GPUs", "note", "none that torch can use")
    peers = f", peer access between {reached} of {len(pairs)} ordered pairs" if pairs else ""
    untried = "fusedring's kernels have not been tried on any: benchmarks/device_check.py does that"
    return Check("GPUs", "note", f"{count} ({names}){peers}; {untried}")


def usable_gpus() -> int:
    """How many there are."""
    try:
        return torch.cuda.device_count()
    except RuntimeError:  # `gpus` tells what it was
        return 0


def processor() -> Check:
    """Whether the host engine knows this processor, and how many cores this process may use."""
    try:
        check_machine()
    except (RuntimeError, OSError) as error:
        return Check("processor", "broken", str(error), "run on x86-64 or aarch64 with Linux 4.16 or later")
    number, machine = cores(), platform.machine()
    words = f"{machine}, {number} core{'s' if number > 1 else ''} for this process"
    if machine != "x86_64":
        return Check("processor", "note", f"{words}; fusedring was never tested on {machine}")
    if number == 1:
        return Check("processor", "note", f"{words}: ranks will take turns on it")
    return Check("processor", "ok", words)


def shared_memory() -> Check:
    """Whether shared memory can be had, and how much."""
    try:
        fd = memfd.create(_PROBE_BYTES)
        try:
            memfd.reserve(fd, 0, _PROBE_BYTES)
        finally:
            os.close(fd)
        available = memfd.available_bytes()
    except OSError as error:
        remedy = "free memory, or raise the memory limit of the machine or container"
        if error.errno == errno.EFBIG:
            remedy = "raise the limit on file sizes: ulimit -f unlimited"
        elif error.errno in (errno.EPERM, errno.ENOSYS):
            remedy = "allow the system call memfd_create: a sandbox or seccomp profile forbids it"
        return Check("shared memory", "broken", f"cannot reserve {_PROBE_BYTES >> 20} MiB: {error.strerror}", remedy)
    shm = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0  # noqa: PTH112
    return Check(
        "shared memory",
        "ok",
        f"anonymous files, {available / 2**30:.1f} GiB available (/dev/shm, {shm / 2**30:.1f} GiB, is not used)",
    )


@dataclass(frozen=True, slots=True)
class Auto:
    """What 'auto' stands for with `tensors`: the engine, and the algorithms from small tensors to large ones."""

    tensors: str
    engine: Choice
    algorithms: tuple[Rule, ...]


def autos(gpus: int) -> list[Auto]:
    """For all tensors that this machine can have, if torch can use `gpus` GPUs; those that one trains with last."""
    found = [Auto("in host memory", ENGINES_BY_DEVICE["cpu"], rules_in_host_memory())]
    if gpus > 2:
        found.append(Auto("on GPUs that share links", ENGINES_BY_DEVICE["cuda"], rules_on_gpus(gpus, full_mesh=False)))
    if gpus:
        linked = "on GPUs with a link between every two" if gpus > 2 else "on GPUs"
        found.append(Auto(linked, ENGINES_BY_DEVICE["cuda"], rules_on_gpus(gpus, full_mesh=True)))
    return found


def choices(chosen: Sequence[Auto]) -> list[Check]:
    """The same in words."""
    engines = dict.fromkeys(f"{auto.engine.engine} for {auto.engine.why}" for auto in chosen)
    algorithms = [f"{auto.tensors} {', '.join(map(_in_words, auto.algorithms))}" for auto in chosen]
    return [Check("engine", "ok", "; ".join(engines)), Check("algorithm", "ok", "; ".join(algorithms))]


def _in_words(rule: Rule) -> str:
    size = "above" if rule.up_to_bytes is None else f"up to {rule.up_to_bytes >> 10} KiB"
    return f"{rule.algorithm} {size} ({rule.why})"


def run_self_test() -> tuple[Check, SelfTest | None]:
    """Run the self-test on as many ranks as there are cores, 2 to MOST_RANKS."""
    ranks = max(2, min(MOST_RANKS, cores()))
    try:
        result: SelfTest = spawn(self_test, ranks, timeout=TIMEOUT_SECONDS)[0]
    except RanksFailedError as error:
        remedy = "see the message; if this machine is not to blame, report it with fusedring doctor --json"
        return Check("self-test", "broken", str(error), remedy), None
    if result.wrong:
        remedy = "do not train on this machine: its memory or processor computes wrong results; please report it"
        return Check("self-test", "broken", f"{result.wrong:,} of {result.checked:,} elements wrong", remedy), result
    finding = (
        f"{ranks} ranks, {result.checked:,} elements right; {BANDWIDTH_BYTES >> 20} MiB at {result.gb_per_s:.1f} GB/s, "
        f"{result.times_gloo:.1f} times gloo's speed, {result.times_copy:.1f} times as long as a copy"
    )
    return Check("self-test", "ok", finding), result


def _as_json(
    checks: Sequence[Check], chosen: Sequence[Auto], result: SelfTest | None, *, healthy: bool
) -> dict[str, Any]:
    return {
        "ok": healthy,
        "engine": chosen[-1].engine.engine,
        "auto": [asdict(auto) for auto in chosen],
        "checks": [asdict(check) for check in checks],
        "self_test": asdict(result) if result is not None else None,
    }


def _print(checks: Sequence[Check], *, healthy: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours = {"ok": "green", "note": "yellow", "broken": "bold red"}
    table = Table(show_header=False)
    for check in checks:
        remedy = f"\n[bold]{escape(check.remedy)}[/bold]" if check.remedy else ""
        table.add_row(check.name, f"[{colours[check.status]}]{check.status}[/]", escape(check.finding) + remedy)
    console = Console()
    console.print(table)
    console.print("fusedring works here" if healthy else "something is broken: see above")


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tested_or_not(name: str, version: str, tested_versions: Sequence[str]) -> Check:
    if any(_numbers(version)[:2] == _numbers(other) for other in tested_versions):
        return Check(name, "ok", f"{version}, tested")
    return Check(name, "note", f"{version}, not tested; the tests were run with {' and '.join(tested_versions)}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
