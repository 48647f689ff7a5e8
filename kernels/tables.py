"""Tables of tiles: where a bucket that lies scattered over autograd's tensors is read, `block` elements at a time.

A bucket is a range of elements, `output` its storage. Its *runs* say where each part of it is read: a run begins at a
multiple of 16 elements of the bucket, and its elements lie together at `source`. Segments cut the bucket (the plan's
parts), chunks cut segments, and tiles cut chunks and runs, so that a tile lies in one run and one chunk.

`tiles` has a row of four int64 for each tile, in the order of the bucket:

    address of its first element's source | first element | elements that the source has | elements in all

Elements that the source lacks (the padding up to the next multiple of 16) count as zero. The tiles of a chunk lie one
behind the other, first the *full* ones, of `block` elements, then the *ragged* ones; `chunk_tiles` has two numbers for
each chunk, in the order of segments and chunks: its first full and its first ragged tile. (The first full one of the
next chunk ends it; behind the last stands the number of all.) All segments have the same number of chunks, some of them
empty, since every step posts and awaits its signals whatever it carries.

Example: 40 elements, one run, blocks of 32, world size 2, chunks of 32 elements. The parts are [0, 16) and [16, 40):
tiles (s, 0, 16, 16) and (s + 64, 16, 24, 24) for float32, both ragged, chunks = 1, chunk_tiles = [0, 0, 1, 1, 2].

Full tiles take the fast path: no masks, 16-byte accesses, several of them on their way at once. That needs 16-byte
alignment of source and output; where that is not so, tiles are cut 16 elements shorter, and so are ragged.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fusedring.kernels.layout import TILE_COLUMNS


def block_of(wire: torch.dtype) -> int:
    """Elements of a tile, for 8 warps: 8 a thread, hence 16-byte accesses in 16 bits; 2 a thread for float64 wires.

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
        self._rows = torch.tensor(rows, dtype=torch.int64).view(-1, TILE_COLUMNS)
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
