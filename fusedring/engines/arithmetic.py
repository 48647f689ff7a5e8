"""The arithmetic of a reduction on torch tensors, to the bit as every engine does it.

A contribution is factor · x in the accumulate dtype (float64 for float64, else float32): one product, rounded, then
one sum, rounded; never a fused multiply-add. Narrowing to the wire rounds to nearest even. float64 narrows to 16 bits
by way of float32, as torch does.

All tensors here are chunks: one-dimensional, contiguous, of at most `CHUNK_ELEMENTS` elements, so that the chunks of
one operation and the scratch stay in the L2 cache and torch runs each operation in the calling thread alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from fusedring.config import accumulate_dtype

CHUNK_ELEMENTS: Final = 32768
"""torch splits element-wise work among threads above 32768 elements; below 16384 its call overhead shows."""


class Arithmetic:
    """Scale, widen, add and narrow chunks of one dtype over one wire dtype. Owns its scratch; not for two threads."""

    def __init__(self, dtype: torch.dtype, wire: torch.dtype) -> None:
        self.wire = wire
        self.accumulate = accumulate_dtype(dtype)
        self.exact = wire == self.accumulate
        self.lossless = wire == dtype
        self._buffers = [torch.empty(CHUNK_ELEMENTS, dtype=d) for d in (self.accumulate, self.accumulate, wire)]
        self._total, self._term, self._narrow = self._buffers

    def _fit(self, elements: int) -> None:
        if self._total.numel() != elements:
            self._total, self._term, self._narrow = (buffer[:elements] for buffer in self._buffers)

    def sum_to(self, targets: Sequence[torch.Tensor], contributions: Sequence[torch.Tensor], factor: float) -> None:
        """The direct algorithms: narrow every contribution, sum them in order, narrow the sum, store it everywhere."""
        self._fit(contributions[0].numel())
        self._scale_and_round(contributions[0], factor, self._total)
        for x in contributions[1:]:
            self._scale_and_round(x, factor, self._term)
            self._total.add_(self._term)
        result = self._narrowed(self._total)
        for target in targets:
            target.copy_(result)

    def first_hop(self, target: torch.Tensor, sender: torch.Tensor, own: torch.Tensor, factor: float) -> None:
        """The ring's first hop, the send included: the sender's contribution is scaled and narrowed here."""
        self._fit(own.numel())
        self._scale_and_round(sender, factor, self._term)
        self._add_own(target, self._term, own, factor)

    def hop(self, target: torch.Tensor, arrived: torch.Tensor, own: torch.Tensor, factor: float) -> None:
        """A later hop of the ring: widen the partial sum that arrived, add the own contribution, narrow, store."""
        self._fit(own.numel())
        if not self.exact:
            arrived = self._term.copy_(arrived)
        self._add_own(target, arrived, own, factor)

    def narrow_to(self, targets: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        """Store `source`, rounded to the wire, into the targets."""
        if self.lossless:
            for target in targets:
                target.copy_(source)
            return
        self._fit(source.numel())
        narrow = self._narrow.copy_(source)
        for target in targets:
            target.copy_(narrow)

    def partial(self, chunk: torch.Tensor) -> torch.Tensor:
        """The memory of `chunk` as a place for its partial sum in the wire dtype, which is never wider."""
        return chunk if self.lossless else chunk.view(self.wire)[: chunk.numel()]

    def _add_own(self, target: torch.Tensor, arrived: torch.Tensor, own: torch.Tensor, factor: float) -> None:
        self._scale(own, factor, self._total)
        if target.dtype == self.accumulate and self.exact:
            torch.add(self._total, arrived, out=target)
        else:
            target.copy_(self._narrowed(self._total.add_(arrived)))

    def _scale(self, x: torch.Tensor, factor: float, out: torch.Tensor) -> None:
        if x.dtype == out.dtype and factor != 1.0:
            torch.mul(x, factor, out=out)
            return
        out.copy_(x)
        if factor != 1.0:
            out.mul_(factor)

    def _scale_and_round(self, x: torch.Tensor, factor: float, out: torch.Tensor) -> None:
        self._scale(x, factor, out)
        if not self.exact:
            out.copy_(self._narrow.copy_(out))

    def _narrowed(self, total: torch.Tensor) -> torch.Tensor:
        return total if self.exact else self._narrow.copy_(total)
