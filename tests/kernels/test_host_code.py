"""The compiled functions for host memory: their machine code, and their bits against torch's.

The functions are compiled as for use: in a process of its own, into object code that is loaded without Numba.
"""

import ctypes
import itertools
import subprocess
from pathlib import Path

import pytest
import torch

from fusedring.kernels import host_layout as layout
from fusedring.kernels.host_layout import VERBS
from tests.kernels.host_ranks import load as load_object
from tests.kernels.object_code import object_code

PAIRS = [
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", "bfloat16"),
    *(
        pytest.param(dtype, wire, marks=pytest.mark.slow)
        for dtype, wire in (
            ("float64", "float64"),
            ("float64", "bfloat16"),
            ("float64", "float16"),
            ("float16", "float16"),
            ("bfloat16", "float16"),
            ("float16", "bfloat16"),
        )
    ),
]
COUNT = 1003  # not a multiple of any vector
FACTOR = 1 / 3
ALLOWED = {"memcpy", "memset", "memmove", "syscall", "clock_gettime"}


def undefined(file: Path) -> set[str]:
    names = subprocess.run(["nm", "-u", str(file)], check=True, capture_output=True, text=True).stdout.split()
    return set(names) - {"U", "_GLOBAL_OFFSET_TABLE_"}


def load(file: Path):
    """The verbs in an object file, by name, and what keeps them."""
    engine = load_object(file)
    word = ctypes.c_int64
    kind = ctypes.CFUNCTYPE(None, word, word, word, ctypes.c_double, word)
    return {verb: kind(engine.get_function_address(verb)) for verb in VERBS}, engine


def numbers(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Of all sizes, with what is special in `dtype` among them."""
    generator = torch.Generator().manual_seed(seed)
    mantissas = torch.randn(COUNT, generator=generator, dtype=torch.float64)
    exponents = torch.randint(-30, 18, (COUNT,), generator=generator, dtype=torch.float64)
    values = mantissas * 2.0**exponents
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 65519.99, 65520.0, -65520.0, 1e-40, 6e-8, 2.98e-8]
    special += [1.00390625, 1.01171875, 3.3e38, 6.1e-5]
    values[: len(special)] = torch.tensor(special, dtype=torch.float64)
    return values[torch.randperm(COUNT, generator=generator)].to(dtype)


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal to the bit, but that a NaN is a NaN."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    nan = wanted.isnan()
    return torch.equal(got.isnan(), nan) and torch.equal(got.view(integers)[~nan], wanted.view(integers)[~nan])


def check_verbs(verbs, dtype: torch.dtype, wire: torch.dtype) -> None:
    total = torch.float64 if dtype == torch.float64 else torch.float32
    factor = torch.tensor(FACTOR, dtype=torch.float64).to(total)

    def narrowed(values):  # float64 narrows to 16 bits by way of float32
        return (values.to(torch.float32) if wire.itemsize == 2 else values).to(wire)

    def rounded(values):
        return narrowed(values).to(total)

    def final(values):
        if wire == dtype:
            return narrowed(values)
        values = rounded(values)
        return (values.to(torch.float32) if dtype.itemsize == 2 else values).to(dtype)

    a, b = numbers(dtype, 1), numbers(dtype, 2)
    sum_, on_wire = numbers(total, 3), numbers(total, 4).to(torch.float32).to(wire)
    scaled_a, scaled_b = factor * a.to(total), factor * b.to(total)
    cases = {
        "scale_to_wire": (torch.empty(COUNT, dtype=wire), a, narrowed(scaled_a)),
        "scale_rounded": (torch.empty(COUNT, dtype=total), a, rounded(scaled_a)),
        "add_scaled_rounded": (sum_.clone(), a, sum_ + rounded(scaled_a)),
        "add_scaled": (sum_.clone(), a, sum_ + scaled_a),
        "widen": (torch.empty(COUNT, dtype=total), on_wire, on_wire.to(total)),
        "add_wire": (sum_.clone(), on_wire, sum_ + on_wire.to(total)),
        "narrow": (torch.empty(COUNT, dtype=wire), sum_, narrowed(sum_)),
        "finish": (torch.empty(COUNT, dtype=dtype), sum_, final(sum_)),
        "sum_of_two": (torch.empty(COUNT, dtype=dtype), a, final(rounded(scaled_a) + rounded(scaled_b))),
    }
    assert tuple(cases) == VERBS
    for verb, (target, source, wanted) in cases.items():
        verbs[verb](target.data_ptr(), source.data_ptr(), b.data_ptr(), FACTOR, COUNT)
        assert same_bits(target, wanted), verb


@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_verbs_are_torchs_operations_bit_for_bit(dtype, wire, tmp_path):
    """Two seconds each: Numba and LLVM compile nine functions."""
    file = object_code(f"{dtype}-{wire}", tmp_path)
    assert undefined(file) <= ALLOWED
    verbs, _engine = load(file)
    check_verbs(verbs, getattr(torch, dtype), getattr(torch, wire))


def test_float16_by_integers_is_what_the_processor_does(tmp_path):
    """For processors that do not convert float16 themselves."""
    file = object_code("float32-float16", tmp_path, "--without-half")
    verbs, _engine = load(file)
    check_verbs(verbs, torch.float32, torch.float16)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = torch.empty(1 << 16)
    verbs["widen"](values.data_ptr(), every.data_ptr(), 0, 1.0, 1 << 16)
    assert same_bits(values, every.float())
    back = torch.empty(1 << 16, dtype=torch.float16)
    verbs["narrow"](back.data_ptr(), values.data_ptr(), 0, 1.0, 1 << 16)
    assert same_bits(back, every)
    near = torch.cat([torch.nextafter(values, torch.tensor(v)) for v in (float("inf"), float("-inf"))])
    half = torch.empty(near.numel(), dtype=torch.float16)
    verbs["narrow"](half.data_ptr(), near.data_ptr(), 0, 1.0, near.numel())
    assert same_bits(half, near.half())


def test_a_launch_needs_nothing_but_the_system_and_never_fuses_a_product_with_a_sum(tmp_path):
    """Seven seconds: it compiles the launch, and the verbs of one wire."""
    launch, verbs = object_code("launch", tmp_path), object_code("float32-bfloat16", tmp_path)
    assert undefined(launch) <= ALLOWED
    for file in (launch, verbs):
        code = subprocess.run(["objdump", "-d", str(file)], check=True, capture_output=True, text=True).stdout
        assert "fmadd" not in code
        assert "fmla" not in code
    mnemonics = {line.split("\t")[2].split()[0] for line in code.splitlines() if line.count("\t") >= 2}
    assert mnemonics & {"vmulps", "fmul"}, "no vector code"


def test_the_layout_of_a_job_has_no_overlaps():
    names = """CONTROL RANK WORLD EPOCH CHANNEL CHANNELS KIND ALGORITHM ELEMENTS FACTOR TENSOR RUNS RUN_COUNT ARENAS
        ARENA_COUNT SLOTS SLOT_STRIDE SCRATCH ELEMENT_BYTES WIRE_BYTES TOTAL_BYTES LOSSLESS SPINS POSITION AWAITED
        AWAITED_VALUE STARTED SOMEBODY_HAS_MORE"""
    words = [getattr(layout, name) for name in names.split()]
    words += [layout.CLOCK, layout.CLOCK + 1, layout.SLICE, layout.SLICE + 1]
    words += range(layout.FIRST_VERB, layout.FIRST_VERB + len(VERBS))
    assert all(a != b for a, b in itertools.combinations(words, 2))
    assert max(words) < layout.PLACES
