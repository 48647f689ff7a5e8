"""Signals between ranks: words in the reader's memory that hold epoch numbers, and the rules for touching them.

A *region* is what one rank lends its peers: first 32-bit words (abort, epochs, signals), then slots for data. Every
rank has mapped every region; `bases[r]` is the address of rank r's. A rank's *board* is a page of host memory on which
its kernels leave word for the hosts of all ranks, and its host for its kernels; `bases[W]` is the own one's address.

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

Time. A wait ends after `patience` (nanoseconds on a GPU, looks under the interpreter), or when a peer has raised this
rank's abort word, or the host its stop word. Then the program leaves word of what it waited for on the board, raises
every peer's abort word, fills its part of the output with NaN and leaves. Both are sticky: later launches leave at
once, until the host closes the workspace. Nothing traps.

A board lies behind PCIe, so only a wait that has lasted for `PROMPT` looks at its stop word, and shows there what it
waits for; a host can then tell whether that rank still lives. All threads of a program must take the same branches,
since they meet at barriers: what a branch depends on comes from `look_at` or `clock`, which give all the same.
"""

import triton
import triton.language as tl
from triton.language.extra.hip import memrealtime

# The words of a region: abort, one epoch word per channel, then SIGNAL_ROW signals for each row. Rows 0 .. 2(W-1)-1
# belong to the ring's steps, rows 2W .. 4W-1 to the direct algorithms, so that a signal keeps its writer.
ABORT = tl.constexpr(0)
EPOCHS = tl.constexpr(16)
SIGNALS = tl.constexpr(256)
SIGNAL_ROW = tl.constexpr(1024)
MOST_CHANNELS = 128

# The words of a board: stop, then a notice for each channel. Of a notice: what a wait that failed was for (code,
# awaited rank, step, chunk, epoch), what one that lasts is for (awaited rank + 1, step, chunk), the epochs of the last
# launch that began and of the last that ended.
STOP = tl.constexpr(0)
NOTICES = tl.constexpr(16)
NOTICE_WORDS = tl.constexpr(16)
FAILED = tl.constexpr(0)
WAITING = tl.constexpr(5)
BEGUN = tl.constexpr(8)
ENDED = tl.constexpr(9)
BOARD_BYTES = 4 * (16 + 16 * MOST_CHANNELS)

INTERPRETER = tl.constexpr(0)
NVIDIA = tl.constexpr(1)
AMD = tl.constexpr(2)

TIMED_OUT = tl.constexpr(1)
ABORTED = tl.constexpr(2)

PROMPT = tl.constexpr(256)
"""Looks, of about a microsecond: longer than a chunk takes on the slowest link."""

THREADS = tl.constexpr(512)
"""Of a program, at the most: 8 warps of 64."""

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
def notice(board, channel, index):
    """Pointer to word `index` of a channel's notice on the board at address `board` (int64)."""
    return word(board, NOTICES + channel * NOTICE_WORDS + index)


@triton.jit
def look_at(pointer):
    """The word at `pointer`; what its writer stored before is visible afterwards."""
    return tl.atomic_add(pointer, 0, sem="acquire", scope="sys")


@triton.jit
def wait_for(pointer, epoch, base, board, channel, awaited, step, chunk, patience, PLATFORM: tl.constexpr):
    """WAIT until the signal has reached `epoch`. If it does not, or this rank is to give up: False, and word of it."""
    late = look_at(pointer) - epoch
    looks = 0
    while (late < 0) & (looks < PROMPT):
        looks = tl.where(is_aborted(base), PROMPT, looks + 1)
        late = look_at(pointer) - epoch
    if late < 0:
        tl.store(notice(board, channel, WAITING + 1), step)
        tl.store(notice(board, channel, WAITING + 2), chunk)
        tl.store(notice(board, channel, WAITING), awaited + 1)
        started = clock(PLATFORM)
        waited = tl.full((), 0, tl.int64)
        while (late < 0) & (waited < patience):
            give_up = is_aborted(base) | (look_at(word(board, STOP)) != 0)
            passed = clock(PLATFORM) - started if PLATFORM != INTERPRETER else waited + 1
            waited = tl.where(give_up, patience, passed)
            late = look_at(pointer) - epoch
        tl.store(notice(board, channel, WAITING), 0)
        if late < 0:
            report(base, board, channel, awaited, step, chunk, epoch, PLATFORM)
    return late >= 0


@triton.jit
def clock(PLATFORM: tl.constexpr):
    """Nanoseconds since some time, the same in all threads; 0 where there is no clock.

    Each warp reads another time. Were it used as it is, warps would leave a loop in different rounds and meet at
    different barriers. So the latest counts, which reaches all threads by way of shared memory: one for each thread.
    """
    if PLATFORM == NVIDIA:
        times = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,r", [tl.arange(0, THREADS)], dtype=tl.int64, is_pure=False, pack=1
        )
        now = tl.max(times, axis=0)
    elif PLATFORM == AMD:
        times = memrealtime() + tl.zeros((THREADS,), tl.int64)
        now = 10 * tl.max(times, axis=0)  # it ticks at 100 MHz
    else:
        now = tl.full((), 0, tl.int64)
    return now


@triton.jit
def is_aborted(base):
    """Whether a peer, or an earlier launch of this rank, has given up."""
    return look_at(word(base, ABORT)) != 0


@triton.jit
def begin(base, board, channel):
    """The epoch of this launch in this channel."""
    epoch = tl.load(word(base, EPOCHS + channel)) + 1
    tl.store(notice(board, channel, BEGUN), epoch)
    return epoch


@triton.jit
def end(base, board, channel, epoch):
    """The launch has done its work: count it."""
    tl.store(word(base, EPOCHS + channel), epoch)
    tl.store(notice(board, channel, ENDED), epoch)


@triton.jit
def report(base, board, channel, awaited, step, chunk, epoch, PLATFORM: tl.constexpr):
    """Leave word of a wait that failed: for which rank, at which step, for which chunk. The first report stays."""
    failed = notice(board, channel, FAILED)
    if look_at(failed) == 0:
        tl.store(failed + 1, awaited)
        tl.store(failed + 2, step)
        tl.store(failed + 3, chunk)
        tl.store(failed + 4, epoch)
        stopped = is_aborted(base) | (look_at(word(board, STOP)) != 0)
        post(failed, tl.where(stopped, ABORTED, TIMED_OUT), PLATFORM)


@triton.jit
def abort_all(bases, world, board, channel, PLATFORM: tl.constexpr):
    """Raise the abort word of every rank, this one included. A launch that never waited says just that it left."""
    failed = notice(board, channel, FAILED)
    if look_at(failed) == 0:
        tl.store(failed + 1, -1)
        post(failed, tl.full((), ABORTED, tl.int32), PLATFORM)
    for other in range(world):
        # Several ranks may raise one word, but always to the same value, so a store does.
        post(word(tl.load(bases + other), ABORT), tl.full((), 1, tl.int32), PLATFORM)


@triton.jit
def wait_in_vain(words: tl.int64, board: tl.int64, looks: tl.int64):
    """To see how long a look takes under the interpreter. Both are addresses of zeroed memory."""
    region = tl.cast(words, tl.int64)
    wait_for(
        word(region, SIGNALS), 1, region, tl.cast(board, tl.int64), 0, 0, 0, 0, tl.cast(looks, tl.int64), INTERPRETER
    )
