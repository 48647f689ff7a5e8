"""The process of one part of the check: python -m benchmarks.device.part_process TASK, where TASK is JSON.

The task is what `part_command` makes: the part's function, where its sheet lies, its deadline, and whether it is dry.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
from pathlib import Path

from benchmarks.device.sheet import NotRunError, Sheet

_DIE_WITH_PARENT = 1


def main() -> None:
    """Call the part's function with its sheet; the process ends with the one that started it."""
    task = json.loads(sys.argv[1])
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
    main()
