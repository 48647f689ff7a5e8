"""The ring: one persistent kernel for all its steps, and how it is prepared.

Rank r receives from r-1 and sends to r+1. Segment s starts its trip at rank s; with W ranks every segment makes W-1
hops of *reduce-scatter*, in which each rank adds its own part, and W-1 hops of *all-gather*, in which the finished
segment is passed on. In the words of NCCL, and in this order:

    send                     the own segment, scaled and narrowed
    receive, reduce, send    W-2 times: add the own part to what arrived, narrow, pass on
    receive, reduce, copy, send   the sum is complete: keep it, and pass on the very bits that are kept
    receive, copy, send      W-2 times: keep what arrived, pass it on unchanged
    receive, copy            the last segment

Row t of a rank's slots and signals belongs to step t (see layout.py). A slot is written once in an epoch; two epochs
later, in the same parity, its reader has long finished with it.

Shapes: a channel is one program; tiles are (BLOCK,). Steps are the outer loop, a step's chunks the inner one: what a
chunk waits for was sent a whole segment ago. Channel i handles chunks i, i + CHANNELS, ... of every segment, and waits
for channel i of rank r-1 only.

Example, 4 ranks, rank 1 (GPU2 in pictures): sends b2; receives a1, sends a1+b1; receives d4+a4, sends d4+a4+b4;
receives c3+d3+a3, completes segment 3, keeps and sends it; receives, keeps and sends 2, then 1, then receives and keeps
4. (Letters are contributions, digits segments, both counted from 1.)
"""

from typing import Any, NamedTuple, Unpack

import triton
import triton.language as tl

from fusedring.kernels.cast import narrow, widen
from fusedring.kernels.layout import ring_rows
from fusedring.kernels.prepared import How, Prepared
from fusedring.kernels.region import Region, Totals
from fusedring.kernels.signals import abort_all, begin, end, is_aborted, post, signal_word, wait_for
from fusedring.kernels.tables import Table
from fusedring.kernels.tiles import (
    Bucket,
    keep,
    nothing,
    own,
    poison,
    put,
    read_tile,
    scale_of,
    slot,
    take,
    tell,
)


class Places(NamedTuple):
    """Where a step takes and puts its tiles.

    origin: the element of the bucket that lies first in a row. arrivals, departures: addresses of the rows.
    """

    origin: Any
    arrivals: Any
    departures: Any


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

    tiles, chunk_tiles, origins: see tables.py. output: where finished values go, of the bucket's dtype. bases:
    addresses of the regions and of the own status page, int64 (W + 1,). squares: float32 (CHANNELS,), unbounded: int32
    (CHANNELS,): of the values that this rank completed. row_bytes: distance between rows of slots; slots: where they
    begin in a region; parity_bytes: distance between the two sets. scale_bits: the bits of a float64. FORM: a `Form`.
    """
    bucket = Bucket(tiles, chunk_tiles, origins, output, chunks, scale_of(scale_bits, FORM))
    link = begin(bases, rank, world, slots, row_bytes, parity_bytes, patience)
    complete = (rank + 1) % world
    hops = world - 1
    ok = is_aborted(link.region) == 0
    s, u = nothing()
    if world == 1:
        ok, s, u = _reduce_copy(ok, bucket, link, rank, FORM)
    else:
        if SCATTER:
            ok = _send(ok, bucket, link, rank, 0, FORM)
            for hop in range(1, hops):
                segment = (rank + world - hop) % world
                ok = _receive_reduce_send(ok, bucket, link, segment, hop - 1, hop, FORM)
            ok, s, u = _receive_reduce_copy_send(ok, bucket, link, complete, hops - 1, hops, GATHER, FORM)
        else:
            ok = _copy_send(ok, bucket, link, complete, hops, FORM)
        if GATHER:
            for hop in range(1, hops):
                segment = (complete + world - hop) % world
                row = hops + hop
                ok = _receive_copy_send(ok, bucket, link, segment, row - 1, row, FORM)
            ok = _receive_copy(ok, bucket, link, (rank + 2) % world, 2 * hops - 1, FORM)
    if ok:
        tell(s, u, squares + link.channel, unbounded + link.channel)
        end(link)
    else:
        poison(bucket, world, link.channel, FORM)
        abort_all(link, FORM.platform)


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


# The verbs. Each is one step: the segment, the row that it arrives in, the row that it departs to.


@triton.jit
def _send(ok, bucket, link, segment, row_out, FORM: tl.constexpr):
    ok, _, _ = _step(ok, bucket, link, segment, 0, row_out, FORM, OWN=True, SEND=True)
    return ok


@triton.jit
def _receive_reduce_send(ok, bucket, link, segment, row_in, row_out, FORM: tl.constexpr):
    ok, _, _ = _step(ok, bucket, link, segment, row_in, row_out, FORM, RECEIVE=True, OWN=True, SEND=True)
    return ok


@triton.jit
def _receive_reduce_copy_send(ok, bucket, link, segment, row_in, row_out, GATHER: tl.constexpr, FORM: tl.constexpr):
    """How a reduce-scatter ends: the sum is kept, and sent only where an all-gather follows."""
    return _step(ok, bucket, link, segment, row_in, row_out, FORM, RECEIVE=True, OWN=True, COPY=True, SEND=GATHER)


@triton.jit
def _receive_copy_send(ok, bucket, link, segment, row_in, row_out, FORM: tl.constexpr):
    ok, _, _ = _step(ok, bucket, link, segment, row_in, row_out, FORM, RECEIVE=True, COPY=True, SEND=True)
    return ok


@triton.jit
def _receive_copy(ok, bucket, link, segment, row_in, FORM: tl.constexpr):
    ok, _, _ = _step(ok, bucket, link, segment, row_in, 0, FORM, RECEIVE=True, COPY=True)
    return ok


@triton.jit
def _copy_send(ok, bucket, link, segment, row_out, FORM: tl.constexpr):
    """How a lone all-gather begins: the owner keeps what the others will get."""
    ok, _, _ = _step(ok, bucket, link, segment, 0, row_out, FORM, OWN=True, COPY=True, SEND=True)
    return ok


@triton.jit
def _reduce_copy(ok, bucket, link, segment, FORM: tl.constexpr):
    """All that a lone rank does: scale and round."""
    return _step(ok, bucket, link, segment, 0, 0, FORM, OWN=True, COPY=True)


@triton.jit
def _step(
    ok,
    bucket,
    link,
    segment,
    row_in,
    row_out,
    FORM: tl.constexpr,
    RECEIVE: tl.constexpr = False,
    OWN: tl.constexpr = False,
    COPY: tl.constexpr = False,
    SEND: tl.constexpr = False,
):
    """One step of the ring in one channel: wait, pass, post, chunk by chunk. After a failed wait nothing more.

    What is passed on is what arrived (RECEIVE), this rank's own part (OWN), or the sum of both. It is kept in the
    output (COPY), sent (SEND), or both.
    """
    squares, unbounded = nothing()
    places = Places(
        origin=tl.load(bucket.origins + segment),
        arrivals=link.region + link.slots + row_in * link.row_bytes,
        departures=link.following + link.slots + row_out * link.row_bytes,
    )
    for chunk in range(link.channel, bucket.chunks, FORM.channels):
        if RECEIVE:
            if ok:
                arrived = signal_word(link.region, row_in, chunk)
                ok = wait_for(arrived, link, link.previous, row_in + 1, chunk, FORM.platform)
        if ok:
            here = bucket.chunk_tiles + 2 * (segment * bucket.chunks + chunk)
            for number in tl.range(tl.load(here), tl.load(here + 1), num_stages=FORM.stages):
                s, u = _tile(read_tile(bucket.tiles, number), bucket, places, True, FORM, RECEIVE, OWN, COPY, SEND)
                squares += s
                unbounded |= u
            for number in range(tl.load(here + 1), tl.load(here + 2)):
                s, u = _tile(read_tile(bucket.tiles, number), bucket, places, False, FORM, RECEIVE, OWN, COPY, SEND)
                squares += s
                unbounded |= u
            if SEND:
                post(signal_word(link.following, row_out, chunk), link.epoch, FORM.platform)
    return ok, squares, unbounded


@triton.jit
def _tile(
    tile,
    bucket,
    places,
    FULL: tl.constexpr,
    FORM: tl.constexpr,
    RECEIVE: tl.constexpr,
    OWN: tl.constexpr,
    COPY: tl.constexpr,
    SEND: tl.constexpr,
):
    """The fused pass over one tile. Returns sum of squares and non-finite flag of what it kept, (LANES,)."""
    at = tile.start - places.origin
    squares, unbounded = nothing()
    if RECEIVE:
        bits = take(slot(places.arrivals, at, FORM.wire), tile.span, FULL, FORM)
    if OWN:
        total = own(tile, bucket, FULL, FORM)
        if RECEIVE:
            total = widen(bits, FORM.accumulate) + total
        bits = narrow(total, FORM.wire)
    if SEND:
        put(slot(places.departures, at, FORM.wire), bits, tile.span, FULL, FORM)
    if COPY:
        squares, unbounded = keep(bits, tile, bucket, FULL, FORM)
    return squares, unbounded
