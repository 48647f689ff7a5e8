"""What lies where in a launch on host memory, and what each rank has to do with it: compiled code.

Terms
-----
part        1/W of the tensor; of it each channel has a *share*, and no channel waits for another
place       where the other ranks find a rank's contributions and leave its results: its tensor itself if that lies in
            the workspace, else a staging slot
raw         contributions that lie in their place as they are; otherwise this rank writes them there, scaled and
            narrowed: its gradients are read where autograd left them, and its own part never goes that way
window      the elements of every share that are under way at a time, so that what goes through a place stays in the
            caches; everything is one window if all ranks are raw
piece       what a window holds of one share
"""

from numba import types
from numba.extending import intrinsic

from fusedring.kernels.host_layout import (
    AGREED_WORDS,
    ALGORITHM,
    ALIGNMENT,
    ALL_GATHER,
    ARENA,
    ARENA_COUNT,
    ARENAS,
    CHANNEL,
    CHANNELS,
    ELEMENT_BYTES,
    ELEMENTS,
    EPOCH,
    FACTOR,
    FIRST_VERB,
    HEADER_BYTES,
    HEADERS,
    KIND,
    MASTER,
    MORE,
    OFFSET,
    PLACES,
    RANK,
    RAW,
    RUN_COUNT,
    RUNS,
    SLOT_BYTES,
    SLOT_STRIDE,
    SLOTS,
    SOMEBODY_HAS_MORE,
    TENSOR,
    WORLD,
)
from fusedring.kernels.host_memory import block_of, call, compiled, get, memcpy, put


@intrinsic
def _as_float64(typing, word):
    return types.float64(types.int64), lambda c, b, _, a: b.bitcast(a[0], c.get_value_type(types.float64))


# What is shown


@compiled
def header_of(job, rank):
    """The address of the header that `rank` shows in the job's epoch."""
    return block_of(job, rank) + HEADERS + get(job, EPOCH) % 2 * HEADER_BYTES


@compiled
def read_headers(job):
    """Note where the ranks' places are, and whether somebody has flags to tell. False if ranks launch other things."""
    world, more, mine = get(job, WORLD), 0, header_of(job, get(job, RANK))
    for rank in range(world):
        header = header_of(job, rank)
        for word in range(AGREED_WORDS):
            if get(header, word) != get(mine, word):
                return False
        place = 0
        for row in range(get(job, ARENA_COUNT)):
            arena = get(job, ARENAS) + 24 * row
            if get(arena, 0) == get(header, ARENA):
                place = get(arena, 1) + rank * get(arena, 2) + get(header, OFFSET)
        put(job, PLACES + rank, place)
        put(job, PLACES + world + rank, get(header, RAW))
        more |= get(header, MORE)
    put(job, SOMEBODY_HAS_MORE, more)
    return True


@compiled
def uses_slot(job, rank):
    """Whether the place of `rank` is a staging slot."""
    return get(job, PLACES + rank) == 0


@compiled
def is_raw(job, rank):
    """Whether the contributions of `rank` lie raw in its place."""
    return get(job, PLACES + get(job, WORLD) + rank) != 0


@compiled
def all_are_raw(job):
    """Whether all ranks' contributions are."""
    for rank in range(get(job, WORLD)):
        if not is_raw(job, rank):
            return False
    return True


@compiled
def some_use_slots(job):
    """Whether some rank's place is a slot."""
    for rank in range(get(job, WORLD)):
        if uses_slot(job, rank):
            return True
    return False


# Shares and pieces


@compiled
def cut(start, stop, number, pieces):
    """Where piece `number` of `pieces` of elements [start, stop) begins: in multiples of ALIGNMENT."""
    blocks = (stop - start + ALIGNMENT - 1) // ALIGNMENT
    return min(stop, start + ALIGNMENT * (number * blocks // pieces))


@compiled
def share_of(job, part):
    """The elements [start, stop) of a part that are this channel's."""
    world, channel, channels = get(job, WORLD), get(job, CHANNEL), get(job, CHANNELS)
    start, stop = cut(0, get(job, ELEMENTS), part, world), cut(0, get(job, ELEMENTS), part + 1, world)
    return cut(start, stop, channel, channels), cut(start, stop, channel + 1, channels)


@compiled
def longest_share(job):
    """Elements of this channel's longest share."""
    longest = 0
    for part in range(get(job, WORLD)):
        start, stop = share_of(job, part)
        longest = max(longest, stop - start)
    return longest


@compiled
def piece_elements(job, window_bytes):
    """Elements of a piece, where a window of all shares and channels has so many bytes."""
    pieces = get(job, WORLD) * get(job, CHANNELS)
    return max(ALIGNMENT, window_bytes // (pieces * get(job, ELEMENT_BYTES)) // ALIGNMENT * ALIGNMENT)


@compiled
def slot_of(job, rank, window):
    """The address of the staging slot that `rank` uses for a window."""
    return get(job, SLOTS) + rank * get(job, SLOT_STRIDE) + (get(job, EPOCH) + window) % 2 * SLOT_BYTES


@compiled
def place_in_slot(job, rank, part, window, piece):
    """Where the piece of a part begins in the slot of `rank`."""
    number = get(job, CHANNEL) * get(job, WORLD) + part
    return slot_of(job, rank, window) + number * piece * get(job, ELEMENT_BYTES)


@compiled
def place_of(job, rank, part, at, window, piece):
    """The address in the place of `rank` of element `at` of a share. piece: elements of a window."""
    if uses_slot(job, rank):
        return place_in_slot(job, rank, part, window, piece) + (at - window * piece) * get(job, ELEMENT_BYTES)
    return get(job, PLACES + rank) + (share_of(job, part)[0] + at) * get(job, ELEMENT_BYTES)


# Arithmetic on this rank's contributions and on those of others


@compiled
def factor_of(job):
    """What contributions are multiplied by."""
    return 1.0 if get(job, KIND) == ALL_GATHER else _as_float64(get(job, FACTOR))


@compiled
def apply(job, verb, target, a, b, count):
    """target = verb(a, b), for `count` elements; verb: its number in VERBS."""
    call(get(job, FIRST_VERB + verb), target, a, b, factor_of(job), count)


@compiled
def source_of(job, element, count):
    """Where this rank's contribution from `element` on lies: an address, and how many of `count` elements go on there.

    Runs are sorted and do not overlap; what is between them is in the tensor.
    """
    low, high, runs, size = 0, get(job, RUN_COUNT), get(job, RUNS), get(job, ELEMENT_BYTES)
    while low < high:
        middle = (low + high) // 2
        if get(runs, 3 * middle + 1) <= element:
            low = middle + 1
        else:
            high = middle
    in_tensor = get(job, TENSOR) + element * size
    if low == get(job, RUN_COUNT):
        return in_tensor, count
    start, stop = get(runs, 3 * low), get(runs, 3 * low + 1)
    if element < start:
        return in_tensor, min(count, start - element)
    return get(runs, 3 * low + 2) + (element - start) * size, min(count, stop - element)


@compiled
def apply_to_own(job, verb, target, target_bytes, element, count):
    """target = verb(this rank's contribution), for `count` elements; target_bytes: of each in `target`."""
    done = 0
    while done < count:
        x, some = source_of(job, element + done, count - done)
        apply(job, verb, target + done * target_bytes, x, 0, some)
        done += some


@compiled
def copy(target, source, nbytes):
    """Copy memory, unless it is there already."""
    if target != source:
        memcpy(target, source, nbytes)


@compiled
def copy_own(job, target, element, count):
    """target = this rank's contribution, as it is."""
    size, done = get(job, ELEMENT_BYTES), 0
    while done < count:
        x, some = source_of(job, element + done, count - done)
        copy(target + done * size, x, some * size)
        done += some


# Who does what


@compiled
def who_sums(job, part):
    """The rank that brings the contributions to a part together in a direct algorithm."""
    return 0 if get(job, ALGORITHM) == MASTER else part
