"""Signals between ranks: words in the reader's memory that hold epoch numbers, and the rules for touching them.

Where they lie in a rank's region, and what is on its status page, is said in layout.py. `bases[r]` is the address of
rank r's region, `bases[W]` that of this rank's status page.

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
rank's abort word, or the host its stop word. Then the program leaves word of what it waited for on the status page,
raises every peer's abort word, fills its part of the output with NaN and leaves. Both are sticky: later launches leave
at once, until the host closes the workspace. Nothing traps.

A status page lies behind PCIe, so only a wait that has lasted for `PROMPT` looks at its stop word, and shows there what
it waits for; a host can then tell whether that rank still lives. All threads of a program must take the same branches,
since they meet at barriers: what a branch depends on comes from `look_at` or `clock`, which give all the same.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.hip import memrealtime

from fusedring.kernels import layout

# The numbers of layout.py, wrapped as Triton wants them. Hosts take them from there.
ABORT = tl.constexpr(layout.ABORT)
EPOCHS = tl.constexpr(layout.EPOCHS)
SIGNALS = tl.constexpr(layout.SIGNALS)
SIGNAL_ROW = tl.constexpr(layout.SIGNAL_ROW)
CONTRIBUTIONS = tl.constexpr(layout.CONTRIBUTIONS)
SUMS = tl.constexpr(layout.SUMS)
DIRECT_SIGNALS = tl.constexpr(layout.DIRECT_SIGNALS)
STOP = tl.constexpr(layout.STOP)
NOTICES = tl.constexpr(layout.NOTICES)
NOTICE_WORDS = tl.constexpr(layout.NOTICE_WORDS)
FAILED = tl.constexpr(layout.FAILED)
WAITING = tl.constexpr(layout.WAITING)
BEGUN = tl.constexpr(layout.BEGUN)
ENDED = tl.constexpr(layout.ENDED)
TIMED_OUT = tl.constexpr(layout.TIMED_OUT)
ABORTED = tl.constexpr(layout.ABORTED)
INTERPRETER = tl.constexpr(layout.INTERPRETER)
NVIDIA = tl.constexpr(layout.NVIDIA)
AMD = tl.constexpr(layout.AMD)
PROMPT = tl.constexpr(layout.PROMPT)

THREADS = tl.constexpr(512)
"""Of a program, at the most: 8 warps of 64."""


class Link(NamedTuple):
    """How one program reaches the ranks in one epoch.

    bases: addresses of the regions and of the own status page, int64 (W + 1,). region, status: the own ones of these.
    previous: the rank that this one receives from in the ring; following: region of the one that it sends to. slots:
    the byte of a region where this epoch's slots begin; row_bytes: from one row of them to the next.
    """

    bases: Any
    rank: Any
    world: Any
    region: Any
    previous: Any
    following: Any
    status: Any
    slots: Any
    row_bytes: Any
    epoch: Any
    channel: Any
    patience: Any


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
    """Pointer to 32-bit word `index` of the region or status page at address `base` (int64)."""
    return (base + 4 * index).to(tl.pointer_type(tl.int32))


@triton.jit
def signal_word(base, row, index):
    """Pointer to signal `index` in a row of signals."""
    return word(base, SIGNALS + tl.cast(row, tl.int64) * SIGNAL_ROW + index)


@triton.jit
def notice(status, channel, index):
    """Pointer to word `index` of a channel's notice on the status page at address `status` (int64)."""
    return word(status, NOTICES + channel * NOTICE_WORDS + index)


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
def look_at(pointer):
    """The word at `pointer`; what its writer stored before is visible afterwards."""
    return tl.atomic_add(pointer, 0, sem="acquire", scope="sys")


@triton.jit
def wait_for(pointer, link, awaited, step, chunk, PLATFORM: tl.constexpr):
    """WAIT until the signal has reached the link's epoch, which rank `awaited` posts for a step and chunk.

    If it does not, or this rank is to give up: False, and word of it.
    """
    late = look_at(pointer) - link.epoch
    looks = 0
    while (late < 0) & (looks < PROMPT):
        looks = tl.where(is_aborted(link.region), PROMPT, looks + 1)
        late = look_at(pointer) - link.epoch
    if late < 0:
        waiting = notice(link.status, link.channel, WAITING)
        tl.store(waiting + 1, step)
        tl.store(waiting + 2, chunk)
        tl.store(waiting, awaited + 1)
        started = clock(PLATFORM)
        waited = tl.full((), 0, tl.int64)
        while (late < 0) & (waited < link.patience):
            give_up = is_stopped(link)
            passed = clock(PLATFORM) - started if PLATFORM != INTERPRETER else waited + 1
            waited = tl.where(give_up, link.patience, passed)
            late = look_at(pointer) - link.epoch
        tl.store(waiting, 0)
        if late < 0:
            report(link, awaited, step, chunk, PLATFORM)
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
def is_aborted(region):
    """Whether a peer, or an earlier launch of this rank, has given up."""
    return look_at(word(region, ABORT)) != 0


@triton.jit
def is_stopped(link):
    """Whether this rank is to give up, because another has or because its host says so."""
    return is_aborted(link.region) | (look_at(word(link.status, STOP)) != 0)


@triton.jit
def begin(bases, rank, world, slots, row_bytes, parity_bytes, patience):
    """The link of this program in its next epoch. The arguments are those of the kernel."""
    channel = tl.program_id(0)
    region, following = tl.load(bases + rank), tl.load(bases + (rank + 1) % world)
    status = tl.load(bases + world)
    epoch = tl.load(word(region, EPOCHS + channel)) + 1
    tl.store(notice(status, channel, BEGUN), epoch)
    return Link(
        bases=bases,
        rank=rank,
        world=world,
        region=region,
        previous=(rank + world - 1) % world,
        following=following,
        status=status,
        slots=slots + (epoch & 1) * tl.cast(parity_bytes, tl.int64),
        row_bytes=tl.cast(row_bytes, tl.int64),
        epoch=epoch,
        channel=channel,
        patience=tl.cast(patience, tl.int64),
    )


@triton.jit
def end(link):
    """The launch has done its work: count it."""
    tl.store(word(link.region, EPOCHS + link.channel), link.epoch)
    tl.store(notice(link.status, link.channel, ENDED), link.epoch)


@triton.jit
def report(link, awaited, step, chunk, PLATFORM: tl.constexpr):
    """Leave word of a wait that failed: for which rank, at which step, for which chunk. The first report stays."""
    failed = notice(link.status, link.channel, FAILED)
    if look_at(failed) == 0:
        tl.store(failed + 1, awaited)
        tl.store(failed + 2, step)
        tl.store(failed + 3, chunk)
        tl.store(failed + 4, link.epoch)
        post(failed, tl.where(is_stopped(link), ABORTED, TIMED_OUT), PLATFORM)


@triton.jit
def abort_all(link, PLATFORM: tl.constexpr):
    """Raise the abort word of every rank, this one included. A launch that never waited says just that it left."""
    failed = notice(link.status, link.channel, FAILED)
    if look_at(failed) == 0:
        tl.store(failed + 1, -1)
        post(failed, tl.full((), ABORTED, tl.int32), PLATFORM)
    for other in range(link.world):
        # Several ranks may raise one word, but always to the same value, so a store does.
        post(word(tl.load(link.bases + other), ABORT), tl.full((), 1, tl.int32), PLATFORM)


@triton.jit
def wait_in_vain(region: tl.int64, status: tl.int64, looks: tl.int64):
    """To see how long a look takes under the interpreter. region, status: addresses of zeroed memory."""
    link = Link(
        bases=0,
        rank=0,
        world=1,
        region=tl.cast(region, tl.int64),
        previous=0,
        following=0,
        status=tl.cast(status, tl.int64),
        slots=0,
        row_bytes=0,
        epoch=1,
        channel=0,
        patience=tl.cast(looks, tl.int64),
    )
    wait_for(signal_word(link.region, 0, 0), link, 0, 0, 0, INTERPRETER)
