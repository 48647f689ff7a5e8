"""What one launch does, in the form in which ranks show it to each other before anything is written.

Every rank packs its `Launch` into a header of `HEADER_BYTES` bytes. The first `_AGREED_BYTES` must be equal on all
ranks; `agree` words the difference, and since every rank sees every header, the text is the same everywhere.
The rest tells peers where a rank's tensor lies.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusedring.config import ALGORITHMS, DTYPES, ENGINES, KINDS
from fusedring.errors import MismatchError

LAUNCH_KINDS = (*KINDS, "empty", "open", "wrap")
STAGED = -1
"""`arena` of a tensor outside the workspace: it travels through the rank's staging slot."""

_LAYOUT = struct.Struct("<qqqqqdqqqqqq")
_WHERE = struct.Struct("<qq")
HEADER_BYTES = _LAYOUT.size
_AGREED_BYTES = HEADER_BYTES - _WHERE.size


@dataclass(frozen=True, slots=True)
class Location:
    """Where a tensor begins in the workspace: `offset` bytes into this rank's region of arena number `arena`."""

    arena: int
    offset: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One collective on one tensor.

    kind: 'all_reduce', 'reduce_scatter', 'all_gather', 'empty' (an allocation; `elements` is bytes per rank), 'open'
        (of a GPU; `elements` is channels) or 'wrap' (of a module that has changed; `elements` is parameters).
    wire: dtype that crosses between ranks, never None here.
    factor: what each contribution is multiplied by. engine: 'host' or 'triton'.
    wrapper, step, bucket: whose launch this is, of which training step (-1 each outside of training). Wrappers are
        numbered as they were made.
    """

    kind: str
    algorithm: str
    elements: int
    dtype: torch.dtype
    wire: torch.dtype
    factor: float = 1.0
    engine: str = "host"
    wrapper: int = -1
    step: int = -1
    bucket: int = -1

    @property
    def label(self) -> str:
        """Its name in profiles and traces."""
        return f"fusedring::{self.kind}" + (f"[bucket={self.bucket}]" if self.bucket >= 0 else "")


@dataclass(frozen=True, slots=True)
class Source:
    """Elements [start, start + tensor.numel()) are read from `tensor`, a vector of the launch's dtype."""

    start: int
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """started: time.perf_counter() when all ranks had come.

    squares, unbounded: where the engine gives them, the sum of squares of the results that this rank completed (its
    part), and whether one of them is inf or NaN.
    """

    started: float
    squares: float | None = None
    unbounded: bool | None = None


def pack(launch: Launch, location: Location | None) -> bytes:
    """The header of `launch` at a rank whose tensor lies at `location` (None: outside the workspace)."""
    where = location or Location(STAGED, 0)
    return _LAYOUT.pack(
        LAUNCH_KINDS.index(launch.kind),
        ALGORITHMS.index(launch.algorithm),
        launch.elements,
        DTYPES.index(launch.dtype) if launch.kind != "empty" else 0,
        DTYPES.index(launch.wire) if launch.kind != "empty" else 0,
        launch.factor,
        ENGINES.index(launch.engine),
        launch.wrapper,
        launch.step,
        launch.bucket,
        where.arena,
        where.offset,
    )


def unpack(header: bytes) -> tuple[Launch, Location | None]:
    """The inverse of `pack`."""
    kind, algorithm, elements, dtype, wire, factor, engine, wrapper, step, bucket, _, _ = _LAYOUT.unpack(header)
    launch = Launch(
        kind=LAUNCH_KINDS[kind],
        algorithm=ALGORITHMS[algorithm],
        elements=elements,
        dtype=DTYPES[dtype],
        wire=DTYPES[wire],
        factor=factor,
        engine=ENGINES[engine],
        wrapper=wrapper,
        step=step,
        bucket=bucket,
    )
    return launch, _location(header)


def agree(headers: Sequence[bytes], *, so: str = "nothing was written") -> list[Location | None]:
    """Every rank's location. Raises MismatchError where the ranks' launches differ. so: what came of it."""
    first = headers[0][:_AGREED_BYTES]
    if any(header[:_AGREED_BYTES] != first for header in headers):  # as bytes: a NaN equals itself
        launches = [unpack(header)[0] for header in headers]
        error = MismatchError(_difference(launches, so))
        error.latest_step = max(launch.step for launch in launches)
        raise error
    return [_location(header) for header in headers]


def _location(header: bytes) -> Location | None:
    arena, offset = _WHERE.unpack_from(header, _AGREED_BYTES)
    return None if arena == STAGED else Location(arena, offset)


def _difference(launches: Sequence[Launch], so: str) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, launch in enumerate(launches):
        ranks_of.setdefault(_in_words(launch), []).append(rank)
    sides = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {words}"
        for words, ranks in ranks_of.items()
    )
    return (
        f"ranks launched different collectives, {so} ({sides}). "
        "Every rank must make the same calls in the same order with the same arguments"
    )


def _in_words(launch: Launch) -> str:
    if launch.kind == "empty":
        return f"empty of {launch.elements} bytes"
    if launch.kind == "open":
        return f"the first collective on a GPU, with {launch.elements} channels"
    if launch.kind == "wrap":
        return f"the module of wrapper {launch.wrapper} has changed, now {launch.elements} trainable parameters"
    words = f"{launch.kind} of {launch.elements} elements of {_short(launch.dtype)}, {launch.algorithm}"
    if launch.wire != launch.dtype:
        words += f", wire {_short(launch.wire)}"
    words += f", factor {launch.factor:.9g}, engine {launch.engine}"
    if launch.step >= 0:
        words += f", bucket {launch.bucket} of step {launch.step} of wrapper {launch.wrapper}"
    return words


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
