"""all_reduce in every way, for pytest-benchmark: a group for each size, dtype and wire. See conftest.py."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.conftest import CLOCK, DEVICE, SETTINGS
from fusedring.bench.against import LIBRARIES, Case
from fusedring.bench.measure import Results

WAYS = [
    *((library, "symmetric" if "torch" in library else "ordinary") for library in ("copy", *LIBRARIES[DEVICE])),
    *((f"fusedring {algorithm}", "workspace") for algorithm in SETTINGS.algorithms),
    (f"fusedring {SETTINGS.algorithms[0]}", "ordinary"),
]

pytestmark = pytest.mark.benchmark(timer=CLOCK)


@pytest.mark.parametrize(("way", "tensors"), WAYS, ids=lambda name: name.replace(" ", "_"))
@pytest.mark.parametrize("case", SETTINGS.cases, ids=lambda case: str(case).replace(" ", "_"))
def test_all_reduce(case: Case, way: str, tensors: str, all_reduces: Results, benchmark: Any) -> None:
    """Seconds of the slowest rank."""
    benchmark.group = f"all_reduce of {case}"
    measured = all_reduces.measured[SETTINGS.cases.index(case)]
    if way in measured.missing:
        pytest.skip(all_reduces.mpi if way == "MPI" and case.wire is None else measured.missing[way])
    (cell,) = (cell for cell in measured.cells if (cell.name, cell.tensors) == (way, tensors))
    assert cell.wrong == 0
    assert cell.timing is not None
    benchmark.extra_info |= {"algbw": cell.algbw, "busbw": cell.busbw, "share of the bound": cell.share}
    CLOCK.replay(benchmark, cell.timing)
