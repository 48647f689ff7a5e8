"""Tiles: how a bucket that lies scattered over autograd's tensors is read, added to and written, `BLOCK` elements at a
time.

A bucket is a range of elements, `output` its storage. Its *runs* say where each part of it is read: a run begins at a
multiple of 16 elements of the bucket, and its elements lie together at `source`. Segments cut the bucket (the plan's
parts), chunks cut segments, and tiles cut chunks and runs, so that a tile lies in one run and one chunk.

`tiles` has a row of four int64 for each tile, in the order of the bucket:

    address of its first element's source | first element | elements that the source has | elements in all

Elements that the source lacks (the padding up to the next multiple of 16) count as zero. The tiles of a chunk lie one
behind the other, first the *full* ones, of `BLOCK` elements, then the *ragged* ones; `chunk_tiles` has two numbers for
each chunk, in the order of segments and chunks: its first full and its first ragged tile. (The first full one of the
next chunk ends it; behind the last stands the number of all.) All segments have the same number of chunks, some of them
empty, since every step posts and awaits its signals whatever it carries.

Example: 40 elements, one run, BLOCK 32, world size 2, chunks of 32 elements. The parts are [0, 16) and [16, 40): tiles
(s, 0, 16, 16) and (s + 64, 16, 24, 24) for float32, both ragged, chunks = 1, chunk_tiles = [0, 0, 1, 1, 2].

Full tiles take the fast path: no masks, 16-byte accesses, `STAGES` of them on their way at once. That needs 16-byte
alignment of source and output; where that is not so, tiles are cut 16 elements shorter, and so are ragged.

What is learnt of the values is added up thread by thread, (LANES,), and summed over threads once at the end: a sum over
threads is a meeting at a barrier, and in a loop over tiles keeps each warp's loads waiting for the slowest.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fusedring.kernels.cast import narrow, widen

COLUMNS = tl.constexpr(4)

WARPS = 8
LANES = tl.constexpr(256)
"""Partial sums of a program: one for each thread of an NVIDIA GPU."""

MOST_REGISTERS = 128
"""Of a thread. Left to itself ptxas aims at 80 for two_shot on float32, and spills."""


def block_of(wire: torch.dtype) -> int:
    """Elements of a tile, for WARPS warps: 8 a thread, hence 16-byte accesses in 16 bits; 2 a thread for float64 wires.

    With 16 elements a thread the ring needs 201 registers instead of 113 (sm_90, float32 over bfloat16, Triton 3.7.1);
    with 8, two_shot needs 176 for float64, and with 4 master spills.
    """
    return 512 if wire == torch.float64 else 2048


def write_now(target: torch.Tensor, values: torch.Tensor) -> None:
    """Give `target` these values."""
    target.copy_(values)


@dataclass(frozen=True)
class Run:
    """Elements [start, start + source.numel()) of a bucket are read from `source`, a contiguous tensor."""

    start: int
    source: torch.Tensor


class Table:
    """The tiles of one bucket at one rank, on the device where its kernels run.

    segments: element ranges in the order of their number; they need not be in the order of the bucket. runs: in the
    order of the bucket, covering all segments; what lies between the end of one and the start of the next is padding.
    origins: for each segment, the element of the bucket that lies first in a row of slots. write(target, values): how
    values reach the device, before any kernel that is launched afterwards.
    """

    def __init__(
        self,
        segments: Sequence[tuple[int, int]],
        runs: Sequence[Run],
        output: torch.Tensor,
        origins: Sequence[int],
        *,
        chunk_elements: int,
        block: int,
        write: Callable[[torch.Tensor, torch.Tensor], None] = write_now,
    ) -> None:
        longest = max(stop - start for start, stop in segments)
        self.chunks = max(1, -(-longest // chunk_elements))
        starts = [run.start for run in runs]
        ends = [*starts[1:], max(stop for _, stop in segments)]
        lengths = [block if aligned else block - 16 for aligned in alignment(runs, output)]
        rows: list[tuple[int, int, int, int]] = []
        chunk_tiles = [0]
        for start, stop in segments:
            for chunk in range(self.chunks):
                first = min(start + chunk * chunk_elements, stop)
                last = min(first + chunk_elements, stop)
                at = first
                index = bisect_right(starts, at) - 1
                ragged: list[tuple[int, int, int, int]] = []
                while at < last:
                    if at >= ends[index]:
                        index += 1
                    run = runs[index]
                    span = min(lengths[index], last - at, ends[index] - at)
                    valid = max(0, min(span, run.start + run.source.numel() - at))
                    (rows if valid == block else ragged).append((index, at, valid, span))
                    at += span
                chunk_tiles.append(len(rows))
                rows += ragged
                chunk_tiles.append(len(rows))
        self._rows = torch.tensor(rows, dtype=torch.int64).view(-1, 4)
        self._runs = self._rows[:, 0].clone()
        size = output.element_size()
        self._offsets = (self._rows[:, 1] - torch.tensor(starts)[self._runs]) * size
        counts, firsts = torch.tensor(chunk_tiles, dtype=torch.int32), torch.tensor(origins, dtype=torch.int64)
        self.tiles, self.chunk_tiles, self.origins = (
            torch.empty_like(values, device=output.device) for values in (self._rows, counts, firsts)
        )
        write(self.chunk_tiles, counts)
        write(self.origins, firsts)
        self._addresses: tuple[int, ...] = ()
        self.point_at(runs, write)

    @property
    def on_device(self) -> tuple[torch.Tensor, ...]:
        """All that was written for the kernels."""
        return self.tiles, self.chunk_tiles, self.origins

    def point_at(self, runs: Sequence[Run], write: Callable[[torch.Tensor, torch.Tensor], None] = write_now) -> None:
        """Read from these runs from now on: laid out and aligned as those that the table was made for."""
        addresses = tuple(run.source.data_ptr() for run in runs)
        if addresses != self._addresses:
            # By numpy: torch gathers with all threads, which takes milliseconds where others keep the cores busy.
            self._rows.numpy()[:, 0] = torch.tensor(addresses).numpy()[self._runs.numpy()] + self._offsets.numpy()
            write(self.tiles, self._rows)
            self._addresses = addresses


def alignment(runs: Sequence[Run], output: torch.Tensor) -> tuple[bool, ...]:
    """For each run, whether 16-byte accesses are possible in it."""
    if output.data_ptr() % 16 != 0:
        return (False,) * len(runs)
    return tuple(run.source.data_ptr() % 16 == 0 for run in runs)


@triton.jit
def read_tile(tiles, number):
    """Row `number` of the table: address of the source, first element, elements there, elements in all."""
    row = tiles + tl.cast(number, tl.int64) * COLUMNS
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def own(source, valid, scale, DTYPE: tl.constexpr, ACCUMULATE: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """This rank's contribution to a tile: scaled, in the accumulate dtype, zero where there is none. (BLOCK,)"""
    at = tl.arange(0, BLOCK)
    pointer = source.to(tl.pointer_type(DTYPE))
    if FULL:
        x = tl.load(tl.multiple_of(pointer, 16) + at)
    else:
        x = tl.load(pointer + at, mask=at < valid, other=0.0)
    return widen(x, ACCUMULATE) * scale


@triton.jit
def slot(base, elements, WIRE: tl.constexpr):
    """Pointer to element `elements` of the slots at address `base`. Both are multiples of 16."""
    return tl.multiple_of((base + elements * (WIRE.primitive_bitwidth // 8)).to(tl.pointer_type(WIRE)), 16)


@triton.jit
def take(pointer, span, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """What arrived in a slot, in the wire dtype. (BLOCK,)"""
    at = tl.arange(0, BLOCK)
    if FULL:
        return tl.load(pointer + at)
    return tl.load(pointer + at, mask=at < span, other=0.0)


@triton.jit
def put(pointer, x, span, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """Store a tile, (BLOCK,), into a slot or the output."""
    at = tl.arange(0, BLOCK)
    if FULL:
        tl.store(pointer + at, x)
    else:
        tl.store(pointer + at, x, mask=at < span)


@triton.jit
def keep(output, start, bits, span, ACCUMULATE: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """Write a finished tile to the output. Returns the sum of its squares, and 1 if a value is not finite: (LANES,)."""
    result = narrow(widen(bits, ACCUMULATE), output.dtype.element_ty)
    pointer = output + start
    if FULL:
        pointer = tl.multiple_of(pointer, 16)
    put(pointer, result, span, FULL, BLOCK)
    value = widen(result, ACCUMULATE)
    if not FULL:
        value = tl.where(tl.arange(0, BLOCK) < span, value, 0.0)
    each = tl.reshape(value, (LANES, BLOCK // LANES))
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
def poison(tiles, chunk_tiles, output, parts, channel, chunks, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Fill this channel's chunks of all `parts` segments of the output with NaN."""
    at = tl.arange(0, BLOCK)
    nan = tl.full((BLOCK,), float("nan"), tl.float32).to(output.dtype.element_ty)
    for part in range(parts):
        for chunk in range(channel, chunks, CHANNELS):
            here = chunk_tiles + 2 * (part * chunks + chunk)
            for tile in range(tl.load(here), tl.load(here + 2)):
                start = tl.load(tiles + tile * COLUMNS + 1)
                tl.store(output + start + at, nan, mask=at < tl.load(tiles + tile * COLUMNS + 3))
