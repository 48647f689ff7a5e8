"""What the launchers of all kernels share: a rank's view of the regions, and how Python values reach a kernel."""

import struct
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import torch
import triton.language as tl

from fusedring.kernels.signals import MOST_CHANNELS, NVIDIA, SIGNAL_ROW, SIGNALS
from fusedring.kernels.tiles import MOST_REGISTERS, WARPS, Table, block_of

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@dataclass(frozen=True)
class Region:
    """One rank's view of all regions (see signals.py).

    bases: their addresses in this process, and that of this rank's board, int64 (W + 1,), on the device. parity_bytes:
    size of one of the two sets of slots, a multiple of 256. channels: programs of every launch; always the same number,
    since each counts its own epochs. platform: INTERPRETER, NVIDIA or AMD of signals.py.
    """

    bases: torch.Tensor
    rank: int
    world: int
    parity_bytes: int
    channels: int
    platform: int
    cooperative: bool = True
    stages: int = 1

    def __post_init__(self) -> None:
        assert 1 <= self.channels <= MOST_CHANNELS
        assert self.parity_bytes % 256 == 0


@dataclass(frozen=True)
class Totals:
    """What a launch learns of the values that this rank completed, by channel.

    squares: float32 (channels,), the sum of their squares; unbounded: int32 (channels,), 1 if one is inf or NaN.
    """

    squares: torch.Tensor
    unbounded: torch.Tensor


class How(TypedDict):
    """dtype: of the bucket. wire: dtype that crosses between ranks. scale: factor of every contribution."""

    dtype: torch.dtype
    wire: torch.dtype
    scale: float


def slots_byte(world: int) -> int:
    """The byte of a region at which its slots begin: after 4W rows of signals."""
    return 4 * (int(SIGNALS.value) + 4 * world * int(SIGNAL_ROW.value))


def region_bytes(world: int, parity_bytes: int) -> int:
    """The size of a region. It must be zeroed before its first launch."""
    return slots_byte(world) + 2 * parity_bytes


def row_bytes(region: Region, rows: int) -> int:
    """The size of one of `rows` rows of slots."""
    return region.parity_bytes // rows // 256 * 256


def form(dtype: torch.dtype, wire: torch.dtype, region: Region) -> tuple[Any, ...]:
    """The constants of a kernel: wire dtype, accumulate dtype, BLOCK, CHANNELS, PLATFORM, STAGES."""
    accumulate = tl.float64 if dtype == torch.float64 else tl.float32
    return TRITON_DTYPES[wire], accumulate, block_of(wire), region.channels, region.platform, region.stages


def bits_of(scale: float) -> int:
    """A float64 as an integer of the same bits: a float argument of a kernel would become a float32."""
    (bits,) = struct.unpack("<q", struct.pack("<d", scale))
    return int(bits)


def options(platform: int, *, cooperative: bool = True) -> dict[str, Any]:
    """How all kernels are compiled and launched.

    A fused multiply-add would round once where product and sum round twice.
    """
    nvidia = {"maxnreg": MOST_REGISTERS, "launch_cooperative_grid": cooperative} if platform == NVIDIA.value else {}
    return {"num_warps": WARPS, "enable_fp_fusion": False, **nvidia}


class Prepared:
    """A kernel with all its arguments but two, to be launched again and again.

    The first launch goes through Triton's compiler, the later ones past it: of the time that takes on the host, most is
    spent on finding out that the arguments have the same types as before.
    """

    def __init__(
        self,
        kernel: Any,
        table: Table,
        region: Region,
        totals: Totals,
        *,
        rows: int,
        flags: dict[str, bool],
        **how: Unpack[How],
    ) -> None:
        """Prepare `ring` or `direct` with its constants `flags`. rows: how many rows of slots it needs."""
        self._kernel, self._grid = kernel, (region.channels, 1, 1)
        self._before = (table.tiles, table.chunk_tiles, table.origins)
        self._between = (
            region.bases,
            totals.squares,
            totals.unbounded,
            table.chunks,
            row_bytes(region, rows),
            slots_byte(region.world),
            region.parity_bytes,
            region.rank,
            region.world,
        )
        self._bits = bits_of(how["scale"])
        self._constants = (*flags.values(), form(how["dtype"], how["wire"], region))
        self._options = options(region.platform, cooperative=region.cooperative)
        self._compiled: Any = None

    def launch(self, output: torch.Tensor, patience: int) -> None:
        """Launch it on the current stream. output: the same tensor as before, or one at the same address."""
        if self._compiled is None:
            self._compiled = self.launch_by_triton(output, patience)
        else:
            self._compiled[self._grid](*self._arguments(output, patience))

    def launch_by_triton(self, output: torch.Tensor, patience: int) -> Any:
        """The same through Triton's compiler. Returns the compiled kernel; None under the interpreter."""
        return self._kernel[self._grid](*self._arguments(output, patience), **self._options)

    def _arguments(self, output: torch.Tensor, patience: int) -> tuple[Any, ...]:
        return (*self._before, output, *self._between, patience, self._bits, *self._constants)
