"""The direct algorithms: every contribution goes straight to where it is summed. One kernel, and how it is prepared.

    two_shot   segment s is summed at rank s, and rank s hands its sum to all
    one_shot   every segment is summed at every rank; nothing is handed out
    master     every segment is summed at rank 0, which hands the sums out

In each channel, chunk by chunk:

    send       scale and narrow the own contribution, store it at whoever sums it
    sum        wait for all contributions, add them in rank order, narrow, keep, and store at whoever is to have it
    receive    wait for the sums of others, and keep them

Row r of a rank's slots and signals is for the contributions of rank r, row W + r for the sums from rank r. A row holds
one segment (two_shot) or the whole bucket (the others); `origins` says which element lies first in it. Alone of these
algorithms one_shot has no receive: a rank that has summed may be in the next epoch while its neighbour still reads,
which is why slots have two parities.

Example, two_shot on 3 ranks, rank 1: sends b3 to rank 2 and b1 to rank 0; waits for a2 and c2, keeps the sum of a2, b2
and c2, and stores it at ranks 0 and 2; waits for the sums of segments 3 and 1.
"""

from typing import Unpack

import triton
import triton.language as tl

from fusedring.kernels.cast import narrow, widen
from fusedring.kernels.region import How, Prepared, Region, Totals
from fusedring.kernels.signals import abort_all, begin, end, is_aborted, post, signal, wait_for
from fusedring.kernels.tiles import Table, keep, nothing, own, poison, put, read_tile, slot, take, tell


@triton.jit
def _hand_to(bits, to, until, row, at, link, span, FULL: tl.constexpr, FORM: tl.constexpr):
    """Store a tile in the row at byte `row` of the regions of ranks `to` .. `until` - 1, but for this rank."""
    bases, mine, board, rank, world, slots, pitch, epoch, channel, patience = link
    for receiver in range(to, until):
        if receiver != rank:
            put(slot(tl.load(bases + receiver) + row, at, FORM[0]), bits, span, FULL, FORM[2])


@triton.jit
def _post_to(to, until, row, index, link, FORM: tl.constexpr):
    bases, mine, board, rank, world, slots, pitch, epoch, channel, patience = link
    for receiver in range(to, until):
        if receiver != rank:
            post(signal(tl.load(bases + receiver), row, index), epoch, FORM[4])


@triton.jit
def _send_tile(tile, origin, bucket, link, to, until, FULL: tl.constexpr, FORM: tl.constexpr):
    source, start, valid, span = tile
    tiles, chunk_tiles, origins, output, chunks, scale = bucket
    bases, mine, board, rank, world, slots, pitch, epoch, channel, patience = link
    bits = narrow(own(source, valid, scale, output.dtype.element_ty, FORM[1], FULL, FORM[2]), FORM[0])
    _hand_to(bits, to, until, slots + rank * pitch, start - origin, link, span, FULL, FORM)


@triton.jit
def _sum_tile(tile, origin, bucket, link, first, last, to, until, FULL: tl.constexpr, FORM: tl.constexpr):
    """Returns sum of squares and non-finite flag, (LANES,)."""
    BLOCK: tl.constexpr = FORM[2]
    source, start, valid, span = tile
    tiles, chunk_tiles, origins, output, chunks, scale = bucket
    bases, mine, board, rank, world, slots, pitch, epoch, channel, patience = link
    at = start - origin
    mine_narrow = narrow(own(source, valid, scale, output.dtype.element_ty, FORM[1], FULL, FORM[2]), FORM[0])
    total = tl.zeros((BLOCK,), FORM[1])
    for sender in range(first, last):
        if sender == rank:
            term = widen(mine_narrow, FORM[1])
        else:
            term = widen(take(slot(mine + slots + sender * pitch, at, FORM[0]), span, FULL, FORM[2]), FORM[1])
        total = tl.where(sender == first, term, total + term)  # not 0 + term, which would lose the sign of -0
    bits = narrow(total, FORM[0])
    _hand_to(bits, to, until, slots + (world + rank) * pitch, at, link, span, FULL, FORM)
    return keep(output, start, bits, span, FORM[1], FULL, FORM[2])


@triton.jit
def _receive_tile(tile, origin, bucket, link, reducer, FULL: tl.constexpr, FORM: tl.constexpr):
    source, start, valid, span = tile
    tiles, chunk_tiles, origins, output, chunks, scale = bucket
    bases, mine, board, rank, world, slots, pitch, epoch, channel, patience = link
    arrivals = slot(mine + slots + (world + reducer) * pitch, start - origin, FORM[0])
    bits = take(arrivals, span, FULL, FORM[2])
    keep(output, start, bits, span, FORM[1], FULL, FORM[2])


@triton.jit
def _send(ok, bucket, link, segment, to, until, FORM: tl.constexpr):
    tiles, chunk_tiles, origins, output, chunks, scale = bucket
    bases, mine, board, rank, world, slots, pitch, epoch, channel, patience = link
    origin = tl.load(origins + segment)
    for chunk in range(channel, chunks, FORM[3]):
        index = segment * chunks + chunk
        if ok:
            here = chunk_tiles + 2 * index
            for number in tl.range(tl.load(here), tl.load(here + 1), num_stages=FORM[5]):
                _send_tile(read_tile(tiles, number), origin, bucket, link, to, until, True, FORM)
            for number in range(tl.load(here + 1), tl.load(here + 2)):
                _send_tile(read_tile(tiles, number), origin, bucket, link, to, until, False, FORM)
            _post_to(to, until, 2 * world + rank, index, link, FORM)
    return ok


@triton.jit
def _sum(ok, bucket, link, segment, first, last, to, until, FORM: tl.constexpr):
    tiles, chunk_tiles, origins, output, chunks, scale = bucket
    bases, mine, board, rank, world, slots, pitch, epoch, channel, patience = link
    origin = tl.load(origins + segment)
    squares, unbounded = nothing()
    for chunk in range(channel, chunks, FORM[3]):
        index = segment * chunks + chunk
        for sender in range(first, last):
            if ok & (sender != rank):
                arrived = signal(mine, 2 * world + sender, index)
                ok = wait_for(arrived, epoch, mine, board, channel, sender, 1, index, patience, FORM[4])
        if ok:
            here = chunk_tiles + 2 * index
            for number in range(tl.load(here), tl.load(here + 1)):
                s, u = _sum_tile(read_tile(tiles, number), origin, bucket, link, first, last, to, until, True, FORM)
                squares += s
                unbounded |= u
            for number in range(tl.load(here + 1), tl.load(here + 2)):
                s, u = _sum_tile(read_tile(tiles, number), origin, bucket, link, first, last, to, until, False, FORM)
                squares += s
                unbounded |= u
            _post_to(to, until, 3 * world + rank, index, link, FORM)
    return ok, squares, unbounded


@triton.jit
def _receive(ok, bucket, link, segment, reducer, FORM: tl.constexpr):
    tiles, chunk_tiles, origins, output, chunks, scale = bucket
    bases, mine, board, rank, world, slots, pitch, epoch, channel, patience = link
    origin = tl.load(origins + segment)
    for chunk in range(channel, chunks, FORM[3]):
        index = segment * chunks + chunk
        if ok:
            arrived = signal(mine, 3 * world + reducer, index)
            ok = wait_for(arrived, epoch, mine, board, channel, reducer, 2, index, patience, FORM[4])
        if ok:
            here = chunk_tiles + 2 * index
            for number in tl.range(tl.load(here), tl.load(here + 1), num_stages=FORM[5]):
                _receive_tile(read_tile(tiles, number), origin, bucket, link, reducer, True, FORM)
            for number in range(tl.load(here + 1), tl.load(here + 2)):
                _receive_tile(read_tile(tiles, number), origin, bucket, link, reducer, False, FORM)
    return ok


@triton.jit(do_not_specialize=["rank", "world", "chunks", "patience", "scale_bits"])
def direct(
    tiles,
    chunk_tiles,
    origins,
    output,
    bases,
    squares,
    unbounded,
    chunks,
    row_bytes: tl.int64,
    slots: tl.int64,
    parity_bytes: tl.int64,
    rank,
    world,
    patience: tl.int64,
    scale_bits: tl.int64,
    SCATTER: tl.constexpr,
    GATHER: tl.constexpr,
    EVERYONE_SUMS: tl.constexpr,
    ONE_SUMS: tl.constexpr,
    FORM: tl.constexpr,
):
    """Reduce-scatter (SCATTER), all-gather (GATHER) or both, over the tiles of a bucket.

    EVERYONE_SUMS is one_shot (with both), ONE_SUMS is master, neither is two_shot. The rest as for `ring` in ring.py.
    """
    channel = tl.program_id(0)
    scale = tl.cast(scale_bits, tl.int64).to(tl.float64, bitcast=True).to(FORM[1])
    mine = tl.load(bases + rank)
    board = tl.load(bases + world)
    epoch = begin(mine, board, channel)
    here = slots + (epoch & 1) * tl.cast(parity_bytes, tl.int64)
    bucket = (tiles, chunk_tiles, origins, output, chunks, scale)
    pitch, patience = tl.cast(row_bytes, tl.int64), tl.cast(patience, tl.int64)
    link = (bases, mine, board, rank, world, here, pitch, epoch, channel, patience)
    ok = is_aborted(mine) == 0
    s, u = nothing()
    for hop in range(1, world + 1):
        segment = (rank + hop) % world
        reducer = 0 if ONE_SUMS else segment
        if EVERYONE_SUMS:
            ok = _send(ok, bucket, link, segment, 0, world, FORM)
        elif SCATTER:
            if reducer != rank:
                ok = _send(ok, bucket, link, segment, reducer, reducer + 1, FORM)
        elif (segment == rank) & (reducer != rank):
            ok = _send(ok, bucket, link, segment, reducer, reducer + 1, FORM)
    for segment in range(world):
        reducer = 0 if ONE_SUMS else segment
        first = 0 if SCATTER else segment
        last = world if SCATTER else segment + 1
        if EVERYONE_SUMS:
            ok, more, not_finite = _sum(ok, bucket, link, segment, first, last, 0, 0, FORM)
            if segment == rank:
                s += more
                u |= not_finite
        elif reducer == rank:
            if GATHER:
                ok, more, not_finite = _sum(ok, bucket, link, segment, first, last, 0, world, FORM)
            else:
                ok, more, not_finite = _sum(ok, bucket, link, segment, first, last, segment, segment + 1, FORM)
            s += more
            u |= not_finite
    if not EVERYONE_SUMS:
        for hop in range(1, world + 1):
            segment = (rank + hop) % world
            reducer = 0 if ONE_SUMS else segment
            if reducer != rank:
                if GATHER or segment == rank:
                    ok = _receive(ok, bucket, link, segment, reducer, FORM)
    if ok:
        tell(s, u, squares + channel, unbounded + channel)
        end(mine, board, channel, epoch)
    else:
        poison(tiles, chunk_tiles, output, world, channel, chunks, FORM[3], FORM[2])
        abort_all(bases, world, board, channel, FORM[4])


def two_shot(
    table: Table,
    region: Region,
    totals: Totals,
    *,
    scatter: bool = True,
    gather: bool = True,
    **how: Unpack[How],
) -> Prepared:
    """Sum each segment at its owner, and hand it to all; or (scatter, gather) one half of that."""
    return _prepare(table, region, totals, "two_shot", scatter, gather, **how)


def one_shot(table: Table, region: Region, totals: Totals, **how: Unpack[How]) -> Prepared:
    """Send everything to everyone; everyone sums."""
    return _prepare(table, region, totals, "one_shot", True, True, **how)


def master(
    table: Table,
    region: Region,
    totals: Totals,
    *,
    scatter: bool = True,
    gather: bool = True,
    **how: Unpack[How],
) -> Prepared:
    """Sum everything at rank 0, and hand it out; or (scatter, gather) one half of that."""
    return _prepare(table, region, totals, "master", scatter, gather, **how)


def _prepare(
    table: Table,
    region: Region,
    totals: Totals,
    algorithm: str,
    scatter: bool,
    gather: bool,
    **how: Unpack[How],
) -> Prepared:
    flags = {
        "SCATTER": scatter,
        "GATHER": gather,
        "EVERYONE_SUMS": algorithm == "one_shot",
        "ONE_SUMS": algorithm == "master",
    }
    return Prepared(direct, table, region, totals, rows=direct_rows(algorithm, region.world), flags=flags, **how)


def direct_rows(algorithm: str, world: int) -> int:
    """Rows of slots that a launch needs: one for each rank's contributions, and those for the sums."""
    return world + {"two_shot": world, "one_shot": 0, "master": 1}[algorithm]
