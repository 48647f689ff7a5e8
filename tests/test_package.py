"""What importing does and does not do, and that the floors of the architecture hold."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import fusedring

ROOT = Path(fusedring.__file__).parent

# Each file imports only from files on lower floors (or, for packages, from its own package), wherever in it.
FLOORS = [
    {"version", "errors", "plan", "report", "log", "kernels", "dynamo", "sole_uses"},
    {"config", "walk", "tracing", "compiled"},
    {"pictures", "armed"},
    {"plots"},
    {"launches", "memory", "signals", "rendezvous", "arithmetic", "gpu"},
    {"workspace", "ledger", "boards", "windows", "staging"},
    {"shm_workspace", "cuda_workspace"},
    {"host_engine", "triton_engine", "cuda_engine", "testing"},
    {"work"},
    {"communicator"},
    {"collectives", "buckets", "wrapping"},
    {"gpu_step", "grad_bucket", "announcements"},
    {"scheduler", "uneven"},
    {"contract"},
    {"ddp"},
    {"clip", "comm_hook", "local_ranks"},
    {"machine_code"},
    {"bench"},
    {"cli"},
]


def test_imports_go_downwards():
    floor = {name: height for height, names in enumerate(FLOORS) for name in names}
    for path in [*ROOT.glob("*.py"), *ROOT.glob("bench/**/*.py"), *ROOT.glob("cli/*.py")]:
        room = path.stem if path.parent == ROOT else path.relative_to(ROOT).parts[0]
        if room in ("__init__", "__main__"):
            continue
        for other in imported_rooms(ast.parse(path.read_text())):
            assert other == room or floor[other] < floor[room], f"{path.name} imports {other}"


def imported_rooms(tree: ast.AST) -> set[str]:
    rooms = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "fusedring":
            rooms |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fusedring."):
            rooms.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            rooms |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fusedring.")}
    return rooms


def test_kernels_import_only_triton_torch_python_and_themselves():
    for path in (ROOT / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                outside = name.split(".")[0] in {"triton", "torch"} | sys.stdlib_module_names
                assert outside or name.startswith("fusedring.kernels"), (path, name)


def test_import_needs_no_triton_and_starts_nothing():
    code = """
import sys, threading, os
sys.modules["triton"] = None
import fusedring
assert threading.active_count() == 1, threading.enumerate()
assert not [f for f in os.listdir("/proc/self/fd") if "memfd" in os.path.realpath(f"/proc/self/fd/{f}")]
if os.fork() == 0:
    import torch
    assert (fusedring.all_reduce(torch.ones(3), scale=2.0) == 2).all()
    os._exit(0)
assert os.wait()[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_other_platforms_get_a_clear_error():
    code = "import sys; sys.platform = 'darwin'; import fusedring"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "runs on Linux only" in done.stderr
