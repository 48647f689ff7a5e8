"""What the kernels compile to for GPUs that are not here, and that the reading of it finds what it looks for."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from fusedring.cli import main
from fusedring.cli.machine_code import KERNELS, Variant, check_variant, compile_kernel, problems, read, variants
from fusedring.kernels.layout import INTERPRETER
from fusedring.kernels.signals import NVIDIA, clock, post, word

FLOAT, HALF, BFLOAT, DOUBLE = torch.float32, torch.float16, torch.bfloat16, torch.float64
RING = Variant("ring_all_reduce", FLOAT, BFLOAT)
FORMS = [(FLOAT, FLOAT), (FLOAT, BFLOAT), (BFLOAT, BFLOAT), (DOUBLE, DOUBLE), (DOUBLE, HALF)]


def slow_but(plain: tuple[torch.dtype, torch.dtype], forms: list[tuple[torch.dtype, torch.dtype]]) -> list[Any]:
    """To compile a kernel takes 1 to 3 seconds, so most forms are slow tests."""
    return [form if form == plain else pytest.param(*form, marks=pytest.mark.slow) for form in forms]


@pytest.mark.parametrize(("dtype", "wire"), slow_but((FLOAT, BFLOAT), FORMS))
@pytest.mark.parametrize("kernel", ["ring_all_reduce", "two_shot", "one_shot", "master"])
def test_no_kernel_breaks_a_rule_on_sm_90(kernel, dtype, wire):
    report = check_variant(Variant(kernel, dtype, wire), "sm_90")
    assert problems(report) == []
    assert report.releases
    assert report.acquires
    assert report.scale_bits == 64


@pytest.mark.parametrize(("dtype", "wire"), slow_but((FLOAT, BFLOAT), [(FLOAT, BFLOAT), (DOUBLE, DOUBLE)]))
@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(name, marks=() if name.startswith("ring") else pytest.mark.slow)
        for name in KERNELS
        if name.endswith(("scatter", "gather"))
    ],
)
def test_no_half_breaks_a_rule(kernel, dtype, wire):
    assert problems(check_variant(Variant(kernel, dtype, wire), "sm_90")) == []


@pytest.mark.parametrize("target", [*(pytest.param(t, marks=pytest.mark.slow) for t in ("sm_80", "sm_100")), "gfx942"])
def test_the_ring_breaks_no_rule_on_other_gpus(target):
    # The ptxas of Triton 3.6 fuses packed products and sums for sm_100, although it is told not to and they say .rn.
    fuses = target == "sm_100" and triton.__version__.startswith("3.6.")
    for dtype, wire in ((FLOAT, BFLOAT), (BFLOAT, BFLOAT)):
        found = problems(check_variant(Variant("ring_all_reduce", dtype, wire), target))
        assert found == (["16 fused multiply-adds"] if fuses else [])


@pytest.mark.parametrize(("dtype", "wire"), slow_but((FLOAT, BFLOAT), FORMS))
def test_the_ring_moves_the_fewest_bytes(dtype, wire):
    """The own gradient is read in 3 phases, slots are read in 4 and written in 4, the output is written in 3.

    And the pass of a lone rank, in the same kernel, reads and writes once.
    """
    d, w = dtype.itemsize, wire.itemsize
    assert check_variant(Variant("ring_all_reduce", dtype, wire), "sm_90").bytes_per_element == 6 * d + 8 * w + 2 * d


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["ring_all_reduce", "two_shot"])
def test_several_tiles_on_their_way_at_once(kernel):
    for dtype, wire in ((FLOAT, BFLOAT), (DOUBLE, DOUBLE)):
        one, three = (check_variant(Variant(kernel, dtype, wire), "sm_90", stages=stages) for stages in (1, 3))
        assert one.async_copies == 0
        assert three.async_copies > 0
        assert problems(three) == []


def test_fusing_multiply_and_add_is_noticed():
    report = check_variant(RING, "sm_90", options={"enable_fp_fusion": True})
    assert report.fma_in_reduction > 0
    assert "fused multiply-adds" in "; ".join(problems(report))


@triton.jit
def _copies(source, target, ALIGNED: tl.constexpr):  # noqa: N803
    at = tl.arange(0, 1024)
    pointer = source.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    tl.store(target + at, tl.load(pointer + at))


@pytest.mark.parametrize("aligned", [True, False])
def test_accesses_without_known_alignment_are_noticed(aligned):
    types = {"source": "i64", "target": "*fp32"}
    options = {"num_warps": 4}
    compiled = compile_kernel(_copies, types, {"ALIGNED": aligned}, "sm_90", divisible=["target"], options=options)
    report = read(compiled, "copies", "sm_90", block=1024, threads=128)
    assert report.wide_bulk_accesses == (4 if aligned else 2)
    assert report.narrow_bulk_accesses == (0 if aligned else 8)
    assert ("8 bulk accesses below 16 bytes in the main path" in problems(report)) is not aligned


@triton.jit
def _always_masks(source, target, count):
    at = tl.arange(0, 1024)
    tl.store(target + at, tl.load(source + at), mask=at < count)


def test_a_main_path_that_is_all_masked_is_noticed():
    types = {"source": "*fp32", "target": "*fp32", "count": "i32"}
    compiled = compile_kernel(
        _always_masks, types, {}, "sm_90", divisible=["source", "target"], options={"num_warps": 4}
    )
    report = read(compiled, "masks", "sm_90", block=1024, threads=128)
    assert report.wide_stores == 0
    assert "no load, or no store, of 16 bytes in the main path" in problems(report)


@triton.jit
def _looks(base, out, SEMANTICS: tl.constexpr, SCOPE: tl.constexpr):  # noqa: N803
    seen = tl.atomic_add(word(base, 0), 0, sem=SEMANTICS, scope=SCOPE)
    tl.store(out + tl.arange(0, 128), seen + tl.zeros((128,), tl.int32))


@pytest.mark.parametrize(
    ("semantics", "scope", "weak"), [("acquire", "sys", 0), ("relaxed", "sys", 1), ("acquire", "gpu", 1)]
)
def test_a_wait_that_orders_too_little_is_noticed(semantics, scope, weak):
    constants = {"SEMANTICS": semantics, "SCOPE": scope}
    types = {"base": "i64", "out": "*i32"}
    compiled = compile_kernel(_looks, types, constants, "sm_90", divisible=["out"], options={"num_warps": 4})
    report = read(compiled, "looks", "sm_90", block=128, threads=128)
    assert report.weak_signals == weak
    assert any("relaxed, not of system scope" in problem for problem in problems(report)) is (weak > 0)


def test_spilling_is_noticed():
    report = check_variant(RING, "sm_90", options={"maxnreg": 32})
    assert report.spill_bytes > 0
    assert "spilled" in "; ".join(problems(report))


def test_a_read_modify_write_on_a_signal_is_noticed():
    report = check_variant(RING, "sm_90", platform=INTERPRETER)
    assert report.rmw_on_signals > 0
    assert "read-modify-writes" in "; ".join(problems(report))


@triton.jit
def _releases_too_early(data, base, BARRIER_FIRST: tl.constexpr):  # noqa: N803
    """A post that forgot the barrier: the inline release of signals.py, with another store on its way."""
    at = tl.arange(0, 1024)
    if BARRIER_FIRST:
        tl.store(data + at, at)
        post(word(base, 0), tl.full((), 1, tl.int32), NVIDIA)
    else:
        tl.debug_barrier()
        tl.store(data + at, at)
        tl.inline_asm_elementwise(
            "st.release.sys.global.b32 [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [base, tl.full((), 1, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@pytest.mark.parametrize("first", [True, False])
def test_a_release_without_a_barrier_before_it_is_noticed(first):
    types = {"data": "*i32", "base": "i64"}
    options = {"num_warps": 4}
    compiled = compile_kernel(
        _releases_too_early, types, {"BARRIER_FIRST": first}, "sm_90", divisible=["data"], options=options
    )
    report = read(compiled, "post", "sm_90", block=1024, threads=128)
    assert report.releases == 1
    assert report.barrier_before_every_release is first
    assert report.weak_signals == (0 if first else 1)  # the second one is released by every thread
    assert ("a release without a barrier before it" in problems(report)) is not first


@triton.jit
def _waits_by_the_clock(base, out, UNIFORM: tl.constexpr):  # noqa: N803
    now = clock(NVIDIA) if UNIFORM else globaltimer()
    until = now + 1000
    while now < until:
        tl.atomic_add(word(base, 0), 0, sem="acquire", scope="sys")
        now = clock(NVIDIA) if UNIFORM else globaltimer()
    tl.store(out + tl.arange(0, 256), now + tl.zeros((256,), tl.int64))


@pytest.mark.parametrize("uniform", [True, False])
def test_a_branch_on_a_time_that_differs_between_warps_is_noticed(uniform):
    constants, types = {"UNIFORM": uniform}, {"base": "i64", "out": "*i64"}
    compiled = compile_kernel(
        _waits_by_the_clock, types, constants, "sm_90", divisible=["out"], options={"num_warps": 8}
    )
    report = read(compiled, "waits", "sm_90", block=256, threads=256)
    assert (report.branches_on_clock == 0) is uniform
    assert any("differs between warps" in problem for problem in problems(report)) is not uniform


def test_a_scale_in_single_precision_is_noticed():
    report = check_variant(RING, "sm_90", scale_type="fp32")
    assert report.scale_bits == 32
    assert "the scale is passed in 32 bits" in problems(report)


def test_nothing_is_compiled_under_the_interpreter(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["kernels"]) == 2
    assert "unset TRITON_INTERPRET" in capsys.readouterr().err


def test_every_dtype_goes_with_every_wire():
    forms = {(v.dtype, v.wire) for v in variants(["two_shot"])}
    assert len(forms) == 10
    assert all(wire in (dtype, HALF, BFLOAT) for dtype, wire in forms)


@pytest.mark.slow
def test_the_command_prints_pure_json(capsys):
    command = [sys.executable, "-m", "fusedring", "kernels", "--target", "sm_80", "--kernel", "one_shot", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["target"] == "sm_80"
    assert [kernel["name"] for kernel in result["kernels"]] == [v.name for v in variants(["one_shot"])]
    assert {"registers", "spill_bytes", "narrow_bulk_accesses", "barrier_before_every_release"} <= set(
        result["kernels"][0]
    )
    with pytest.raises(SystemExit):
        main(["kernels", "--target", "sm_1"])
    assert "sm_90" in capsys.readouterr().err
