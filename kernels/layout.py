"""The numbers that kernels and hosts share, stated once: what lies where in a region, on a status page, in a table.

A *region* is what one rank lends its peers: 32-bit words, then slots for data, a set of them for each parity of epochs.

    word 0   16              256                           byte slots_byte(W)
    +-------+---------------+-----------------------------+---------------------+---------------------+
    | abort | epochs,       | signals,                    | slots, even epochs, | slots, odd epochs,  |
    |       | one a channel | 4W rows of SIGNAL_ROW words | parity_bytes        | parity_bytes        |
    +-------+---------------+-----------------------------+---------------------+---------------------+

Each launch cuts its set of slots into as many rows as it needs. What lands in a row is signalled in a row of signals,
each chunk by a word of its own:

    algorithm   row of slots   row of signals   what lands there
    ring        t              t                what rank r-1 sent in step t, t = 0 .. 2(W-1)-1
    direct      r              2W + r           contributions of rank r
                W + r          3W + r           sums from rank r

So each signal is written by one rank only, whichever algorithms follow each other.

A *status page* is host memory on which the kernels of one rank leave word for the hosts of all ranks, and its host for
its kernels.

    word 0   16                    32
    +------+---------------------+---------------------+----
    | stop | notice of channel 0 | notice of channel 1 | ...
    +------+---------------------+---------------------+----

A *notice* has NOTICE_WORDS words: what a wait that failed was for, what one that lasts is for, and the epochs of the
last launch that began and of the last that ended.

    word 0                                   5                            8       9
    +------+---------+------+-------+-------+-------------+------+-------+-------+-------+
    | code | awaited | step | chunk | epoch | awaited + 1 | step | chunk | epoch | epoch |
    +------+---------+------+-------+-------+-------------+------+-------+-------+-------+
     FAILED                                  WAITING                      BEGUN   ENDED

Nothing here needs triton or torch. Kernels take these numbers by way of signals.py, which wraps them.
"""

# A region, in words.
ABORT = 0
EPOCHS = 16
SIGNALS = 256
SIGNAL_ROW = 1024

# The rows of direct algorithms, in multiples of W: rank r has slots in rows CONTRIBUTIONS*W + r and SUMS*W + r, and to
# row k of slots belongs row DIRECT_SIGNALS*W + k of signals, behind those of the ring. In all there are SIGNAL_ROWS*W.
CONTRIBUTIONS = 0
SUMS = 1
DIRECT_SIGNALS = 2
SIGNAL_ROWS = 4

MOST_CHANNELS = 128
"""Programs of a launch, at the most: their epochs lie before the signals."""

# A status page, in words.
STOP = 0
NOTICES = 16
NOTICE_WORDS = 16
STATUS_BYTES = 4 * (NOTICES + NOTICE_WORDS * MOST_CHANNELS)

# A notice, in words.
FAILED = 0
WAITING = 5
BEGUN = 8
ENDED = 9

# Why a kernel gave up: the code of a notice.
TIMED_OUT = 1
ABORTED = 2

# What a kernel runs on.
INTERPRETER = 0
NVIDIA = 1
AMD = 2

PROMPT = 256
"""Looks of a wait before it turns to the status page. At a microsecond each, more than a chunk on the slowest link."""

TILE_COLUMNS = 4
"""Numbers in a row of a table of tiles (see tables.py)."""


def slots_byte(world: int) -> int:
    """The byte of a region at which its slots begin."""
    return 4 * (SIGNALS + SIGNAL_ROWS * world * SIGNAL_ROW)


def region_bytes(world: int, parity_bytes: int) -> int:
    """The size of a region. It must be zeroed before its first launch."""
    return slots_byte(world) + 2 * parity_bytes


def row_bytes(parity_bytes: int, rows: int) -> int:
    """The size of one of `rows` rows of slots."""
    return parity_bytes // rows // 256 * 256


def ring_rows(world: int) -> int:
    """Rows of slots that a launch of the ring needs: one for each step."""
    return max(1, 2 * (world - 1))


def direct_rows(algorithm: str, world: int) -> int:
    """Rows of slots that a direct algorithm needs: one for each rank's contributions, and those for the sums."""
    return world + {"two_shot": world, "one_shot": 0, "master": 1}[algorithm]
