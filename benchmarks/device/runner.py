"""Runs the parts of the check, each in a process of its own with a deadline, and shows in one table what they found.

A *part* is a function that is given a `Sheet` and puts rows on it. A part that crashes or hangs costs its own rows and
nobody else's: its process leads a process group, which is killed as a whole at the deadline, at the end and on Ctrl-C.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.device.sheet import VERDICTS, Row

INTERRUPTED = "interrupted"

_WRONG = ("failed", "timed out")
_ROOT = Path(__file__).resolve().parents[2]
_LOOK_SECONDS = 0.02
_ERROR_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class Part:
    """letter: its name on the command line. function: 'module:name'. seconds: its deadline."""

    letter: str
    title: str
    function: str
    seconds: float


@dataclass(slots=True)
class PartResult:
    """What became of a part. facts: what it said of the machine. error: the end of what it printed, if it failed."""

    part: Part
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def run_parts(
    parts: Sequence[Part], *, dry: bool, environment: Mapping[str, str | None], say: Callable[[str], None]
) -> list[PartResult]:
    """Run the parts one after another. environment: variables of their processes; None takes one away.

    say: called with a line when a part begins and ends. On Ctrl-C the part that runs is killed, and the rest not run.
    """
    results = [PartResult(part) for part in parts]
    variables: dict[str, str | None] = {**os.environ, **environment}
    places = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables["PYTHONPATH"] = os.pathsep.join(places)
    kept = {name: value for name, value in variables.items() if value is not None}
    for number, result in enumerate(results):
        part = result.part
        try:
            say(f"{part.letter}  {part.title} (at most {part.seconds:.0f} s)")
            _run(result, dry, kept)
            trouble = f": {result.rows[-1].reason}" if result.error else ""
            say(f"   {result.seconds:.1f} s, {len(result.rows)} rows{trouble}")
        except KeyboardInterrupt:
            for rest in results[number:]:
                rest.rows.append(Row(rest.part.title, verdict="not run", reason=INTERRUPTED))
            break
    return results


def exit_code(results: Sequence[PartResult]) -> int:
    """0 if all that was looked at is right, missed targets included; 1 if not; 130 after Ctrl-C."""
    rows = [row for result in results for row in result.rows]
    if any(row.reason == INTERRUPTED for row in rows):
        return 130
    return int(any(row.verdict in _WRONG for row in rows))


def table(results: Sequence[PartResult]) -> str:
    """All rows in aligned columns, and a line that counts the verdicts."""
    lines = [("part", "what", "value", "target", "verdict")]
    counts = dict.fromkeys(VERDICTS, 0)
    for result in results:
        for row in result.rows:
            counts[row.verdict] += 1
            verdict = row.verdict + (f": {row.reason}" if row.reason else "")
            lines.append((result.part.letter, row.what, row.value, row.target, verdict))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return "\n".join([*text, "", summary])


def as_json(results: Sequence[PartResult]) -> list[dict[str, Any]]:
    """Every part with its wall time, its error and its rows."""
    return [
        {
            "part": result.part.letter,
            "title": result.part.title,
            "seconds": round(result.seconds, 3),
            "error": result.error,
            "rows": [asdict(row) for row in result.rows],
        }
        for result in results
    ]


def part_command(function: str, path: Path, *, deadline: float, dry: bool) -> list[str]:
    """The command that runs a part's function with a sheet."""
    task = {"function": function, "path": str(path), "deadline": deadline, "dry": dry}
    return [sys.executable, "-m", "benchmarks.device.part_process", json.dumps(task)]


def _run(result: PartResult, dry: bool, environment: dict[str, str]) -> None:
    part, started = result.part, time.monotonic()
    deadline = started + part.seconds
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "rows", Path(folder) / "log"
        path.touch()
        command = part_command(part.function, path, deadline=deadline, dry=dry)
        try:
            with log.open("wb") as output:
                code = _code_of(command, output, environment, deadline)
        finally:  # on Ctrl-C, too
            result.seconds = time.monotonic() - started
            _read(path, result)
        printed = log.read_text(errors="replace").strip()
    if code == 0 and result.rows:
        return
    if code is None:
        result.error = printed[-_ERROR_CHARACTERS:]
        result.rows.append(Row(part.title, verdict="timed out", reason=f"killed after {part.seconds:g} s"))
        return
    how = f"ended by signal {-code}" if code < 0 else f"ended with code {code}" if code else "found nothing to say"
    result.error = printed[-_ERROR_CHARACTERS:] or how
    reason = f"{how}: {printed.splitlines()[-1]}" if printed else how
    result.rows.append(Row(part.title, verdict="failed", reason=reason))


def _code_of(command: list[str], output: Any, environment: dict[str, str], deadline: float) -> int | None:
    """The exit code of a command; None if it was killed at its deadline. Nothing of its process group is left."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    in_time = False
    try:
        while not in_time and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            # It stays a zombie, so that its number, which is also its group's, is not given to another process.
            in_time = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode if in_time else None


def _read(path: Path, result: PartResult) -> None:
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # it was killed while it wrote
            continue
        result.facts.update(entry.get("facts", {}))
        if "row" in entry:
            result.rows.append(Row(**entry["row"]))
