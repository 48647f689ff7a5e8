"""Settings of all tests, and which of them run: `slow` and `soak` tests only if they are asked for."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Examples have no deadline of their own: on a busy machine one can lose its core for longer than any sensible one.
settings.register_profile("fusedring", deadline=None)
settings.load_profile("fusedring")

TIERS = {"slow": "what is exhaustive", "soak": "what takes hours"}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fusedring")
    for name, which in TIERS.items():
        group.addoption(f"--{name}", action="store_true", help=f"run the tests marked {name}, too: {which}")


def left_out(config: pytest.Config) -> list[str]:
    return [name for name in TIERS if not config.getoption(name)]


def pytest_report_header(config: pytest.Config) -> str:
    names = left_out(config)
    return "left out: " + ", ".join(f"{name} tests (--{name} runs them)" for name in names) if names else ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, since to skip would take a line of the summary for each."""
    names = left_out(config)
    out = [item for item in items if any(item.get_closest_marker(name) for name in names)]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]


@pytest.fixture(scope="session", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of all processes that tests start.

    All of them in this run, those of pytest-xdist included, find what one of them has compiled, and nothing else.

    Inductor compiles where it is called: to start its own processes takes longer than these small graphs do.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun has it: ranks are not to fight for the cores
