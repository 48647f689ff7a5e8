"""The `fusedring` command. Each subcommand is a module here with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from fusedring.cli import bench, demo, doctor, explain, kernels
from fusedring.version import __version__

_COMMANDS = {"bench": bench, "demo": demo, "doctor": doctor, "explain": explain, "kernels": kernels}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the process's exit code."""
    parser = argparse.ArgumentParser(prog="fusedring", description="Fused ring all-reduce for data-parallel training")
    parser.add_argument("--version", action="version", version=f"fusedring {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode gets question marks
    try:
        code: int = _COMMANDS[options.command].run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        print(f"fusedring {options.command}: {error}", file=sys.stderr)
        return 1
    return code
