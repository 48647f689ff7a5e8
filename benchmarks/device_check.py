"""Check and measure everything on the GPUs of this machine, in at most 8 minutes, and print one table.

PYTHONPATH=. python3 benchmarks/device_check.py [--interpret] [--json PATH] [--parts abcdefg] [--list]

It needs torch, triton and numpy, and no installation. The exit code is 0 if all that was looked at is right, whether or
not it is as fast as it should be, and 1 if something was wrong or did not end in time.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from fusedring.bench.device import PARTS, environment, versions
from fusedring.bench.parts import as_json, exit_code, run_parts, table


def main() -> int:
    letters = "".join(part.letter for part in PARTS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpret", action="store_true", help="on the CPU, under Triton's interpreter, tiny sizes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything that was found there")
    parser.add_argument("--parts", default=letters, metavar=letters, help="only these")
    parser.add_argument("--list", action="store_true", help="say what the parts are, and end")
    arguments = parser.parse_args()
    if not arguments.parts or set(arguments.parts) - set(letters):
        parser.error(f"--parts must be some of {letters}, got {arguments.parts!r}")
    chosen = [part for part in PARTS if part.letter in arguments.parts]
    if arguments.list:
        for part in chosen:
            print(f"{part.letter}  {part.title}, at most {part.seconds:.0f} s")
        return 0
    try:
        output = arguments.json.open("w") if arguments.json is not None else None
    except OSError as error:  # found now, not after minutes of measuring
        parser.error(f"--json {arguments.json}: {error.strerror}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the parts' processes must not outlive this one
    found: dict[str, Any] = {"date": datetime.now().astimezone().isoformat(timespec="seconds"), **versions()}
    outcomes = run_parts(
        chosen,
        dry=arguments.interpret,
        environment=environment(dry=arguments.interpret),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    for outcome in outcomes:
        found |= outcome.facts
    found |= {"interpreted": arguments.interpret, "parts": as_json(outcomes)}
    print(", ".join(f"{name} {value}" for name, value in found.items() if name != "parts"))
    print(table(outcomes))
    if output is not None:
        with output:
            output.write(json.dumps(found, indent=1) + "\n")
    return exit_code(outcomes)


if __name__ == "__main__":
    sys.exit(main())
