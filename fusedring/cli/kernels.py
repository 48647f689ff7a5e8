"""Compile every kernel for a GPU that need not be here, and print what it became."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from fusedring.cli.machine_code import KERNELS, TARGETS, KernelReport, check_variant, problems, variants


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `fusedring kernels`."""
    parser.add_argument("--target", choices=TARGETS, default="sm_90", help="default sm_90")
    parser.add_argument("--kernel", choices=KERNELS, action="append", help="only this one; may be given several times")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")


def run(options: argparse.Namespace) -> int:
    """Compile and print. Exit code 1 if a rule is broken, 2 without triton."""
    if importlib.util.find_spec("triton") is None:
        print("the kernels need triton: pip install triton", file=sys.stderr)
        return 2
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("nothing is compiled under Triton's interpreter: unset TRITON_INTERPRET", file=sys.stderr)
        return 2
    reports = []
    for variant in variants(options.kernel or KERNELS):
        if not options.json:
            print(f"compiling {variant.name} for {options.target}", file=sys.stderr)
        reports.append(check_variant(variant, options.target))
    broken = {report.name: problems(report) for report in reports}
    if options.json:
        print(json.dumps({"target": options.target, "kernels": [asdict(report) for report in reports]}))
    else:
        _print(options.target, reports)
    for name, found in broken.items():
        if found:
            print(f"{name}: {'; '.join(found)}", file=sys.stderr)
    return 1 if any(broken.values()) else 0


def _print(target: str, reports: Sequence[KernelReport]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"kernels for {target}")
    columns: dict[str, str] = {
        "registers": "registers",
        "shared": "shared_bytes",
        "spilled": "spill_bytes",
        "16-byte": "wide_bulk_accesses",
        "narrower": "narrow_bulk_accesses",
        "bytes/element": "bytes_per_element",
        "instructions/element": "instructions_per_element",
        "acquire": "acquires",
        "release": "releases",
        "barriers": "barriers",
        "rmw": "rmw_on_signals",
        "fma": "fma_in_reduction",
    }
    table.add_column("kernel")
    for heading in columns:
        table.add_column(heading, justify="right")
    table.add_column("all bulk accesses, by bytes")
    for report in reports:
        values = asdict(report)
        widths = " ".join(f"{number}x{access}" for access, number in report.bulk_accesses.items())
        table.add_row(report.name, *(_short(values[key]) for key in columns.values()), widths)
    Console(width=240).print(table)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}".removesuffix(".0")
