"""The direct algorithms: every contribution goes straight to where it is summed. One kernel, and how it is prepared.

    two_shot   segment s is summed at rank s, and rank s hands its sum to all
    one_shot   every segment is summed at every rank; nothing is handed out
    master     every segment is summed at rank 0, which hands the sums out

In each channel, chunk by chunk:

    send       scale and narrow the own contribution, store it at whoever sums it
    sum        wait for all contributions, add them in rank order, narrow, keep, and store at whoever is to have it
    receive    wait for the sums of others, and keep them

Each rank has a row of slots for the contributions of every rank, and one for the sums from each (see layout.py). A row
holds one segment (two_shot) or the whole bucket (the others); `origins` says which element lies first in it. Alone of
these algorithms one_shot has no receive: a rank that has summed may be in the next epoch while its neighbour still
reads, which is why slots have two parities.

Example, two_shot on 3 ranks, rank 1: sends b3 to rank 2 and b1 to rank 0; waits for a2 and c2, keeps the sum of a2, b2
and c2, and stores it at ranks 0 and 2; waits for the sums of segments 3 and 1.
"""

from typing import Any, NamedTuple, Unpack

import triton
import triton.language as tl

from fusedring.kernels.cast import narrow, widen
from fusedring.kernels.layout import direct_rows
from fusedring.kernels.prepared import How, Prepared
from fusedring.kernels.region import Region, Totals
from fusedring.kernels.signals import (
    CONTRIBUTIONS,
    DIRECT_SIGNALS,
    SUMS,
    abort_all,
    begin,
    end,
    is_aborted,
    post,
    signal_word,
    wait_for,
)
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


class Ranks(NamedTuple):
    """Ranks first .. until - 1."""

    first: Any
    until: Any


@triton.jit
def _contributions(rank, link):
    """The row of slots for the contributions of `rank`."""
    return link.world * CONTRIBUTIONS + rank


@triton.jit
def _sums(rank, link):
    """The row of slots for the sums from `rank`."""
    return link.world * SUMS + rank


@triton.jit
def _signal(base, row, index, link):
    """Pointer to a signal that belongs to a row of slots, in the region at address `base`."""
    return signal_word(base, link.world * DIRECT_SIGNALS + row, index)


@triton.jit
def _hand_to(receivers, row, at, bits, tile, link, FULL: tl.constexpr, FORM: tl.constexpr):
    """Store a tile at element `at` of a row of slots of the receivers, but for this rank."""
    place = link.slots + row * link.row_bytes
    for receiver in range(receivers.first, receivers.until):
        if receiver != link.rank:
            put(slot(tl.load(link.bases + receiver) + place, at, FORM.wire), bits, tile.span, FULL, FORM)


@triton.jit
def _post_to(receivers, row, index, link, FORM: tl.constexpr):
    """Raise a signal of that row of slots at the receivers, but for this rank."""
    for receiver in range(receivers.first, receivers.until):
        if receiver != link.rank:
            post(_signal(tl.load(link.bases + receiver), row, index, link), link.epoch, FORM.platform)


@triton.jit
def _wait_for(sender, row, index, step, link, FORM: tl.constexpr):
    """Wait for a signal of that row of slots, which `sender` raises."""
    return wait_for(_signal(link.region, row, index, link), link, sender, step, index, FORM.platform)


@triton.jit
def _arrived(row, at, tile, link, FULL: tl.constexpr, FORM: tl.constexpr):
    """The tile at element `at` of this rank's row of slots. (BLOCK,)"""
    return take(slot(link.region + link.slots + row * link.row_bytes, at, FORM.wire), tile.span, FULL, FORM)


@triton.jit
def _send_tile(tile, origin, bucket, link, receivers, FULL: tl.constexpr, FORM: tl.constexpr):
    bits = narrow(own(tile, bucket, FULL, FORM), FORM.wire)
    _hand_to(receivers, _contributions(link.rank, link), tile.start - origin, bits, tile, link, FULL, FORM)


@triton.jit
def _sum_tile(tile, origin, bucket, link, senders, receivers, FULL: tl.constexpr, FORM: tl.constexpr):
    """Returns sum of squares and non-finite flag, (LANES,)."""
    BLOCK: tl.constexpr = FORM.block
    at = tile.start - origin
    mine = narrow(own(tile, bucket, FULL, FORM), FORM.wire)
    total = tl.zeros((BLOCK,), FORM.accumulate)
    for sender in range(senders.first, senders.until):
        if sender == link.rank:
            term = widen(mine, FORM.accumulate)
        else:
            term = widen(_arrived(_contributions(sender, link), at, tile, link, FULL, FORM), FORM.accumulate)
        total = tl.where(sender == senders.first, term, total + term)  # not 0 + term, which would lose the sign of -0
    bits = narrow(total, FORM.wire)
    _hand_to(receivers, _sums(link.rank, link), at, bits, tile, link, FULL, FORM)
    return keep(bits, tile, bucket, FULL, FORM)


@triton.jit
def _receive_tile(tile, origin, bucket, link, reducer, FULL: tl.constexpr, FORM: tl.constexpr):
    bits = _arrived(_sums(reducer, link), tile.start - origin, tile, link, FULL, FORM)
    keep(bits, tile, bucket, FULL, FORM)


@triton.jit
def _send(ok, bucket, link, segment, receivers, FORM: tl.constexpr):
    origin = tl.load(bucket.origins + segment)
    for chunk in range(link.channel, bucket.chunks, FORM.channels):
        index = segment * bucket.chunks + chunk
        if ok:
            here = bucket.chunk_tiles + 2 * index
            for number in tl.range(tl.load(here), tl.load(here + 1), num_stages=FORM.stages):
                _send_tile(read_tile(bucket.tiles, number), origin, bucket, link, receivers, True, FORM)
            for number in range(tl.load(here + 1), tl.load(here + 2)):
                _send_tile(read_tile(bucket.tiles, number), origin, bucket, link, receivers, False, FORM)
            _post_to(receivers, _contributions(link.rank, link), index, link, FORM)
    return ok


@triton.jit
def _sum(ok, bucket, link, segment, senders, receivers, FORM: tl.constexpr):
    origin = tl.load(bucket.origins + segment)
    squares, unbounded = nothing()
    for chunk in range(link.channel, bucket.chunks, FORM.channels):
        index = segment * bucket.chunks + chunk
        for sender in range(senders.first, senders.until):
            if ok & (sender != link.rank):
                ok = _wait_for(sender, _contributions(sender, link), index, 1, link, FORM)
        if ok:
            here = bucket.chunk_tiles + 2 * index
            for number in range(tl.load(here), tl.load(here + 1)):
                s, u = _sum_tile(read_tile(bucket.tiles, number), origin, bucket, link, senders, receivers, True, FORM)
                squares += s
                unbounded |= u
            for number in range(tl.load(here + 1), tl.load(here + 2)):
                s, u = _sum_tile(read_tile(bucket.tiles, number), origin, bucket, link, senders, receivers, False, FORM)
                squares += s
                unbounded |= u
            _post_to(receivers, _sums(link.rank, link), index, link, FORM)
    return ok, squares, unbounded


@triton.jit
def _receive(ok, bucket, link, segment, reducer, FORM: tl.constexpr):
    origin = tl.load(bucket.origins + segment)
    for chunk in range(link.channel, bucket.chunks, FORM.channels):
        index = segment * bucket.chunks + chunk
        if ok:
            ok = _wait_for(reducer, _sums(reducer, link), index, 2, link, FORM)
        if ok:
            here = bucket.chunk_tiles + 2 * index
            for number in tl.range(tl.load(here), tl.load(here + 1), num_stages=FORM.stages):
                _receive_tile(read_tile(bucket.tiles, number), origin, bucket, link, reducer, True, FORM)
            for number in range(tl.load(here + 1), tl.load(here + 2)):
                _receive_tile(read_tile(bucket.tiles, number), origin, bucket, link, reducer, False, FORM)
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
    bucket = Bucket(tiles, chunk_tiles, origins, output, chunks, scale_of(scale_bits, FORM))
    link = begin(bases, rank, world, slots, row_bytes, parity_bytes, patience)
    ok = is_aborted(link.region) == 0
    s, u = nothing()
    for hop in range(1, world + 1):
        segment = (rank + hop) % world
        reducer = 0 if ONE_SUMS else segment
        if EVERYONE_SUMS:
            ok = _send(ok, bucket, link, segment, Ranks(0, world), FORM)
        elif SCATTER:
            if reducer != rank:
                ok = _send(ok, bucket, link, segment, Ranks(reducer, reducer + 1), FORM)
        elif (segment == rank) & (reducer != rank):
            ok = _send(ok, bucket, link, segment, Ranks(reducer, reducer + 1), FORM)
    for segment in range(world):
        reducer = 0 if ONE_SUMS else segment
        senders = Ranks(0, world) if SCATTER else Ranks(segment, segment + 1)
        if EVERYONE_SUMS:
            ok, more, not_finite = _sum(ok, bucket, link, segment, senders, Ranks(0, 0), FORM)
            if segment == rank:
                s += more
                u |= not_finite
        elif reducer == rank:
            receivers = Ranks(0, world) if GATHER else Ranks(segment, segment + 1)
            ok, more, not_finite = _sum(ok, bucket, link, segment, senders, receivers, FORM)
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
        tell(s, u, squares + link.channel, unbounded + link.channel)
        end(link)
    else:
        poison(bucket, world, link.channel, FORM)
        abort_all(link, FORM.platform)


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
