"""What the launchers of all kernels share: how Python values reach a kernel, and how a kernel is launched again."""

import struct
from typing import Any, TypedDict, Unpack

import torch
import triton.language as tl

from fusedring.kernels.layout import NVIDIA, row_bytes, slots_byte
from fusedring.kernels.region import Region, Totals
from fusedring.kernels.tables import Table, block_of
from fusedring.kernels.tiles import Form

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}

WARPS = 8

MOST_REGISTERS = 128
"""Of a thread. Left to itself ptxas aims at 80 for two_shot on float32, and spills."""


class How(TypedDict):
    """dtype: of the bucket. wire: dtype that crosses between ranks. scale: factor of every contribution."""

    dtype: torch.dtype
    wire: torch.dtype
    scale: float


def form(dtype: torch.dtype, wire: torch.dtype, *, channels: int, platform: int, stages: int) -> Form:
    """The constants of a kernel for buckets of `dtype`."""
    accumulate = tl.float64 if dtype == torch.float64 else tl.float32
    return Form(TRITON_DTYPES[wire], accumulate, block_of(wire), channels, platform, stages)


def bits_of(scale: float) -> int:
    """A float64 as an integer of the same bits: a float argument of a kernel would become a float32."""
    (bits,) = struct.unpack("<q", struct.pack("<d", scale))
    return int(bits)


def options(platform: int, *, cooperative: bool = True) -> dict[str, Any]:
    """How all kernels are compiled and launched.

    A fused multiply-add would round once where product and sum round twice.
    """
    nvidia = {"maxnreg": MOST_REGISTERS, "launch_cooperative_grid": cooperative} if platform == NVIDIA else {}
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
            row_bytes(region.parity_bytes, rows),
            slots_byte(region.world),
            region.parity_bytes,
            region.rank,
            region.world,
        )
        self._bits = bits_of(how["scale"])
        constants = form(
            how["dtype"], how["wire"], channels=region.channels, platform=region.platform, stages=region.stages
        )
        self._constants = (*flags.values(), constants)
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
