"""The ring on host memory: compiled code.

Rank r takes what rank r-1 has ready, adds its own contribution, and leaves the partial sum in its own place, narrowed
to the wire. So the ring needs no slots of its own: a contribution is used up by the hop that overwrites it, and a
partial sum is overwritten only by the finished part, which came round through its one reader. Rounds are the outer
loop and *chunks* the inner one: what a chunk waits for was posted a whole part ago.

Two slots suffice where places are slots. Rank r begins window k+2 after the last round of window k+1, whose chunks came
to it through all other ranks; so the next rank, the only one that reads here, is in k+1 and has done with k.

Bytes that cross the memory bus at each rank for each element of b bytes, when nothing fits into the caches: to add, the
raw ring reads b(W-1)/W from the previous rank and as much of its own, and writes as much; to hand out, it reads and
writes b(W-1)/W, and a line is fetched before it is written. With two ranks that is 3b, where two_shot has 2b.
"""

from fusedring.kernels.host_direct import contribution
from fusedring.kernels.host_layout import (
    ADD_SCALED,
    ALARMED,
    ALL_GATHER,
    ALL_REDUCE,
    BLOCK_ELEMENTS,
    CHUNK_ELEMENTS,
    DONE,
    ELEMENT_BYTES,
    ENDED,
    FINISH,
    KIND,
    LOSSLESS,
    NARROW,
    POSITION,
    RANK,
    SCALE_ROUNDED,
    SCALE_TO_WIRE,
    SCRATCH,
    SLOT_BYTES,
    TENSOR,
    TOTAL_BYTES,
    WAITING,
    WIDEN,
    WIRE_BYTES,
    WORLD,
)
from fusedring.kernels.host_memory import compiled, get, is_alarmed, memcpy, post, put, wait
from fusedring.kernels.host_places import (
    apply,
    apply_to_own,
    copy,
    is_raw,
    longest_share,
    piece_elements,
    place_of,
    share_of,
    some_use_slots,
    uses_slot,
)


@compiled
def _leave(job, result, part, at, window, piece, count, to_next):
    """Final elements go to the tensor and, if the next rank takes them from here, to the place."""
    rank, size = get(job, RANK), get(job, ELEMENT_BYTES)
    copy(get(job, TENSOR) + (share_of(job, part)[0] + at) * size, result, count * size)
    if to_next and uses_slot(job, rank):
        memcpy(place_of(job, rank, part, at, window, piece), result, count * size)


@compiled
def _send(job, part, at, window, piece, count):
    """Round 0: what this rank passes on first becomes ready in its place."""
    rank, wire_bytes, scratch, done = get(job, RANK), get(job, WIRE_BYTES), get(job, SCRATCH), 0
    while done < count:
        some = min(BLOCK_ELEMENTS, count - done)
        if get(job, KIND) == ALL_GATHER:
            result = contribution(job, part, at + done, window, piece, some)
            _leave(job, result, part, at + done, window, piece, some, True)
        elif not is_raw(job, rank):  # by way of scratch: it may lie where it is to go
            apply_to_own(job, SCALE_TO_WIRE, scratch, wire_bytes, share_of(job, part)[0] + at + done, some)
            target = place_of(job, rank, part, at, window, piece) + done * wire_bytes
            memcpy(target, scratch, some * wire_bytes)
        done += some


@compiled
def _receive_add(job, part, at, window, piece, count, takes_raw, completes):
    """Take a partial sum, add this rank's contribution, and pass it on, or keep it if that completes the sum.

    takes_raw: whether what is taken is the previous rank's raw contribution.
    """
    world, rank, done = get(job, WORLD), get(job, RANK), 0
    total, result = get(job, SCRATCH), get(job, SCRATCH) + 8 * BLOCK_ELEMENTS
    theirs = place_of(job, (rank + world - 1) % world, part, at, window, piece)
    mine = place_of(job, rank, part, at, window, piece)
    element = share_of(job, part)[0] + at
    while done < count:
        some = min(BLOCK_ELEMENTS, count - done)
        if takes_raw:
            apply(job, SCALE_ROUNDED, total, theirs + done * get(job, ELEMENT_BYTES), 0, some)
        else:
            apply(job, WIDEN, total, theirs + done * get(job, WIRE_BYTES), 0, some)
        apply_to_own(job, ADD_SCALED, total, get(job, TOTAL_BYTES), element + done, some)
        if completes:
            apply(job, FINISH, result, total, 0, some)
            _leave(job, result, part, at + done, window, piece, some, get(job, KIND) == ALL_REDUCE)
        else:
            apply(job, NARROW, mine + done * get(job, WIRE_BYTES), total, 0, some)
        done += some


@compiled
def _receive(job, part, at, window, piece, count, to_next):
    """Take finished elements, and pass them on."""
    world, rank = get(job, WORLD), get(job, RANK)
    result = place_of(job, (rank + world - 1) % world, part, at, window, piece)
    _leave(job, result, part, at, window, piece, count, to_next)


@compiled
def run_ring(job):
    """From the meeting on. Point p + 1: position p is through. Positions count chunks, then rounds, then windows.

    A window of an all-reduce has 2W - 1 rounds: round 0 is the first send, the next W - 1 add, the last W - 1 hand out.
    """
    world, rank, kind = get(job, WORLD), get(job, RANK), get(job, KIND)
    previous, following = (rank + world - 1) % world, (rank + 1) % world
    windows, piece = 1, max(1, longest_share(job))
    if some_use_slots(job):
        piece = piece_elements(job, SLOT_BYTES)
        windows = max(1, (longest_share(job) + piece - 1) // piece)
    chunks = max(1, (min(piece, longest_share(job)) + CHUNK_ELEMENTS - 1) // CHUNK_ELEMENTS)
    rounds = 2 * world - 1 if kind == ALL_REDUCE else world
    sums = 1 if kind == ALL_GATHER else world
    origin = rank if kind == ALL_GATHER else rank - 1
    while get(job, POSITION) < windows * rounds * chunks:
        p = get(job, POSITION)
        window, number, chunk = p // (rounds * chunks), p // chunks % rounds, p % chunks
        part = (origin - number + 2 * world) % world
        start, stop = share_of(job, part)
        at = window * piece + chunk * CHUNK_ELEMENTS
        count = min(min(CHUNK_ELEMENTS, (window + 1) * piece - at), stop - start - at)
        takes_raw = number == 1 and is_raw(job, previous) and (kind != ALL_GATHER or get(job, LOSSLESS) != 0)
        # Raw contributions are there since the meeting; but with several windows, slots are used again.
        follows = number > 0 and not (takes_raw and windows == 1)
        if follows and not wait(job, previous, p - chunks + 1):
            return WAITING
        if is_alarmed(job):
            return ALARMED
        if number == 0:
            _send(job, part, at, window, piece, count)
        elif number < sums:
            _receive_add(job, part, at, window, piece, count, takes_raw, number == sums - 1)
        elif count > 0:
            _receive(job, part, at, window, piece, count, number < rounds - 1)
        post(job, p + 1)
        put(job, POSITION, p + 1)
    if get(job, POSITION) == windows * rounds * chunks:
        post(job, DONE)
        put(job, POSITION, get(job, POSITION) + 1)
    # Only the next rank reads here, and nobody else writes.
    return ENDED if wait(job, following, DONE) else WAITING
