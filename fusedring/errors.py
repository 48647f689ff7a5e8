"""What fusedring raises. Wrong arguments are plain `ValueError`; everything below happens while ranks work together."""

REOPEN = "Call fusedring.close() on all ranks of the group before its next collective"
"""What to do about most of them."""


class FusedRingError(RuntimeError):
    """Base class: the ranks could not do what was asked, and the message says which rank and what to do."""


class CollectiveTimeoutError(FusedRingError, TimeoutError):
    """A rank made no progress for `timeout` seconds.

    After a collective the group's workspace stays unusable until all ranks close it. An opening that failed can be
    tried again, and a `Work` that was not waited for long enough goes on.
    """


class OutOfMemoryError(FusedRingError, MemoryError):
    """Shared memory could not be reserved, on any rank. Nothing was allocated, and the group goes on."""


class PeerLostError(FusedRingError):
    """A rank's process ended, or closed its workspace, while others still waited for it."""


class MismatchError(FusedRingError, ValueError):
    """Ranks asked for different things. Nothing was written; the text is the same on every rank.

    latest_step: the highest number of a training step among the ranks' launches, -1 if none belonged to one.
    """

    latest_step: int = -1


class NotCapturedError(FusedRingError):
    """A CUDA graph cannot capture a collective yet; nothing was launched, and the group is as it was."""
