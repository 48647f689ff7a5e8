"""What importing does and does not do, and that the floors of the architecture hold."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import fusedring

ROOT = Path(fusedring.__file__).parent
PROJECT = Path(__file__).parents[1]

FLOORS = (
    "kernels",
    "root",
    "plan",
    "observe",
    "transport",
    "engines",
    "group",
    "data_parallel",
    "integrations",
    "bench",
    "cli",
)
"""The folders of fusedring, each of which imports only from itself and from those before it, wherever in a file.

"root" is errors, config, log, version and torch_internals, which everybody but the kernels may import. The other files
beside the folders are faces: they show what lies above, and nothing imports them.
"""

FACES = {"__init__", "__main__", "testing"}


def python_files() -> list[Path]:
    """Those of the package, kernels included, which glob does not find behind their symlink."""
    return [*ROOT.rglob("*.py"), *(ROOT / "kernels").glob("*.py")]


def folder_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "root" if len(parts) == 1 else parts[0]


def test_every_folder_has_its_floor():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(FLOORS) - {"root"}
    assert all((PROJECT / "tests" / folder / "__init__.py").exists() for folder in folders), "tests follow the folders"


def test_imports_go_downwards():
    for path in python_files():
        here = folder_of(path)
        if here == "root" and path.stem in FACES:
            continue
        for other in imported(ast.parse(path.read_text())):
            assert other.split(".")[0] not in FACES, f"{path.name} imports the face fusedring.{other}"
            there = other.split(".")[0] if other.split(".")[0] in FLOORS else "root"
            assert FLOORS.index(there) <= FLOORS.index(here), f"{here}/{path.name} imports fusedring.{other}"


def test_no_folder_has_a_circle():
    """Within a folder, too, there is an order of files in which each imports only earlier ones."""
    graph = {}
    for path in python_files():
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        graph[name.removesuffix(".__init__")] = imported(ast.parse(path.read_text()))
    TopologicalSorter({name: {i for i in needs if i in graph and i != name} for name, needs in graph.items()}).prepare()


def imported(tree: ast.AST) -> set[str]:
    """The modules of fusedring that a file imports, named from there: "plan.walk"."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fusedring":
            module = (node.module or "").partition(".")[2]
            for alias in node.names:
                name = f"{module}.{alias.name}".lstrip(".")
                inside = (ROOT / name.replace(".", "/")).with_suffix(".py").exists()
                found.add(name if inside or not module else module)
        elif isinstance(node, ast.Import):
            found |= {a.name.partition(".")[2] or "__init__" for a in node.names if a.name.split(".")[0] == "fusedring"}
    return found


def test_pyproject_lists_every_package():
    listed = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {"fusedring", "fusedring.kernels"}
    there |= {".".join(path.parent.relative_to(ROOT.parent).parts) for path in ROOT.rglob("__init__.py")}
    assert set(listed) == there
    assert listed == sorted(listed)


def test_kernels_import_only_compilers_torch_python_and_themselves():
    for path in (ROOT / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                outside = name.split(".")[0] in {"triton", "numba", "llvmlite", "torch"} | sys.stdlib_module_names
                assert outside or name.startswith("fusedring.kernels"), (path, name)


PRIVATE_TORCH = {
    "torch_internals.py": None,
    "data_parallel/compile/dynamo.py": None,
    "transport/gpu_memory.py": {"torch.distributed._symmetric_memory"},
    "bench/symmetric_memory.py": {"torch.distributed._symmetric_memory"},
}
"""The files that use private names of torch, and which: None stands for any."""

PRIVATE_TORCH_ANYWHERE = {"torch._foreach_copy_", "torch.utils._pytree"}


def test_private_names_of_torch_stay_in_their_rooms():
    """For each release of torch there are few files to look at."""
    found = {}
    for path in python_files():
        names = private_torch(ast.parse(path.read_text())) - PRIVATE_TORCH_ANYWHERE
        if names:
            name = str(path.relative_to(ROOT))
            found[name] = None if PRIVATE_TORCH.get(name, names) is None else names
    assert found == PRIVATE_TORCH


def private_torch(tree: ast.AST) -> set[str]:
    """The private names of torch in a file, imported or reached from an import, up to the part with the underscore."""
    origin, used = {"torch": "torch"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
            origin |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            used |= set(names.values())
            origin |= names

    def dotted(node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            return f"{dotted(node.value)}.{node.attr}"
        return origin.get(node.id, "") if isinstance(node, ast.Name) else ""

    used |= {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    private = set()
    for first, *parts in (name.split(".") for name in used):
        hidden = [part.startswith("_") and not part.startswith("__") for part in parts]
        if first == "torch" and any(hidden):
            private.add(".".join([first, *parts[: hidden.index(True) + 1]]))
    return private


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
