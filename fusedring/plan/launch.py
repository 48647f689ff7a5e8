"""One launch, and what came of it, as values: dtypes by name ('float32', ...), no torch."""

from __future__ import annotations

from dataclasses import dataclass

FLAGS = -2
"""In place of a bucket's number: the flags at the end of a training step."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One collective on one tensor.

    kind: 'all_reduce', 'reduce_scatter' or 'all_gather'. dtype, wire: names of dtypes, of the tensor and of what
        crosses between ranks.
    factor: what each contribution is multiplied by. engine: the name of the engine that carries it out.
    wrapper, step, bucket: whose launch this is, of which training step (-1 each outside of training; bucket may be
        FLAGS). Wrappers are numbered as they were made.
    more: whether this rank has flags to tell behind this launch. Alone of all this need not be the same on all ranks.
    """

    kind: str
    algorithm: str
    elements: int
    dtype: str
    wire: str
    factor: float = 1.0
    engine: str = "host"
    wrapper: int = -1
    step: int = -1
    bucket: int = -1
    more: bool = False

    @property
    def label(self) -> str:
        """Its name in profiles and traces."""
        if self.bucket == FLAGS:
            return "fusedring::flags"
        return f"fusedring::{self.kind}" + (f"[bucket={self.bucket}]" if self.bucket >= 0 else "")

    @property
    def words(self) -> str:
        """What ranks have to agree on, in words."""
        words = f"{self.kind} of {self.elements} elements of {self.dtype}, {self.algorithm}"
        if self.wire != self.dtype:
            words += f", wire {self.wire}"
        words += f", factor {self.factor:.9g}, engine {self.engine}"
        if self.step >= 0:
            what = "flags" if self.bucket == FLAGS else f"bucket {self.bucket}"
            words += f", {what} of step {self.step} of wrapper {self.wrapper}"
        return words


@dataclass(frozen=True, slots=True)
class Outcome:
    """started: time.perf_counter() when all ranks had come.

    squares, unbounded: where the engine gives them, the sum of squares of the results that this rank completed (its
    part), and whether one of them is inf or NaN. more: whether some rank has flags to tell; None if nobody knows.
    """

    started: float
    squares: float | None = None
    unbounded: bool | None = None
    more: bool | None = None
