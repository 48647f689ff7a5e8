"""Where a part of the check puts what it has found: rows, each with a verdict, and facts about the machine.

A sheet is a file, one JSON line for each row, so that what a part has found outlives it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VERDICTS = ("ok", "missed", "failed", "not run", "timed out")
"""missed: right, but not as fast or as small as the target says."""


class NotRunError(Exception):
    """Raised by a part, or in `Sheet.attempt`: this cannot be looked at here. The text says why."""


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


class Sheet:
    """What a part writes on. path: None keeps nothing. dry: tiny sizes, and no speed is measured.

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


def _in_a_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip()
    return " ".join(text.split())[:300]
