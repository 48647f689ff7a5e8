"""The numbers that the host engine's compiled code and its callers share: what lies where, in 64-bit words or bytes.

The control file of a group has one *block* per rank, which that rank alone writes:

    byte 0            STATE              PULSE      HEADERS           SIGNALS
    +----------------+------------------+----------+-----------------+---------------------------------+
    | (rank 0: alarm)| code, culprit,   | grows    | two headers,    | one line for each channel:      |
    |                | epoch            | with work| by epoch parity | signal, flag of those who sleep |
    +----------------+------------------+----------+-----------------+---------------------------------+

A *signal* is epoch << POINT_BITS | point: how many launches this channel has begun, and how far it is in the last one.
ALARM is not 0 once any rank has reported a failure.

A *header* is what a rank shows before each launch. Its first AGREED_WORDS words must be the same on all ranks. Then
come the *place* of its tensor (ARENA, OFFSET; an arena of -1 means a staging slot), whether the values that it
contributes lie in that place (RAW), and whether it has flags to tell (MORE).

A *job* is the record with which compiled code is called, private to its rank and channel. A call that has waited for
SLICE comes back and is made again with the same job: POSITION says where to go on.

Nothing here needs numba or torch.
"""

# A control block, in bytes. Words that different ranks poll or write lie in different cache lines.
LINE = 64
ALARM = 0
STATE = 64
PULSE = 128
HEADERS = 192
HEADER_BYTES = 128
SIGNALS = HEADERS + 2 * HEADER_BYTES
SLEEPERS = 8
"""From the signal of a channel to the flag of those who sleep until it moves, a 32-bit word."""

MOST_HOST_CHANNELS = 16
BLOCK_BYTES = SIGNALS + MOST_HOST_CHANNELS * LINE

POINT_BITS = 32
DONE = (1 << POINT_BITS) - 1
"""The last point of every epoch."""

# A header, in words.
AGREED_WORDS = 12
ARENA = 12
OFFSET = 13
RAW = 14
MORE = 15

# A job, in words. What it is about:
CONTROL = 0  # address of the control file
RANK = 1
WORLD = 2
EPOCH = 3
CHANNEL = 4
CHANNELS = 5
KIND = 6
ALGORITHM = 7
ELEMENTS = 8
FACTOR = 9  # the bits of a float64
# Where its bytes lie:
TENSOR = 10  # address of this rank's tensor
RUNS = 11  # address of rows (first element, end, address): what is read elsewhere than in the tensor
RUN_COUNT = 12
ARENAS = 13  # address of rows (number, address of rank 0's region, bytes from rank to rank)
ARENA_COUNT = 14
SLOTS = 15  # address of rank 0's staging slots
SLOT_STRIDE = 16  # bytes from rank to rank
SCRATCH = 17  # address of SCRATCH_BYTES
ELEMENT_BYTES = 18  # of the tensor,
WIRE_BYTES = 19  # on the wire,
TOTAL_BYTES = 20  # and in the accumulate dtype
LOSSLESS = 21  # whether the wire is the tensor's dtype
# How it waits:
SPINS = 22  # looks at a signal before the first sleep
SLICE = 23  # two words: seconds and nanoseconds of the longest sleep
# What becomes of it:
POSITION = 25
AWAITED = 26  # the rank that was waited for, when it came back
AWAITED_VALUE = 27  # and the signal
STARTED = 28  # nanoseconds of CLOCK_MONOTONIC, when all ranks had come
SOMEBODY_HAS_MORE = 29
CLOCK = 30  # two words of scratch for system calls
FIRST_VERB = 32  # the addresses of VERBS, in their order
PLACES = 48  # for each rank, then RAWS = PLACES + world: whether its contributions lie raw in its place
JOB_WORDS_WITHOUT_RANKS = PLACES


def job_words(world: int) -> int:
    """The size of a job."""
    return JOB_WORDS_WITHOUT_RANKS + 2 * world


(
    SCALE_TO_WIRE,
    SCALE_ROUNDED,
    ADD_SCALED_ROUNDED,
    ADD_SCALED,
    WIDEN,
    ADD_WIRE,
    NARROW,
    FINISH,
    SUM_OF_TWO,
) = range(9)

VERBS = (
    "scale_to_wire",
    "scale_rounded",
    "add_scaled_rounded",
    "add_scaled",
    "widen",
    "add_wire",
    "narrow",
    "finish",
    "sum_of_two",
)
"""The arithmetic of one dtype and wire: see host_arithmetic.py."""

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = range(3)
RING, TWO_SHOT, ONE_SHOT, MASTER = range(4)

NOT_BEGUN, MEETING = -2, -1
"""The first positions of a job; then its algorithm counts its own from 0."""

# Why a call came back.
ENDED = 0
WAITING = 1
MISMATCH = 2
ALARMED = 3

ALIGNMENT = 16
"""Parts are multiples of this many elements."""

BLOCK_ELEMENTS = 2048
"""What is summed at a time, in scratch that stays in the first-level cache."""

SCRATCH_BYTES = 2 * 8 * BLOCK_ELEMENTS

CHUNK_ELEMENTS = 16384
"""What the ring moves and signals as a unit."""

SLOT_BYTES = 1 << 20
"""A staging slot; there are two per rank."""

WINDOW_BYTES = 512 << 10
"""Of a tensor that is not read in place, at each rank, what is under way at a time: it stays in the caches."""
