"""Signals between ranks: words in the reader's memory that hold epoch numbers, and the rules for touching them.

A *region* is what one rank lends its peers: first 32-bit words (abort, status, epochs, signals), then slots for data.
Every rank has mapped every region; `bases[r]` is the address of rank r's.

Memory order, stated once and used everywhere:

  POST   data stores -> barrier -> thread 0: release store of the epoch, system scope
  WAIT   one thread: acquire load, system scope -> broadcast through a barrier -> data loads

Triton puts no barrier between a CTA's stores and a release by thread 0, so POST begins with one. A signal has one
writer and one reader, hence the release is a plain store: PCIe has no atomics between devices, and `atomic_xchg` would
compile to one. Triton has no scalar release store, so on NVIDIA it is inline assembly, executed by thread 0 alone;
elsewhere it is `atomic_xchg`. On AMD a barrier does not wait for stores, so each wave does that first (read in the code
for gfx942, never run). An acquire load is spelled `atomic_add(p, 0)`, which compiles to just that.

A signal is never reset. A program (channel) counts its launches in its own epoch word, and in epoch e waits for words
that have reached e. The comparison is of the difference, so that it survives the wrap from 2^31-1 to -2^31, for words
that were posted within the last 2^31 epochs.

Time. A wait ends after `polls` looks, or when a peer has raised this rank's abort word. Then the program writes what it
waited for into its status words, raises every peer's abort word, fills its part of the output with NaN and leaves.
Status and abort are sticky: later launches leave at once, until the host closes the workspace. Nothing traps.
"""

import triton
import triton.language as tl

# The words of a region: abort, eight status words and one epoch word per channel, then SIGNAL_ROW signals for each row.
# Rows 0 .. 2(W-1)-1 belong to the ring's steps, rows 2W .. 4W-1 to the direct algorithms, so that a signal keeps its
# writer.
ABORT = tl.constexpr(0)
STATUS = tl.constexpr(16)
EPOCHS = tl.constexpr(272)
SIGNALS = tl.constexpr(512)
SIGNAL_ROW = tl.constexpr(1024)
STATUS_WORDS = tl.constexpr(8)
MOST_CHANNELS = 32

INTERPRETER = tl.constexpr(0)
NVIDIA = tl.constexpr(1)
AMD = tl.constexpr(2)

TIMED_OUT = tl.constexpr(1)
ABORTED = tl.constexpr(2)

_RELEASE = tl.constexpr(
    """
    {
        .reg .pred %first;
        .reg .b32 %thread;
        mov.u32 %thread, %tid.x;
        setp.eq.u32 %first, %thread, 0;
        @%first st.release.sys.global.b32 [$1], $2;
        mov.u32 $0, 0;
    }
    """
)


@triton.jit
def word(base, index):
    """Pointer to 32-bit word `index` of the region at address `base` (int64)."""
    return (base + 4 * index).to(tl.pointer_type(tl.int32))


@triton.jit
def signal(base, row, chunk):
    """Pointer to the signal of a chunk in a row of slots."""
    return word(base, SIGNALS + tl.cast(row, tl.int64) * SIGNAL_ROW + chunk)


@triton.jit
def post(pointer, epoch, PLATFORM: tl.constexpr):
    """POST: what this program stored before is visible to whoever sees `epoch` in the signal."""
    if PLATFORM == AMD:
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1", "=v,v", [epoch], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()
    if PLATFORM == NVIDIA:
        tl.inline_asm_elementwise(
            _RELEASE, "=r,l,r", [pointer.to(tl.int64), epoch], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.atomic_xchg(pointer, epoch, sem="release", scope="sys")


@triton.jit
def wait(pointer, epoch, base, polls):
    """WAIT until the signal has reached `epoch`. False if it did not within `polls` looks, or this rank was aborted."""
    late = tl.atomic_add(pointer, 0, sem="acquire", scope="sys") - epoch
    left = polls
    while (late < 0) & (left > 0):
        left = tl.where(is_aborted(base), 0, left - 1)
        late = tl.atomic_add(pointer, 0, sem="acquire", scope="sys") - epoch
    return late >= 0


@triton.jit
def wait_for(pointer, epoch, base, channel, awaited, step, chunk, polls, PLATFORM: tl.constexpr):
    """`wait`, and word of it if it fails. Under the interpreter the host can see meanwhile what is waited for."""
    status = word(base, STATUS + channel * STATUS_WORDS)
    if PLATFORM == INTERPRETER:
        tl.store(status + 6, step)
        tl.store(status + 7, chunk)
        tl.store(status + 5, awaited + 1)
    ok = wait(pointer, epoch, base, polls)
    if PLATFORM == INTERPRETER:
        tl.store(status + 5, 0)
    if not ok:
        report(base, channel, awaited, step, chunk, epoch, PLATFORM)
    return ok


@triton.jit
def is_aborted(base):
    """Whether a peer, or an earlier launch of this rank, has given up."""
    return tl.atomic_add(word(base, ABORT), 0, sem="acquire", scope="sys") != 0


@triton.jit
def begin(base, channel):
    """The epoch of this launch in this channel."""
    return tl.load(word(base, EPOCHS + channel)) + 1


@triton.jit
def end(base, channel, epoch):
    """The launch has done its work: count it."""
    tl.store(word(base, EPOCHS + channel), epoch)


@triton.jit
def report(base, channel, awaited, step, chunk, epoch, PLATFORM: tl.constexpr):
    """Leave word of a wait that failed: for which rank, at which step, for which chunk. The first report stays."""
    status = word(base, STATUS + channel * STATUS_WORDS)
    if tl.load(status) == 0:
        tl.store(status + 1, awaited)
        tl.store(status + 2, step)
        tl.store(status + 3, chunk)
        tl.store(status + 4, epoch)
        post(status, tl.where(is_aborted(base), ABORTED, TIMED_OUT), PLATFORM)


@triton.jit
def abort_all(bases, world, PLATFORM: tl.constexpr):
    """Raise the abort word of every rank, this one included."""
    for other in range(world):
        # Several ranks may raise one word, but always to the same value, so a store does.
        post(word(tl.load(bases + other), ABORT), tl.full((), 1, tl.int32), PLATFORM)


@triton.jit
def look(word_address: tl.int64, polls):
    """Wait in vain, to see how long a look takes. `word_address` is that of a word which is 0; so is the next one."""
    address = tl.cast(word_address, tl.int64)
    wait(word(address, 1), 1, address, polls)
