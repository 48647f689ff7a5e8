"""Compile the kernels for GPUs that need not be here, and read what became of them.

What has to hold is said in `problems`. On NVIDIA the reading is of PTX, by its data flow, and of what ptxas made of it:

- A *bulk* access is one whose address depends on the thread's index. Tables and signals are read by all threads alike.
- The *main path* is the bulk accesses without a predicate, those of full tiles. The ragged tail is masked.
- A barrier stands before a release if, going back from the release, a barrier comes before any store to global memory
  and before the beginning of the basic block.

On AMD only registers, spills, barriers and atomics are read.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fusedring.config import DTYPES, dtype_name
from fusedring.kernels.layout import AMD, NVIDIA

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")

_ARGUMENTS = {
    "tiles": "*i64",
    "chunk_tiles": "*i32",
    "origins": "*i64",
    "output": "*{dtype}",
    "bases": "*i64",
    "squares": "*fp32",
    "unbounded": "*i32",
    "chunks": "i32",
    "row_bytes": "i64",
    "slots": "i64",
    "parity_bytes": "i64",
    "rank": "i32",
    "world": "i32",
    "patience": "i64",
    "scale_bits": "i64",
}
"""Types of the kernels' arguments. Pointers and byte counts are multiples of 16, as they are at run time."""

_SCALE = list(_ARGUMENTS).index("scale_bits")
_SIGNATURE_DTYPES = {torch.float32: "fp32", torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16"}
_CHANNELS = 8

_BOTH = {"SCATTER": True, "GATHER": True}
_SCATTER = {"SCATTER": True, "GATHER": False}
_GATHER = {"SCATTER": False, "GATHER": True}
_KERNELS: dict[str, tuple[str, dict[str, bool]]] = {
    "ring_all_reduce": ("ring", _BOTH),
    "ring_reduce_scatter": ("ring", _SCATTER),
    "ring_all_gather": ("ring", _GATHER),
    "two_shot": ("direct", {**_BOTH, "EVERYONE_SUMS": False, "ONE_SUMS": False}),
    "two_shot_reduce_scatter": ("direct", {**_SCATTER, "EVERYONE_SUMS": False, "ONE_SUMS": False}),
    "two_shot_all_gather": ("direct", {**_GATHER, "EVERYONE_SUMS": False, "ONE_SUMS": False}),
    "one_shot": ("direct", {**_BOTH, "EVERYONE_SUMS": True, "ONE_SUMS": False}),
    "master": ("direct", {**_BOTH, "EVERYONE_SUMS": False, "ONE_SUMS": True}),
    "master_reduce_scatter": ("direct", {**_SCATTER, "EVERYONE_SUMS": False, "ONE_SUMS": True}),
    "master_all_gather": ("direct", {**_GATHER, "EVERYONE_SUMS": False, "ONE_SUMS": True}),
}
KERNELS = tuple(_KERNELS)


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel for one dtype and wire dtype."""

    kernel: str
    dtype: torch.dtype
    wire: torch.dtype

    @property
    def name(self) -> str:
        """As in 'ring_all_reduce[float32,bfloat16]'."""
        dtype, wire = map(dtype_name, (self.dtype, self.wire))
        return f"{self.kernel}[{dtype},{wire}]"


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What a kernel compiled to. None: not read on this target.

    registers: of a thread. narrow_bulk_accesses, wide_bulk_accesses: accesses of the main path below 16 bytes, and from
    16 bytes on. bulk_accesses: how many of each width, ragged tail included ('ld16', 'st2', ...). bytes_per_element:
    what the main path of all phases together moves for one element, each loop taken once. instructions_per_element: PTX
    instructions of the busiest block of the main path, for one element. rmw_on_signals: atomics at system scope.
    weak_signals: relaxed or volatile accesses, acquires and releases of a smaller scope, releases by every thread.
    async_copies: into shared memory, where several tiles are on their way at once; their widths are not read.
    branches_on_clock: branches that warps may take differently, since each has read another time; what has gone through
    shared memory is the same for all. fma_in_reduction: fused multiply-adds on floats, in PTX and in machine code.
    scale_bits: width of the scale.
    """

    name: str
    registers: int
    shared_bytes: int
    spill_bytes: int
    barriers: int
    rmw_on_signals: int
    acquires: int | None = None
    releases: int | None = None
    weak_signals: int | None = None
    barrier_before_every_release: bool | None = None
    branches_on_clock: int | None = None
    narrow_bulk_accesses: int | None = None
    wide_bulk_accesses: int | None = None
    wide_loads: int | None = None
    wide_stores: int | None = None
    async_copies: int | None = None
    bulk_accesses: dict[str, int] = field(default_factory=dict)
    bytes_per_element: float | None = None
    instructions_per_element: float | None = None
    fma_in_reduction: int | None = None
    scale_bits: int | None = None


def variants(kernels: Sequence[str] = KERNELS) -> Iterator[Variant]:
    """Every dtype with every wire: the dtype itself, float16 and bfloat16."""
    for kernel in kernels:
        for dtype in DTYPES:
            for wire in dict.fromkeys((dtype, torch.float16, torch.bfloat16)):
                yield Variant(kernel, dtype, wire)


def problems(report: KernelReport) -> list[str]:
    """What must not be, in words."""
    found = []
    if report.spill_bytes:
        found.append(f"{report.spill_bytes} bytes spilled")
    if report.registers > 128:
        found.append(f"{report.registers} registers, more than 128")
    if report.narrow_bulk_accesses:
        found.append(f"{report.narrow_bulk_accesses} bulk accesses below 16 bytes in the main path")
    if (report.wide_loads == 0 and report.async_copies == 0) or report.wide_stores == 0:
        found.append("no load, or no store, of 16 bytes in the main path")
    if report.releases == 0 or report.acquires == 0:
        found.append("no release, or no acquire")
    if report.weak_signals:
        found.append(f"{report.weak_signals} signal accesses that are relaxed, not of system scope, or by all threads")
    if report.barrier_before_every_release is False:
        found.append("a release without a barrier before it")
    if report.releases is not None and report.rmw_on_signals:
        found.append(f"{report.rmw_on_signals} read-modify-writes at system scope")
    if report.branches_on_clock:
        found.append(f"{report.branches_on_clock} branches on a time that differs between warps")
    if report.fma_in_reduction:
        found.append(f"{report.fma_in_reduction} fused multiply-adds")
    if report.scale_bits is not None and report.scale_bits < 64:
        found.append(f"the scale is passed in {report.scale_bits} bits")
    return found


def check_variant(
    variant: Variant,
    target: str,
    *,
    platform: int | None = None,
    scale_type: str = "i64",
    stages: int = 1,
    options: dict[str, Any] | None = None,
) -> KernelReport:
    """Compile a variant for a target, and read it. Raises ValueError for an unknown target.

    platform, scale_type, stages, options: how it is compiled; other than by default only to see what that would break.
    """
    from fusedring.kernels import direct, prepared, ring

    if platform is None:
        platform = NVIDIA if target.startswith("sm_") else AMD
    module, flags = _KERNELS[variant.kernel]
    function = {"ring": ring.ring, "direct": direct.direct}[module]
    form = prepared.form(variant.dtype, variant.wire, channels=_CHANNELS, platform=platform, stages=stages)
    types = {name: kind.format(dtype=_SIGNATURE_DTYPES[variant.dtype]) for name, kind in _ARGUMENTS.items()}
    types["scale_bits"] = scale_type
    compiled = compile_kernel(
        function,
        types,
        {**flags, "FORM": form},
        target,
        divisible=[n for n, kind in types.items() if kind[0] == "*" or n in ("row_bytes", "slots", "parity_bytes")],
        options={**prepared.options(platform), **(options or {})},
    )
    return read(compiled, variant.name, target, block=form.block, threads=32 * prepared.WARPS)


def compile_kernel(
    function: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    target: str,
    *,
    divisible: Sequence[str],
    options: dict[str, Any],
) -> Any:
    """Triton's compiled form of a kernel. divisible: arguments that are known to be multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {target!r}")
    names = function.arg_names
    source = ASTSource(
        fn=function,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    nvidia = target.startswith("sm_")
    gpu = GPUTarget("cuda", int(target[3:]), 32) if nvidia else GPUTarget("hip", target, 64)
    return triton.compile(source, target=gpu, options=options)


def read(compiled: Any, name: str, target: str, *, block: int, threads: int) -> KernelReport:
    """Read a compiled kernel whose tiles have `block` elements, run by `threads` threads."""
    if target.startswith("gfx"):
        return _read_amd(compiled, name)
    return _read_nvidia(compiled, name, elements_per_thread=block / threads)


# NVIDIA


@dataclass(frozen=True, slots=True)
class _Instruction:
    guard: str
    opcode: str
    defined: frozenset[str]
    used: frozenset[str]
    address: frozenset[str]
    block: int


_REGISTER = re.compile(r"%(?:[a-z]+\d+|tid\.[xyz]|laneid|globaltimer|first|thread)\b")
_LINE = re.compile(r"^(?:@(!?%\w+)\s+)?([a-z][\w.:]*)\s*(.*?);?$")
_ACCESS = re.compile(r"^(ld|st)\.global(?:\.[a-zA-Z_0-9:]+?)*?(?:\.v(\d))?\.[bsuf](\d+)$")


def _instructions(ptx: str) -> list[_Instruction]:
    found, block = [], 0
    for raw in ptx.splitlines():
        line = raw.partition("//")[0].strip()
        if line.endswith(":"):
            block += not line.startswith("$L__tmp")  # those are for debuggers, nothing jumps there
            continue
        match = _LINE.match(line)
        if match is None or line[0] in ".{}":
            continue
        guard, opcode, operands = match[1] or "", match[2], match[3]
        address = frozenset(_REGISTER.findall("".join(re.findall(r"\[([^\]]*)\]", operands))))
        if opcode.split(".")[0] in ("st", "bar", "bra", "red", "ret", "membar", "fence", "barrier"):
            defined = ""
        else:
            group = re.match(r"\{[^}]*\}|[^,]*", operands)
            defined = group[0] if group else ""
        used = operands[len(defined) :]
        found.append(
            _Instruction(
                guard, opcode, frozenset(_REGISTER.findall(defined)), frozenset(_REGISTER.findall(used)), address, block
            )
        )
        if opcode == "bra" or opcode.startswith("bra."):
            block += 1
    return found


def _depends_on_thread(code: Sequence[_Instruction]) -> set[str]:
    """Registers whose value differs between threads."""
    return _depending(code, {"%tid.x", "%tid.y", "%tid.z", "%laneid"})


def _depending(code: Sequence[_Instruction], dependent: set[str]) -> set[str]:
    """Registers whose value depends on these; not by way of memory."""
    size = 0
    while len(dependent) != size:
        size = len(dependent)
        for instruction in code:
            if instruction.used & dependent:
                dependent |= instruction.defined
    return dependent


def _read_nvidia(compiled: Any, name: str, *, elements_per_thread: float) -> KernelReport:
    ptx = compiled.asm["ptx"]
    code = _instructions(ptx)
    dependent = _depends_on_thread(code)
    widths: Counter[str] = Counter()
    narrow = moved = 0
    wide = {"ld": 0, "st": 0}
    busy: set[int] = set()
    for instruction in code:
        access = _ACCESS.match(instruction.opcode)
        if access is None or not instruction.address & dependent:
            continue
        nbytes = int(access[2] or 1) * int(access[3]) // 8
        widths[f"{access[1]}{nbytes}"] += 1
        if not instruction.guard:
            moved += nbytes
            busy.add(instruction.block)
            narrow += nbytes < 16
            wide[access[1]] += nbytes >= 16
    timed = _depending(code, {"%globaltimer"})
    opcodes = Counter(instruction.opcode for instruction in code)
    instructions = Counter(instruction.block for instruction in code)
    registers, spills, fused = _assembled(compiled)
    parameters = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)", ptx.partition(")")[0])
    return KernelReport(
        name=name,
        registers=registers,
        shared_bytes=compiled.metadata.shared,
        spill_bytes=spills,
        barriers=sum(n for opcode, n in opcodes.items() if opcode.startswith(("bar.sync", "barrier.sync"))),
        rmw_on_signals=sum(n for op, n in opcodes.items() if op.startswith(("atom.", "red.")) and ".sys" in op),
        acquires=sum(n for op, n in opcodes.items() if op.startswith("ld.") and ".acquire" in op),
        releases=sum(n for op, n in opcodes.items() if op.startswith("st.") and ".release" in op),
        barrier_before_every_release=all(_barrier_before(code, at) for at, i in enumerate(code) if _releases(i)),
        branches_on_clock=sum(
            instruction.opcode.split(".")[0] == "bra" and instruction.guard.lstrip("!") in timed for instruction in code
        ),
        narrow_bulk_accesses=narrow,
        wide_bulk_accesses=sum(wide.values()),
        wide_loads=wide["ld"],
        wide_stores=wide["st"],
        async_copies=sum(n for op, n in opcodes.items() if re.match(r"cp\.async\.c[ag]\.", op)),
        weak_signals=sum(map(_is_weak, code)),
        bulk_accesses=dict(sorted(widths.items())),
        bytes_per_element=moved / elements_per_thread,
        instructions_per_element=max((instructions[block] for block in busy), default=0) / elements_per_thread,
        fma_in_reduction=fused + sum(n for op, n in opcodes.items() if re.match(r"fma\..*[fb]\d", op)),
        scale_bits=int(parameters[_SCALE]) if len(parameters) > _SCALE else None,
    )


def _releases(instruction: _Instruction) -> bool:
    return ".release" in instruction.opcode


def _is_weak(instruction: _Instruction) -> bool:
    opcode = instruction.opcode
    if not opcode.startswith(("ld.", "st.", "atom.", "red.")):
        return False
    if ".relaxed" in opcode or ".volatile" in opcode:
        return True
    synchronizes = ".acquire" in opcode or ".release" in opcode or ".acq_rel" in opcode
    return synchronizes and (".sys" not in opcode or (_releases(instruction) and not instruction.guard))


def _barrier_before(code: Sequence[_Instruction], at: int) -> bool:
    for earlier in reversed(code[:at]):
        if earlier.block != code[at].block:
            return False
        if earlier.opcode.startswith(("bar.sync", "barrier.sync")):
            return not earlier.used  # one of all threads
        if earlier.opcode.startswith(("st.", "atom.", "red.")) and ".shared" not in earlier.opcode:
            return False
    return False


def _assembled(compiled: Any) -> tuple[int, int, int]:
    """Registers, bytes spilled, and fused multiply-adds, of the machine code."""
    import triton.backends.nvidia

    tools = Path(triton.backends.nvidia.__file__).parent / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", file.name)
        code = _output(tools / "nvdisasm", "-c", file.name)
    counts = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    # Code without calls and local arrays has a stack only for what is spilled.
    return counts["REG"], counts["STACK"] + counts["LOCAL"], len(re.findall(r"\b(?:FFMA2?|DFMA)\b", code))


def _output(*command: Any) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout


# AMD


def _read_amd(compiled: Any, name: str) -> KernelReport:
    code = compiled.asm["amdgcn"]

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s*(\d+)", code)
        return int(found[1]) if found else 0

    return KernelReport(
        name=name,
        registers=number("vgpr_count"),
        shared_bytes=compiled.metadata.shared,
        spill_bytes=4 * number("vgpr_spill_count"),
        barriers=len(re.findall(r"^\s*s_barrier", code, re.M)),
        rmw_on_signals=len(re.findall(r"^\s*(?:global|flat)_atomic_", code, re.M)),
    )
