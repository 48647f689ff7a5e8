"""two_shot, master and one_shot on host memory: compiled code.

two_shot and master. The rank that sums a part reads all contributions to it, raw or from their places, in rank order,
and writes the result into every place. Nobody else touches that part. Windows overlap: while one is summed the next is
being staged, and two slots suffice, since a slot's results are copied out before it is staged again.

one_shot. Contributions always go through slots, which alternate by epoch, and each rank writes only its own tensor:
meeting is all the synchronisation it needs. Every window is an epoch.

Bytes that cross the memory bus at each rank for each element of b bytes, when nothing fits into the caches: where all
are raw, two_shot reads b and writes b, as a copy does. With gradients elsewhere it reads them, b, and a line of the
bucket is fetched before it is written, 2b; what is staged is summed while it is still in the caches.
"""

from fusedring.kernels.host_layout import (
    ADD_SCALED_ROUNDED,
    ADD_WIRE,
    ALARMED,
    ALIGNMENT,
    ALL_GATHER,
    BLOCK_ELEMENTS,
    CHANNEL,
    CHANNELS,
    DONE,
    ELEMENT_BYTES,
    ELEMENTS,
    ENDED,
    EPOCH,
    FINISH,
    KIND,
    LOSSLESS,
    PLACES,
    POSITION,
    RANK,
    REDUCE_SCATTER,
    SCALE_ROUNDED,
    SCALE_TO_WIRE,
    SCRATCH,
    SLOT_BYTES,
    SUM_OF_TWO,
    TENSOR,
    TOTAL_BYTES,
    WAITING,
    WIDEN,
    WINDOW_BYTES,
    WIRE_BYTES,
    WORLD,
)
from fusedring.kernels.host_memory import compiled, get, is_alarmed, memcpy, post, put, show_progress, wait
from fusedring.kernels.host_places import (
    all_are_raw,
    apply,
    apply_to_own,
    copy,
    copy_own,
    cut,
    is_raw,
    longest_share,
    piece_elements,
    place_in_slot,
    place_of,
    share_of,
    slot_of,
    source_of,
    uses_slot,
    who_sums,
)


@compiled
def stage(job, window, piece, in_slot):
    """Write what others take of this rank's contributions in a window into its place."""
    rank, wire_bytes, scratch = get(job, RANK), get(job, WIRE_BYTES), get(job, SCRATCH)
    for part in range(get(job, WORLD)):
        if who_sums(job, part) == rank or (get(job, KIND) == ALL_GATHER and part != rank):
            continue
        start, stop = share_of(job, part)
        first = start + window * piece
        count = min(piece, stop - first)
        if in_slot:
            target = place_in_slot(job, rank, part, window, piece)
        else:
            target = get(job, PLACES + rank) + first * get(job, ELEMENT_BYTES)
        done = 0
        while done < count:
            # What is narrowed lies close together within its block: the block's sum will take its place, and no more.
            some, at = min(BLOCK_ELEMENTS, count - done), target + done * get(job, ELEMENT_BYTES)
            if in_slot:
                apply_to_own(job, SCALE_TO_WIRE, at, wire_bytes, first + done, some)
            else:  # it may lie where it is to go
                apply_to_own(job, SCALE_TO_WIRE, scratch, wire_bytes, first + done, some)
                memcpy(at, scratch, some * wire_bytes)
            done += some


@compiled
def stage_first_window(job):
    """Before the meeting: what goes to this rank's own slot may be written already."""
    stage(job, 0, piece_elements(job, WINDOW_BYTES), True)


@compiled
def _sum_block(job, part, at, window, piece, count):
    """The sum of `count` elements of a share, as final elements: an address in scratch."""
    world, rank = get(job, WORLD), get(job, RANK)
    total, result = get(job, SCRATCH), get(job, SCRATCH) + 8 * BLOCK_ELEMENTS
    if world == 2 and is_raw(job, 0) and is_raw(job, 1):
        a, b = place_of(job, 0, part, at, window, piece), place_of(job, 1, part, at, window, piece)
        apply(job, SUM_OF_TWO, result, a, b, count)
        return result
    for other in range(world):
        scale = SCALE_ROUNDED if other == 0 else ADD_SCALED_ROUNDED
        if other == rank:
            apply_to_own(job, scale, total, get(job, TOTAL_BYTES), share_of(job, part)[0] + at, count)
        elif is_raw(job, other):
            apply(job, scale, total, place_of(job, other, part, at, window, piece), 0, count)
        else:
            x = place_of(job, other, part, at, window, piece)
            apply(job, WIDEN if other == 0 else ADD_WIRE, total, x, 0, count)
    apply(job, FINISH, result, total, 0, count)
    return result


@compiled
def contribution(job, part, at, window, piece, count):
    """What rank `part` contributes to an all-gather, as final elements: an address."""
    total, result, element = get(job, SCRATCH), get(job, SCRATCH) + 8 * BLOCK_ELEMENTS, share_of(job, part)[0] + at
    if part == get(job, RANK):
        if get(job, LOSSLESS) != 0:
            x, some = source_of(job, element, count)
            if some == count:
                return x
            copy_own(job, result, element, count)
            return result
        apply_to_own(job, SCALE_ROUNDED, total, get(job, TOTAL_BYTES), element, count)
    elif is_raw(job, part):
        x = place_of(job, part, part, at, window, piece)
        if get(job, LOSSLESS) != 0:
            return x
        apply(job, SCALE_ROUNDED, total, x, 0, count)
    else:
        x = place_of(job, part, part, at, window, piece)
        if get(job, LOSSLESS) != 0:
            return x
        apply(job, WIDEN, total, x, 0, count)
    apply(job, FINISH, result, total, 0, count)
    return result


@compiled
def _sum_window(job, window, piece):
    """Sum the parts that are summed here, in a window, and give everybody who is to have it the result."""
    world, rank, kind, size = get(job, WORLD), get(job, RANK), get(job, KIND), get(job, ELEMENT_BYTES)
    for part in range(world):
        if who_sums(job, part) != rank:
            continue
        start, stop = share_of(job, part)
        at, end = window * piece, min(stop - start, (window + 1) * piece)
        while at < end:
            count = min(BLOCK_ELEMENTS, end - at)
            if kind == ALL_GATHER:
                result = contribution(job, part, at, window, piece, count)
            else:
                result = _sum_block(job, part, at, window, piece, count)
            for other in range(world):
                if kind == REDUCE_SCATTER and other != part:
                    continue
                if other == rank:
                    target = get(job, TENSOR) + (start + at) * size
                else:
                    target = place_of(job, other, part, at, window, piece)
                copy(target, result, count * size)
            at += count
            show_progress(job)


@compiled
def _copy_out(job, window, piece):
    """Bring the results of a window that others have left in this rank's slot to its tensor."""
    rank, size = get(job, RANK), get(job, ELEMENT_BYTES)
    for part in range(get(job, WORLD)):
        if who_sums(job, part) == rank or (get(job, KIND) == REDUCE_SCATTER and part != rank):
            continue
        start, stop = share_of(job, part)
        count = min(piece, stop - start - window * piece)
        if count > 0:
            target = get(job, TENSOR) + (start + window * piece) * size
            memcpy(target, place_in_slot(job, rank, part, window, piece), count * size)


@compiled
def run_direct(job):
    """two_shot and master, from the meeting on.

    Points of window k: 2k + 1, its contributions are in their places; 2k + 4, it is summed. Positions are 3k and a
    phase: what is two windows back is copied out, this one is staged, the one before is summed.
    """
    world, rank = get(job, WORLD), get(job, RANK)
    raw, in_slot = is_raw(job, rank), uses_slot(job, rank)
    windows, piece = 1, longest_share(job)
    if not all_are_raw(job):
        piece = piece_elements(job, WINDOW_BYTES)
        windows = max(1, (longest_share(job) + piece - 1) // piece)
    while get(job, POSITION) < 3 * (windows + 1):
        k, phase = get(job, POSITION) // 3, get(job, POSITION) % 3
        if is_alarmed(job):
            return ALARMED
        if phase == 0 and in_slot and k >= 2:
            for other in range(world):
                if not wait(job, other, 2 * k):
                    return WAITING
            _copy_out(job, k - 2, piece)
        elif phase == 1 and k < windows and not raw and not (in_slot and k == 0):
            stage(job, k, piece, in_slot)
            post(job, 2 * k + 1)
        elif phase == 2 and k >= 1:
            for other in range(world):
                if not is_raw(job, other) and not wait(job, other, 2 * k - 1):
                    return WAITING
            _sum_window(job, k - 1, piece)
            post(job, 2 * k + 2 if k < windows else DONE)
        put(job, POSITION, get(job, POSITION) + 1)
    for other in range(world):
        if not wait(job, other, DONE):
            return WAITING
    if in_slot:
        _copy_out(job, windows - 1, piece)
    return ENDED


# one_shot


@compiled
def _exchange_elements(job):
    """Elements of a window, at most."""
    return SLOT_BYTES // (get(job, CHANNELS) * get(job, WIRE_BYTES)) // ALIGNMENT * ALIGNMENT


@compiled
def _exchange_range(job):
    """The elements [start, stop) that are this channel's."""
    channel, channels, elements = get(job, CHANNEL), get(job, CHANNELS), get(job, ELEMENTS)
    return cut(0, elements, channel, channels), cut(0, elements, channel + 1, channels)


@compiled
def _exchange_slot(job, rank):
    return slot_of(job, rank, 0) + get(job, CHANNEL) * _exchange_elements(job) * get(job, WIRE_BYTES)


@compiled
def stage_exchange(job, window):
    """Write this rank's contributions in a window into its slot."""
    start, stop = _exchange_range(job)
    first = start + window * _exchange_elements(job)
    count = min(_exchange_elements(job), stop - first)
    apply_to_own(job, SCALE_TO_WIRE, _exchange_slot(job, get(job, RANK)), get(job, WIRE_BYTES), first, count)


@compiled
def _sum_exchange(job, window):
    start, stop = _exchange_range(job)
    first = start + window * _exchange_elements(job)
    count, total, done = min(_exchange_elements(job), stop - first), get(job, SCRATCH), 0
    while done < count:
        some, offset = min(BLOCK_ELEMENTS, count - done), done * get(job, WIRE_BYTES)
        apply(job, WIDEN, total, _exchange_slot(job, 0) + offset, 0, some)
        for other in range(1, get(job, WORLD)):
            apply(job, ADD_WIRE, total, _exchange_slot(job, other) + offset, 0, some)
        apply(job, FINISH, get(job, TENSOR) + (first + done) * get(job, ELEMENT_BYTES), total, 0, some)
        done += some


@compiled
def run_exchange(job):
    """one_shot, from the meeting of its first window on. Positions are 2k and a phase: staging window k, summing it."""
    longest = (get(job, ELEMENTS) + ALIGNMENT - 1) // get(job, CHANNELS) + ALIGNMENT  # the same for all channels
    windows = (longest + _exchange_elements(job) - 1) // _exchange_elements(job)
    while get(job, POSITION) < 2 * windows:
        k, phase = get(job, POSITION) // 2, get(job, POSITION) % 2
        if is_alarmed(job):
            return ALARMED
        if phase == 0 and k > 0:
            put(job, EPOCH, get(job, EPOCH) + 1)
            stage_exchange(job, k)
            post(job, 0)
        elif phase == 1:
            for other in range(get(job, WORLD)):
                if not wait(job, other, 0):
                    return WAITING
            _sum_exchange(job, k)
            show_progress(job)
        put(job, POSITION, get(job, POSITION) + 1)
    return ENDED
