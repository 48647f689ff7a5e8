"""Memory that processes share, as compiled code sees it: loads that acquire, stores that release, waiting and waking.

Order. A signal has one writer. It stores data, then the signal with release order (`post`); who sees the new value by
an acquire load (`wait`) sees the data.

Sleeping. Beside each signal is a flag, which is 1 while somebody sleeps, and on which they sleep. Who is about to
sleep sets the flag and then looks at the signal once more; who posts stores the signal and then looks at the flag.
Acquire and release do not keep a store before a later load, so each could miss the other; both stores are therefore
exchanges, which are sequentially consistent: one of the two sees what the other has stored. Who posts takes the flag
back by an exchange before it wakes all sleepers. A waiter that set the flag too late to be woken finds it 0, and the
system call does not let it sleep; and if another waiter has set it again by then, the next post will see it.

Floating point. The flush-to-zero and rounding modes belong to the calling thread, and other code may have changed them:
`default_floating_point` sets what IEEE 754 says, `restore_floating_point` what was there.
"""

import platform

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from fusedring.kernels.host_layout import (
    ALARM,
    AWAITED,
    AWAITED_VALUE,
    BLOCK_BYTES,
    CHANNEL,
    CLOCK,
    CONTROL,
    EPOCH,
    LINE,
    POINT_BITS,
    PULSE,
    RANK,
    SIGNALS,
    SLEEPERS,
    SLICE,
    SPINS,
)

MACHINE = platform.machine()
FUTEX = {"x86_64": 202, "aarch64": 98}.get(MACHINE, 0)
FUTEX_WAIT, FUTEX_WAKE, EVERYBODY = 0, 1, 2**31 - 1
CLOCK_MONOTONIC = 1
ONE_SECOND = 1_000_000_000

DEFAULT_MXCSR = 0x1F80
"""Round to nearest even, keep subnormals, no traps."""

_OPTIONS = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def compiled(function):
    """For functions of words that only other compiled functions call."""
    # With its types given, Numba does not make another one for each constant that it is called with.
    return njit((types.int64,) * function.__code__.co_argcount, **_OPTIONS)(function)


def compiled_for_any_type(function):
    """The same for functions of other numbers."""
    return njit(**_OPTIONS)(function)


_WORD, _HALF_WORD = ir.IntType(64), ir.IntType(32)

syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))
clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
memcpy = types.ExternalFunction("memcpy", types.int64(types.int64, types.int64, types.int64))


def _at(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def load(typing, address):
    """The word at `address`; what is read later is not older (acquire)."""
    return types.int64(types.int64), lambda _, b, __, a: b.load_atomic(_at(b, a[0], _WORD), "acquire", 8)


@intrinsic
def load_flag(typing, address):
    """The 32-bit word at `address`, sequentially consistent."""

    def code(context, builder, signature, arguments):
        value = builder.load_atomic(_at(builder, arguments[0], _HALF_WORD), "seq_cst", 4)
        return builder.sext(value, _WORD)

    return types.int64(types.int64), code


@intrinsic
def store(typing, address, value):
    """Store a word behind everything stored earlier (release)."""

    def code(context, builder, signature, arguments):
        builder.store_atomic(arguments[1], _at(builder, arguments[0], _WORD), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@intrinsic
def exchange(typing, address, value):
    """Store a word, sequentially consistent: in one order with all others such, for all threads."""

    def code(context, builder, signature, arguments):
        return builder.atomic_rmw("xchg", _at(builder, arguments[0], _WORD), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), code


@intrinsic
def exchange_flag(typing, address, value):
    """As `exchange`, for a 32-bit word."""

    def code(context, builder, signature, arguments):
        new = builder.trunc(arguments[1], _HALF_WORD)
        return builder.sext(builder.atomic_rmw("xchg", _at(builder, arguments[0], _HALF_WORD), new, "seq_cst"), _WORD)

    return types.int64(types.int64, types.int64), code


@intrinsic
def pause(typing):
    """Tell the processor that this is a loop that waits."""

    def code(context, builder, signature, arguments):
        nothing = ir.FunctionType(ir.VoidType(), [])
        if MACHINE == "x86_64":
            builder.call(cgutils.get_or_insert_function(builder.module, nothing, "llvm.x86.sse2.pause"), [])
        else:
            builder.asm(nothing, "yield", "", [], side_effect=True)
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def default_floating_point(typing, scratch):
    """Set the modes of IEEE 754; returns those that were set before. scratch: address of a word."""

    def code(context, builder, signature, arguments):
        if MACHINE == "x86_64":
            bytes_ = ir.IntType(8).as_pointer()
            kind = ir.FunctionType(ir.VoidType(), [bytes_])
            word, place = _at(builder, arguments[0], _HALF_WORD), builder.inttoptr(arguments[0], bytes_)
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse.stmxcsr"), [place])
            before = builder.load(word)
            builder.store(ir.Constant(_HALF_WORD, DEFAULT_MXCSR), word)
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse.ldmxcsr"), [place])
            return builder.zext(before, _WORD)
        get = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_WORD, []), "llvm.aarch64.get.fpcr")
        put = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [_WORD]), "llvm.aarch64.set.fpcr"
        )
        before = builder.call(get, [])
        builder.call(put, [ir.Constant(_WORD, 0)])
        return before

    return types.int64(types.int64), code


@intrinsic
def restore_floating_point(typing, scratch, before):
    """Undo `default_floating_point`, which gave `before`."""

    def code(context, builder, signature, arguments):
        if MACHINE == "x86_64":
            bytes_ = ir.IntType(8).as_pointer()
            kind = ir.FunctionType(ir.VoidType(), [bytes_])
            builder.store(builder.trunc(arguments[1], _HALF_WORD), _at(builder, arguments[0], _HALF_WORD))
            place = builder.inttoptr(arguments[0], bytes_)
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse.ldmxcsr"), [place])
        else:
            kind = ir.FunctionType(ir.VoidType(), [_WORD])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.set.fpcr"), [arguments[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@intrinsic
def get(typing, base, index):
    """Word `index` from address `base`."""

    def code(context, builder, signature, arguments):
        return builder.load(builder.gep(_at(builder, arguments[0], _WORD), [arguments[1]]))

    return types.int64(types.int64, types.int64), code


@intrinsic
def put(typing, base, index, value):
    """Store word `index` from address `base`."""

    def code(context, builder, signature, arguments):
        builder.store(arguments[2], builder.gep(_at(builder, arguments[0], _WORD), [arguments[1]]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code


@intrinsic
def call(typing, function, target, a, b, factor, count):
    """Call the function at an address, which takes four addresses or numbers around a float64."""

    def code(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [_WORD, _WORD, _WORD, ir.DoubleType(), _WORD])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, word, word, word, types.float64, word), code


@compiled
def now(job):
    """Nanoseconds of the monotonic clock."""
    clock_gettime(CLOCK_MONOTONIC, job + 8 * CLOCK)
    return get(job, CLOCK) * ONE_SECOND + get(job, CLOCK + 1)


@compiled
def block_of(job, rank):
    """The address of a rank's control block."""
    return get(job, CONTROL) + rank * BLOCK_BYTES


@compiled
def signal_of(job, rank):
    """The address of a rank's signal in this job's channel."""
    return block_of(job, rank) + SIGNALS + get(job, CHANNEL) * LINE


@compiled
def is_alarmed(job):
    """Whether some rank has reported a failure: it may use its memory again, so nobody writes there any more."""
    return load(get(job, CONTROL) + ALARM) != 0


@compiled
def post(job, point):
    """Say that this rank has passed `point` of its epoch, after all that it stored before."""
    signal = signal_of(job, get(job, RANK))
    exchange(signal, get(job, EPOCH) << POINT_BITS | point)
    if load_flag(signal + SLEEPERS) != 0:
        exchange_flag(signal + SLEEPERS, 0)
        syscall(FUTEX, signal + SLEEPERS, FUTEX_WAKE, EVERYBODY, 0, 0, 0)


@compiled
def show_progress(job):
    """Keep the others' timeouts from running while this rank works."""
    pulse = block_of(job, get(job, RANK)) + PULSE
    store(pulse, get(pulse, 0) + 1)


@compiled
def wait(job, rank, point):
    """Wait until `rank` has passed `point` of this epoch. False when that has lasted for a slice of time."""
    signal, value = signal_of(job, rank), get(job, EPOCH) << POINT_BITS | point
    for _ in range(get(job, SPINS) + 1):
        if load(signal) >= value:
            return True
        pause()
    deadline = now(job) + get(job, SLICE) * ONE_SECOND + get(job, SLICE + 1)
    while now(job) < deadline:
        exchange_flag(signal + SLEEPERS, 1)
        if load(signal) >= value:
            return True
        syscall(FUTEX, signal + SLEEPERS, FUTEX_WAIT, 1, job + 8 * SLICE, 0, 0)
        if load(signal) >= value:
            return True
    put(job, AWAITED, rank)
    put(job, AWAITED_VALUE, value)
    return False
