"""Tiles on the device: how `BLOCK` elements of a bucket are read, added to and written (tables.py says which).

Full tiles take the fast path: no masks, 16-byte accesses, `stages` of them on their way at once.

What is learnt of the values is added up thread by thread, (LANES,), and summed over threads once at the end: a sum over
threads is a meeting at a barrier, and in a loop over tiles keeps each warp's loads waiting for the slowest.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fusedring.kernels import layout
from fusedring.kernels.cast import narrow, widen

TILE_COLUMNS = tl.constexpr(layout.TILE_COLUMNS)

LANES = tl.constexpr(256)
"""Partial sums of a program: one for each thread of an NVIDIA GPU."""


class Form(NamedTuple):
    """The constants of a kernel.

    wire: dtype that crosses between ranks; accumulate: dtype of sums. block: elements of a full tile. channels:
    programs of the launch. platform: as in layout.py. stages: full tiles that are on their way at once.
    """

    wire: tl.dtype
    accumulate: tl.dtype
    block: int
    channels: int
    platform: int
    stages: int


class Bucket(NamedTuple):
    """What a launch works on.

    tiles, chunk_tiles, origins: see tables.py. output: where finished values go, of the bucket's dtype. chunks: of each
    segment. scale: factor of this rank's contributions, in the accumulate dtype.
    """

    tiles: Any
    chunk_tiles: Any
    origins: Any
    output: Any
    chunks: Any
    scale: Any


class Tile(NamedTuple):
    """A row of the table: address of the source, first element, elements that the source has, elements in all."""

    source: Any
    start: Any
    valid: Any
    span: Any


@triton.jit
def scale_of(bits, FORM: tl.constexpr):
    """The scale whose float64 has these bits, in the accumulate dtype."""
    return tl.cast(bits, tl.int64).to(tl.float64, bitcast=True).to(FORM.accumulate)


@triton.jit
def read_tile(tiles, number):
    """Tile `number` of the table."""
    row = tiles + tl.cast(number, tl.int64) * TILE_COLUMNS
    return Tile(tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3))


@triton.jit
def own(tile, bucket, FULL: tl.constexpr, FORM: tl.constexpr):
    """This rank's contribution to a tile: scaled, in the accumulate dtype, zero where there is none. (BLOCK,)"""
    at = tl.arange(0, FORM.block)
    pointer = tile.source.to(tl.pointer_type(bucket.output.dtype.element_ty))
    if FULL:
        x = tl.load(tl.multiple_of(pointer, 16) + at)
    else:
        x = tl.load(pointer + at, mask=at < tile.valid, other=0.0)
    return widen(x, FORM.accumulate) * bucket.scale


@triton.jit
def slot(base, elements, WIRE: tl.constexpr):
    """Pointer to element `elements` of the slots at address `base`. Both are multiples of 16."""
    return tl.multiple_of((base + elements * (WIRE.primitive_bitwidth // 8)).to(tl.pointer_type(WIRE)), 16)


@triton.jit
def take(pointer, span, FULL: tl.constexpr, FORM: tl.constexpr):
    """What arrived in a slot, in the wire dtype. (BLOCK,)"""
    at = tl.arange(0, FORM.block)
    if FULL:
        return tl.load(pointer + at)
    return tl.load(pointer + at, mask=at < span, other=0.0)


@triton.jit
def put(pointer, x, span, FULL: tl.constexpr, FORM: tl.constexpr):
    """Store a tile, (BLOCK,), into a slot or the output."""
    at = tl.arange(0, FORM.block)
    if FULL:
        tl.store(pointer + at, x)
    else:
        tl.store(pointer + at, x, mask=at < span)


@triton.jit
def keep(bits, tile, bucket, FULL: tl.constexpr, FORM: tl.constexpr):
    """Write a finished tile to the output. Returns the sum of its squares, and 1 if a value is not finite: (LANES,)."""
    result = narrow(widen(bits, FORM.accumulate), bucket.output.dtype.element_ty)
    pointer = bucket.output + tile.start
    if FULL:
        pointer = tl.multiple_of(pointer, 16)
    put(pointer, result, tile.span, FULL, FORM)
    value = widen(result, FORM.accumulate)
    if not FULL:
        value = tl.where(tl.arange(0, FORM.block) < tile.span, value, 0.0)
    each = tl.reshape(value, (LANES, FORM.block // LANES))
    squares = tl.sum(each * each, axis=1).to(tl.float32)
    unbounded = tl.max(tl.where((each - each) != 0.0, 1, 0), axis=1)
    return squares, unbounded


@triton.jit
def nothing():
    """What is learnt of no value at all."""
    return tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.int32)


@triton.jit
def tell(squares, unbounded, squares_to, unbounded_to):
    """Write down what was learnt of a channel's values, in all."""
    tl.store(squares_to, tl.sum(squares))
    tl.store(unbounded_to, tl.max(unbounded))


@triton.jit
def poison(bucket, segments, channel, FORM: tl.constexpr):
    """Fill this channel's chunks of all `segments` of the output with NaN."""
    BLOCK: tl.constexpr = FORM.block
    at = tl.arange(0, BLOCK)
    nan = tl.full((BLOCK,), float("nan"), tl.float32).to(bucket.output.dtype.element_ty)
    for segment in range(segments):
        for chunk in range(channel, bucket.chunks, FORM.channels):
            here = bucket.chunk_tiles + 2 * (segment * bucket.chunks + chunk)
            for number in range(tl.load(here), tl.load(here + 2)):
                row = bucket.tiles + number * TILE_COLUMNS
                start = tl.load(row + 1)
                tl.store(bucket.output + start + at, nan, mask=at < tl.load(row + 3))
