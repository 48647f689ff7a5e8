"""What a rank is about to do, in the form in which ranks show it to each other before anything is written.

Every rank packs its *message*, mostly a launch, into a header of `HEADER_BYTES` bytes. The first `_AGREED_BYTES` must
be equal on all ranks; `agree` words the difference, and since every rank sees every header, the text is the same
everywhere. The rest tells peers where a rank's tensor lies, and whether the rank has flags to tell behind its launch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import ClassVar

from fusedring.config import ALGORITHMS, DTYPES, ENGINES, KINDS, dtype_name
from fusedring.errors import MismatchError
from fusedring.plan.launch import Launch
from fusedring.transport.source import Location


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory in the workspace, so many bytes for each rank."""

    nbytes: int
    step: ClassVar[int] = -1

    @property
    def words(self) -> str:
        """As `Launch.words`."""
        return f"empty of {self.nbytes} bytes"


@dataclass(frozen=True, slots=True)
class Opening:
    """The opening of a GPU."""

    channels: int
    step: ClassVar[int] = -1

    @property
    def words(self) -> str:
        """As `Launch.words`."""
        return f"the first collective on a GPU, with {self.channels} channels"


@dataclass(frozen=True, slots=True)
class NewBuckets:
    """New buckets for a module that has changed, before a step of training."""

    parameters: int
    step: int
    wrapper: int

    @property
    def words(self) -> str:
        """As `Launch.words`."""
        return f"the module of wrapper {self.wrapper} has changed, now {self.parameters} trainable parameters"


Message = Launch | Allocation | Opening | NewBuckets

_MESSAGES = (Launch, Allocation, Opening, NewBuckets)
_DTYPES = tuple(map(dtype_name, DTYPES))
_ENGINES = (*ENGINES, "backend")

_LAUNCH = struct.Struct("<qqqqqqdqqqq")
_NUMBERS = struct.Struct("<qqqq")
"""The layout of every other message: which one it is, and its fields, as far as there are any."""
_WHERE = struct.Struct("<qq")
_AGREED_BYTES = _LAUNCH.size
_MORE = struct.Struct("<q")
_MORE_AT = _AGREED_BYTES + _WHERE.size
HEADER_BYTES = _MORE_AT + _MORE.size
_STAGED = _WHERE.pack(-1, 0)
"""The place of a tensor outside the workspace: it travels through the rank's staging slot."""


def pack(message: Message, location: Location | None = None) -> bytes:
    """The header of `message` at a rank whose tensor lies at `location` (None: outside the workspace)."""
    where = _STAGED if location is None else _WHERE.pack(location.arena, location.offset)
    if not isinstance(message, Launch):
        numbers = (*astuple(message), 0, 0, 0)[:3]
        return (
            _NUMBERS.pack(_MESSAGES.index(type(message)), *numbers).ljust(_AGREED_BYTES, b"\0") + where + _MORE.pack(0)
        )
    agreed = _LAUNCH.pack(
        0,
        KINDS.index(message.kind),
        ALGORITHMS.index(message.algorithm),
        message.elements,
        _DTYPES.index(message.dtype),
        _DTYPES.index(message.wire),
        message.factor,
        _ENGINES.index(message.engine),
        message.wrapper,
        message.step,
        message.bucket,
    )
    return agreed + where + _MORE.pack(message.more)


def unpack(header: bytes) -> tuple[Message, Location | None]:
    """The inverse of `pack`."""
    which, *numbers = _NUMBERS.unpack_from(header)
    message = _MESSAGES[which]
    if message is not Launch:
        return message(*numbers[: len(fields(message))]), _location(header)
    _, kind, algorithm, elements, dtype, wire, factor, engine, wrapper, step, bucket = _LAUNCH.unpack_from(header)
    launch = Launch(
        kind=KINDS[kind],
        algorithm=ALGORITHMS[algorithm],
        elements=elements,
        dtype=_DTYPES[dtype],
        wire=_DTYPES[wire],
        factor=factor,
        engine=_ENGINES[engine],
        wrapper=wrapper,
        step=step,
        bucket=bucket,
        more=anybody_has_more([header]),
    )
    return launch, _location(header)


def agree(headers: Sequence[bytes], *, so: str = "nothing was written") -> list[Location | None]:
    """Every rank's location. Raises MismatchError where the ranks' messages differ. so: what came of it."""
    first = headers[0][:_AGREED_BYTES]
    if any(header[:_AGREED_BYTES] != first for header in headers):  # as bytes: a NaN equals itself
        messages = [unpack(header)[0] for header in headers]
        error = MismatchError(_difference(messages, so))
        error.latest_step = max(message.step for message in messages)
        raise error
    return [_location(header) for header in headers]


def anybody_has_more(headers: Sequence[bytes]) -> bool:
    """Whether one of the launches says that its rank has more to tell."""
    return any(_MORE.unpack_from(header, _MORE_AT)[0] for header in headers)


def _location(header: bytes) -> Location | None:
    where = header[_AGREED_BYTES:_MORE_AT]
    return None if where == _STAGED else Location(*_WHERE.unpack(where))


def _difference(messages: Sequence[Message], so: str) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, message in enumerate(messages):
        ranks_of.setdefault(message.words, []).append(rank)
    sides = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {words}"
        for words, ranks in ranks_of.items()
    )
    return (
        f"ranks launched different collectives, {so} ({sides}). "
        "Every rank must make the same calls in the same order with the same arguments"
    )
