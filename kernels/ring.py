"""The ring: one persistent kernel for all its steps, and how it is prepared.

Rank r receives from r-1 and sends to r+1. Segment s starts its trip at rank s; with W ranks every segment makes W-1
hops of *reduce-scatter*, in which each rank adds its own part, and W-1 hops of *all-gather*, in which the finished
segment is passed on. In the words of NCCL, and in this order:

    send                     the own segment, scaled and narrowed
    receive, reduce, send    W-2 times: add the own part to what arrived, narrow, pass on
    receive, reduce, copy, send   the sum is complete: keep it, and pass on the very bits that are kept
    receive, copy, send      W-2 times: keep what arrived, pass it on unchanged
    receive, copy            the last segment

Row t of a rank's slots and signals belongs to step t: what rank r-1 sent in step t, t = 0 .. 2(W-1)-1. A slot is
written once in an epoch; two epochs later, in the same parity, its reader has long finished with it (see signals.py).

Shapes: a channel is one program; tiles are (BLOCK,). Steps are the outer loop, a step's chunks the inner one: what a
chunk waits for was sent a whole segment ago. Channel i handles chunks i, i + CHANNELS, ... of every segment, and waits
for channel i of rank r-1 only.

Example, 4 ranks, rank 1 (GPU2 in pictures): sends b2; receives a1, sends a1+b1; receives d4+a4, sends d4+a4+b4;
receives c3+d3+a3, completes segment 3, keeps and sends it; receives, keeps and sends 2, then 1, then receives and keeps
4. (Letters are contributions, digits segments, both counted from 1.)
"""

from typing import Unpack

import triton
import triton.language as tl

from fusedring.kernels.cast import narrow, widen
from fusedring.kernels.region import How, Prepared, Region, Totals
from fusedring.kernels.signals import abort_all, begin, end, is_aborted, post, signal, wait_for
from fusedring.kernels.tiles import Table, keep, nothing, own, poison, put, read_tile, slot, take, tell


@triton.jit(do_not_specialize=["rank", "world", "chunks", "patience", "scale_bits"])
def ring(
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
    FORM: tl.constexpr,
):
    """Reduce-scatter (SCATTER), all-gather (GATHER) or both, over the tiles of a bucket.

    tiles, chunk_tiles, origins: see tiles.py. output: where finished values go, of the bucket's dtype. bases: addresses
    of the regions and of the own board, int64 (W + 1,). squares: float32 (CHANNELS,), unbounded: int32 (CHANNELS,): of
    the values that this rank completed. row_bytes: distance between rows of slots; slots: where they begin in a region;
    parity_bytes: distance between the two sets. scale_bits: the bits of a float64. FORM: wire dtype, accumulate dtype,
    BLOCK, CHANNELS, PLATFORM (see signals.py) and STAGES (see tiles.py).
    """
    channel = tl.program_id(0)
    scale = tl.cast(scale_bits, tl.int64).to(tl.float64, bitcast=True).to(FORM[1])
    mine, theirs = tl.load(bases + rank), tl.load(bases + (rank + 1) % world)
    previous = (rank + world - 1) % world
    board = tl.load(bases + world)
    epoch = begin(mine, board, channel)
    here = slots + (epoch & 1) * tl.cast(parity_bytes, tl.int64)
    bucket = (tiles, chunk_tiles, origins, output, chunks, scale)
    pitch, patience = tl.cast(row_bytes, tl.int64), tl.cast(patience, tl.int64)
    link = (mine, board, theirs, previous, here, pitch, epoch, channel, patience)
    complete = (rank + 1) % world
    hops = world - 1
    ok = is_aborted(mine) == 0
    s, u = nothing()
    if world == 1:
        ok, s, u = _reduce_copy(ok, bucket, link, rank, FORM)
    else:
        if SCATTER:
            ok = _send(ok, bucket, link, rank, 0, FORM)
            for hop in range(1, hops):
                ok = _receive_reduce_send(ok, bucket, link, (rank + world - hop) % world, hop - 1, hop, FORM)
            ok, s, u = _receive_reduce_copy_send(ok, bucket, link, complete, hops - 1, hops, GATHER, FORM)
        else:
            ok = _copy_send(ok, bucket, link, complete, hops, FORM)
        if GATHER:
            for hop in range(1, hops):
                row = hops + hop
                ok = _receive_copy_send(ok, bucket, link, (complete + world - hop) % world, row - 1, row, FORM)
            ok = _receive_copy(ok, bucket, link, (rank + 2) % world, 2 * hops - 1, FORM)
    if ok:
        tell(s, u, squares + channel, unbounded + channel)
        end(mine, board, channel, epoch)
    else:
        poison(tiles, chunk_tiles, output, world, channel, chunks, FORM[3], FORM[2])
        abort_all(bases, world, board, channel, FORM[4])


def ring_all_reduce(table: Table, region: Region, totals: Totals, **how: Unpack[How]) -> Prepared:
    """Replace the output by the scaled sum over all ranks."""
    return _prepare(table, region, totals, True, True, **how)


def ring_reduce_scatter(table: Table, region: Region, totals: Totals, **how: Unpack[How]) -> Prepared:
    """Leave in the output only this rank's part of what `ring_all_reduce` leaves there."""
    return _prepare(table, region, totals, True, False, **how)


def ring_all_gather(table: Table, region: Region, totals: Totals, **how: Unpack[How]) -> Prepared:
    """Give every rank the parts of all, each rounded to the wire."""
    return _prepare(table, region, totals, False, True, **how)


def _prepare(table: Table, region: Region, totals: Totals, scatter: bool, gather: bool, **how: Unpack[How]) -> Prepared:
    flags = {"SCATTER": scatter, "GATHER": gather}
    return Prepared(ring, table, region, totals, rows=ring_rows(region.world), flags=flags, **how)


def ring_rows(world: int) -> int:
    """Rows of slots that a launch needs: one for each step."""
    return max(1, 2 * (world - 1))


# The verbs. Each is one step: the segment, the row that it arrives in, the row that it departs to.


@triton.jit
def _send(ok, bucket, link, segment, row_out, FORM: tl.constexpr):
    ok, _, _ = _step(ok, bucket, link, segment, 0, row_out, False, True, False, True, FORM)
    return ok


@triton.jit
def _receive_reduce_send(ok, bucket, link, segment, row_in, row_out, FORM: tl.constexpr):
    ok, _, _ = _step(ok, bucket, link, segment, row_in, row_out, True, True, False, True, FORM)
    return ok


@triton.jit
def _receive_reduce_copy_send(ok, bucket, link, segment, row_in, row_out, GATHER: tl.constexpr, FORM: tl.constexpr):
    return _step(ok, bucket, link, segment, row_in, row_out, True, True, True, GATHER, FORM)


@triton.jit
def _receive_copy_send(ok, bucket, link, segment, row_in, row_out, FORM: tl.constexpr):
    ok, _, _ = _step(ok, bucket, link, segment, row_in, row_out, True, False, True, True, FORM)
    return ok


@triton.jit
def _receive_copy(ok, bucket, link, segment, row_in, FORM: tl.constexpr):
    ok, _, _ = _step(ok, bucket, link, segment, row_in, 0, True, False, True, False, FORM)
    return ok


@triton.jit
def _copy_send(ok, bucket, link, segment, row_out, FORM: tl.constexpr):
    """How a lone all-gather begins: the owner keeps what the others will get."""
    ok, _, _ = _step(ok, bucket, link, segment, 0, row_out, False, True, True, True, FORM)
    return ok


@triton.jit
def _reduce_copy(ok, bucket, link, segment, FORM: tl.constexpr):
    """All that a lone rank does: scale and round."""
    return _step(ok, bucket, link, segment, 0, 0, False, True, True, False, FORM)


@triton.jit
def _step(
    ok,
    bucket,
    link,
    segment,
    row_in,
    row_out,
    RECEIVE: tl.constexpr,
    REDUCE: tl.constexpr,
    COPY: tl.constexpr,
    SEND: tl.constexpr,
    FORM: tl.constexpr,
):
    """One step of the ring in one channel: wait, pass, post, chunk by chunk. After a failed wait nothing more."""
    tiles, chunk_tiles, origins, output, chunks, scale = bucket
    mine, board, theirs, previous, slots, row_bytes, epoch, channel, patience = link
    squares, unbounded = nothing()
    arrivals = mine + slots + row_in * row_bytes
    departures = theirs + slots + row_out * row_bytes
    origin = tl.load(origins + segment)
    places = (origin, output, arrivals, departures, scale)
    for chunk in range(channel, chunks, FORM[3]):
        if RECEIVE:
            if ok:
                arrived = signal(mine, row_in, chunk)
                ok = wait_for(arrived, epoch, mine, board, channel, previous, row_in + 1, chunk, patience, FORM[4])
        if ok:
            here = chunk_tiles + 2 * (segment * chunks + chunk)
            for number in tl.range(tl.load(here), tl.load(here + 1), num_stages=FORM[5]):
                s, u = _tile(read_tile(tiles, number), places, RECEIVE, REDUCE, COPY, SEND, True, FORM)
                squares += s
                unbounded |= u
            for number in range(tl.load(here + 1), tl.load(here + 2)):
                s, u = _tile(read_tile(tiles, number), places, RECEIVE, REDUCE, COPY, SEND, False, FORM)
                squares += s
                unbounded |= u
            if SEND:
                post(signal(theirs, row_out, chunk), epoch, FORM[4])
    return ok, squares, unbounded


@triton.jit
def _tile(
    tile,
    places,
    RECEIVE: tl.constexpr,
    REDUCE: tl.constexpr,
    COPY: tl.constexpr,
    SEND: tl.constexpr,
    FULL: tl.constexpr,
    FORM: tl.constexpr,
):
    """The fused pass over one tile. Returns sum of squares and non-finite flag of what it kept, (LANES,)."""
    source, start, valid, span = tile
    origin, output, arrivals, departures, scale = places
    WIRE: tl.constexpr = FORM[0]
    ACCUMULATE: tl.constexpr = FORM[1]
    BLOCK: tl.constexpr = FORM[2]
    at = start - origin
    squares, unbounded = nothing()
    if RECEIVE:
        bits = take(slot(arrivals, at, WIRE), span, FULL, BLOCK)
    if REDUCE:
        total = own(source, valid, scale, output.dtype.element_ty, ACCUMULATE, FULL, BLOCK)
        if RECEIVE:
            total = widen(bits, ACCUMULATE) + total
        bits = narrow(total, WIRE)
    if SEND:
        put(slot(departures, at, WIRE), bits, span, FULL, BLOCK)
    if COPY:
        squares, unbounded = keep(output, start, bits, span, ACCUMULATE, FULL, BLOCK)
    return squares, unbounded
