"""Run the parts of a check, each in a process of its own with a deadline, and show in one table what they found.

A *part* is a function that is given a `Sheet` and puts *rows* on it: what was looked at, what came out, and a verdict.
The sheet is a file, one JSON line for each row, so that what a part has found outlives it. A part that crashes or hangs
costs its own rows and nobody else's: its process leads a process group, which is killed as a whole at the deadline, at
the end and on Ctrl-C.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VERDICTS = ("ok", "missed", "failed", "not run", "timed out")
"""missed: right, but not as fast or as small as the target says."""

INTERRUPTED = "interrupted"

_WRONG = ("failed", "timed out")
_ROOT = Path(__file__).resolve().parents[2]
_LOOK_SECONDS = 0.02
_ERROR_CHARACTERS = 4000
_DIE_WITH_PARENT = 1


class NotRunError(Exception):
    """Raised by a part, or in `Sheet.attempt`: this cannot be looked at here. The text says why."""


@dataclass(frozen=True, slots=True)
class Part:
    """letter: its name on the command line. function: 'module:name'. seconds: its deadline."""

    letter: str
    title: str
    function: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. measured: the numbers behind `value`, for machines."""

    what: str
    value: str = ""
    target: str = ""
    verdict: str = "ok"
    reason: str = ""
    measured: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.verdict in VERDICTS


@dataclass(slots=True)
class Outcome:
    """What became of a part. facts: what it said of the machine. error: the end of what it printed, if it failed."""

    part: Part
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class Sheet:
    """Where a part puts its rows. path: None keeps none. dry: tiny sizes, and no speed is measured.

    deadline: when the part is killed, as time.monotonic() has it in all processes of a machine.
    """

    def __init__(self, path: Path | None, *, deadline: float, dry: bool) -> None:
        self.path, self.dry = path, dry
        self._deadline = deadline

    @property
    def seconds_left(self) -> float:
        """Until the part is killed."""
        return self._deadline - time.monotonic()

    def row(
        self, what: str, value: str = "", target: str = "", verdict: str = "ok", reason: str = "", **measured: Any
    ) -> None:
        """Put down one row; see `Row`."""
        self._write({"row": asdict(Row(what, value, target, verdict, reason, measured))})

    def expect(self, right: bool, what: str, value: str = "", otherwise: str = "", **measured: Any) -> None:
        """A row that is ok if `right`, and failed, because of `otherwise`, if not."""
        self.row(what, value, "", "ok" if right else "failed", "" if right else otherwise, **measured)

    def fact(self, **facts: Any) -> None:
        """Say something of the machine."""
        self._write({"facts": facts})

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """An exception in here becomes a row, and the part goes on."""
        try:
            yield
        except NotRunError as error:
            self.row(what, verdict="not run", reason=str(error))
        except Exception as error:
            self.row(what, verdict="failed", reason=_in_a_line(error))

    def _write(self, entry: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")


def run_parts(
    parts: Sequence[Part], *, dry: bool, environment: Mapping[str, str | None], say: Callable[[str], None]
) -> list[Outcome]:
    """Run the parts one after another. environment: variables of their processes; None takes one away.

    say: called with a line when a part begins and ends. On Ctrl-C the part that runs is killed, and the rest not run.
    """
    outcomes = [Outcome(part) for part in parts]
    variables: dict[str, str | None] = {**os.environ, **environment}
    places = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables["PYTHONPATH"] = os.pathsep.join(places)
    kept = {name: value for name, value in variables.items() if value is not None}
    for number, outcome in enumerate(outcomes):
        part = outcome.part
        try:
            say(f"{part.letter}  {part.title} (at most {part.seconds:.0f} s)")
            _run(outcome, dry, kept)
            trouble = f": {outcome.rows[-1].reason}" if outcome.error else ""
            say(f"   {outcome.seconds:.1f} s, {len(outcome.rows)} rows{trouble}")
        except KeyboardInterrupt:
            for rest in outcomes[number:]:
                rest.rows.append(Row(rest.part.title, verdict="not run", reason=INTERRUPTED))
            break
    return outcomes


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0 if all that was looked at is right, missed targets included; 1 if not; 130 after Ctrl-C."""
    rows = [row for outcome in outcomes for row in outcome.rows]
    if any(row.reason == INTERRUPTED for row in rows):
        return 130
    return int(any(row.verdict in _WRONG for row in rows))


def table(outcomes: Sequence[Outcome]) -> str:
    """All rows in aligned columns, and a line that counts the verdicts."""
    lines = [("part", "what", "value", "target", "verdict")]
    counts = dict.fromkeys(VERDICTS, 0)
    for outcome in outcomes:
        for row in outcome.rows:
            counts[row.verdict] += 1
            verdict = row.verdict + (f": {row.reason}" if row.reason else "")
            lines.append((outcome.part.letter, row.what, row.value, row.target, verdict))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return "\n".join([*text, "", summary])


def as_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Every part with its wall time, its error and its rows."""
    return [
        {
            "part": outcome.part.letter,
            "title": outcome.part.title,
            "seconds": round(outcome.seconds, 3),
            "error": outcome.error,
            "rows": [asdict(row) for row in outcome.rows],
        }
        for outcome in outcomes
    ]


def part_command(function: str, path: Path, *, deadline: float, dry: bool) -> list[str]:
    """The command that runs a part's function with a sheet."""
    task = {"function": function, "path": str(path), "deadline": deadline, "dry": dry}
    return [sys.executable, "-m", "fusedring.bench.parts", json.dumps(task)]


def _run(outcome: Outcome, dry: bool, environment: dict[str, str]) -> None:
    part, started = outcome.part, time.monotonic()
    deadline = started + part.seconds
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "rows", Path(folder) / "log"
        path.touch()
        command = part_command(part.function, path, deadline=deadline, dry=dry)
        try:
            with log.open("wb") as output:
                code = _code_of(command, output, environment, deadline)
        finally:  # on Ctrl-C, too
            outcome.seconds = time.monotonic() - started
            _read(path, outcome)
        printed = log.read_text(errors="replace").strip()
    if code == 0 and outcome.rows:
        return
    if code is None:
        outcome.error = printed[-_ERROR_CHARACTERS:]
        outcome.rows.append(Row(part.title, verdict="timed out", reason=f"killed after {part.seconds:g} s"))
        return
    how = f"ended by signal {-code}" if code < 0 else f"ended with code {code}" if code else "found nothing to say"
    outcome.error = printed[-_ERROR_CHARACTERS:] or how
    reason = f"{how}: {printed.splitlines()[-1]}" if printed else how
    outcome.rows.append(Row(part.title, verdict="failed", reason=reason))


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


def _read(path: Path, outcome: Outcome) -> None:
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # it was killed while it wrote
            continue
        outcome.facts.update(entry.get("facts", {}))
        if "row" in entry:
            outcome.rows.append(Row(**entry["row"]))


def _in_a_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip()
    return " ".join(text.split())[:300]


def _main(task: dict[str, Any]) -> None:
    """In the part's own process."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        return
    sheet = Sheet(Path(task["path"]), deadline=task["deadline"], dry=task["dry"])
    # Where it hangs is the last that it says.
    faulthandler.dump_traceback_later(max(0.1, sheet.seconds_left - 1))
    module, name = task["function"].split(":")
    try:
        getattr(importlib.import_module(module), name)(sheet)
    except NotRunError as error:
        sheet.row("everything", verdict="not run", reason=str(error))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    # By its real name, so that the parts and this file mean the same classes.
    importlib.import_module("fusedring.bench.parts")._main(json.loads(sys.argv[1]))
