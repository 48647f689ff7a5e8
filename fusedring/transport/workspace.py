"""The workspace in shared memory of one machine.

Layout. A control file holds one block per rank, written by that rank alone: its signal (epoch and point passed so far),
its state, and its header, twice, by epoch parity. An *arena* is a file with a page of release words and one region per
rank. The first arena holds the staging slots, two per rank, by epoch parity.

Why parity is enough. A rank writes header or slot of epoch k+2 only after it met everybody in epoch k+1, and whoever
came to k+1 has finished reading those of epoch k.

Life and death. Each rank holds a POSIX lock on its byte of the control file; the kernel lets go of it when the process
ends, however it ends, and a waiter asks for it now and then. (Processes forked later do not inherit such locks.)

Release. When a region's last tensor is gone, its rank sets its release word, without any ceremony; an arena that all
ranks have released is unmapped at the next allocation.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from fusedring.errors import REOPEN, CollectiveTimeoutError, FusedRingError, OutOfMemoryError, PeerLostError
from fusedring.transport import agreement, memfd
from fusedring.transport.agreement import HEADER_BYTES, Allocation
from fusedring.transport.host_signals import Signal, check_machine, cores
from fusedring.transport.rendezvous import Rendezvous
from fusedring.transport.source import Location

SLOT_BYTES: Final = 2 << 20
"""A staging slot: small enough that the slots of all ranks stay in the last-level cache."""

# A rank's control block, in bytes: signal and bell, then state words (code, culprit, epoch), then two headers. Rank 0's
# also has the alarm: not 0 once any rank has reported a failure.
_BLOCK, _SIGNAL, _STATE, _ALARM, _HEADERS, _HEADER_STRIDE = 512, 0, 64, 96, 128, 128
assert HEADER_BYTES <= _HEADER_STRIDE
assert _HEADERS + 2 * _HEADER_STRIDE <= _BLOCK

_RUNNING, _TIMED_OUT, _LOST_PEER, _LEFT, _CLOSED = range(5)
_POINT_BITS: Final = 32
_FLOCK: Final = struct.Struct("hhqqi4x")
_OFFER: Final = struct.Struct("<qq")
"""What a rank tells the others while an arena is made: errno (0: fine) and, from rank 0, its file descriptor."""


class _Arena:
    """One mapped file: a page of release words, then a region of `stride` bytes per rank."""

    def __init__(self, fd: int, nbytes: int, world_size: int, rank: int) -> None:
        self.stride = _stride(nbytes)
        self.mapping = memfd.map_shared(fd, _arena_bytes(nbytes, world_size))
        self.released = memoryview(self.mapping).cast("Q")[:world_size]
        self.regions = [
            torch.frombuffer(self.mapping, dtype=torch.uint8, count=self.stride, offset=_region_start(nbytes, r))
            for r in range(world_size)
        ]
        self.address = self.regions[rank].data_ptr()


class Workspace:
    """The symmetric memory of one process group whose ranks run on one machine under one user: the same layout at every
    rank, mapped by all of them. All ranks make the same calls in the same order.

    epoch: how many times the ranks have met. It never goes back, and names the parity of the staging slots.
    slot_bytes: the size of a staging slot.

    Opening it is collective. Raises FusedRingError with the remedy where it cannot be had, CollectiveTimeoutError if a
    rank does not come within `timeout` seconds.
    """

    def __init__(self, rendezvous: Rendezvous, *, timeout: float) -> None:
        check_machine()
        self.rank, self.world_size, self.epoch = rendezvous.rank, rendezvous.world_size, 0
        self._pid = os.getpid()
        self.slot_bytes = SLOT_BYTES
        self._spin = self.world_size <= cores()
        self._failure: FusedRingError | None = None
        self._arenas: dict[int, _Arena] = {}
        self._arenas_made = 0
        self._creator_pid, self._control_fd = _open_control(rendezvous, timeout)
        self._control = memfd.map_shared(self._control_fd, self.world_size * _BLOCK)
        self._words = memoryview(self._control).cast("Q")
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._control))
        self._signals = [
            Signal(self._words, (r * _BLOCK + _SIGNAL) // 8, address + r * _BLOCK + _SIGNAL)
            for r in range(self.world_size)
        ]
        # From here on this lock stands for this process being alive: no descriptor of the control file may be closed
        # before close(), since that would let go of it.
        fcntl.lockf(self._control_fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.rank)
        try:
            rendezvous.exchange(None, timeout=timeout, purpose="open the workspace")
            self._staging = self._add_arena(2 * SLOT_BYTES, timeout=timeout)
        except BaseException:
            self.close()
            raise

    # Memory

    def allocate(self, nbytes: int, *, timeout: float) -> torch.Tensor:
        """This rank's region, uint8, of a new arena of `nbytes` bytes per rank. It lives as long as its tensor."""
        arena, pid = self._arenas[self._add_arena(nbytes, timeout=timeout)], self._pid
        owner = arena.regions[self.rank].numpy()[: max(nbytes, 1)]

        def release(released: memoryview = arena.released, rank: int = self.rank) -> None:
            if os.getpid() == pid:  # a forked child's copy of the tensor says nothing about ours
                released[rank] = 1

        weakref.finalize(owner, release).atexit = False
        return torch.from_numpy(owner)[:nbytes]

    def locate(self, tensor: torch.Tensor) -> Location | None:
        """Where `tensor` lies in this rank's part of the workspace; None if it is ordinary memory."""
        first, nbytes = tensor.data_ptr(), tensor.nbytes
        for number, arena in self._arenas.items():
            if arena.address <= first and first + nbytes <= arena.address + arena.stride:
                return Location(number, first - arena.address)
        return None

    def bytes_at(self, rank: int, location: Location, nbytes: int) -> torch.Tensor:
        """`nbytes` bytes of `rank`'s memory at `location`, uint8."""
        return self._arenas[location.arena].regions[rank][location.offset : location.offset + nbytes]

    def slot(self, rank: int, parity: int) -> torch.Tensor:
        """`rank`'s staging slot, uint8, for tensors that are not in the workspace."""
        return self._arenas[self._staging].regions[rank][parity * SLOT_BYTES : (parity + 1) * SLOT_BYTES]

    def _add_arena(self, nbytes: int, *, timeout: float) -> int:
        """Map a new arena of `nbytes` bytes per rank. All ranks do, or all raise the same error."""
        agreement.agree(self.meet(agreement.pack(Allocation(nbytes)), timeout=timeout))
        total, fd, failure = _arena_bytes(nbytes, self.world_size), -1, 0
        try:
            try:
                if self.rank == 0:
                    if total > memfd.available_bytes():
                        raise OSError(errno.ENOMEM, "not enough memory")
                    fd = memfd.create(total)
                    memfd.reserve(fd, 0, memfd.PAGE)
            except OSError as error:
                failure = error.errno or errno.EIO
            failure, fd_of_creator = _OFFER.unpack_from(self.meet(_OFFER.pack(failure, fd), timeout=timeout)[0])
            try:
                if not failure:
                    fd = fd if self.rank == 0 else memfd.open_from(self._creator_pid, fd_of_creator)
                    memfd.reserve(fd, _region_start(nbytes, self.rank), _stride(nbytes))
            except OSError as error:
                failure = error.errno or errno.EIO
            offers = self.meet(_OFFER.pack(failure, -1), timeout=timeout)
            failure = max(_OFFER.unpack_from(offer)[0] for offer in offers)
            if failure:
                raise OutOfMemoryError(
                    f"cannot reserve {total} bytes of shared memory ({nbytes} for each of {self.world_size} ranks): "
                    f"{os.strerror(failure)}. Use a smaller tensor or model, close what is no longer used "
                    "(fusedring.close), or raise the memory limit of the machine or container"
                )
            self._forget_released_arenas()
            number = self._arenas_made
            self._arenas_made += 1
            self._arenas[number] = _Arena(fd, nbytes, self.world_size, self.rank)
            return number
        finally:
            if fd >= 0:
                os.close(fd)

    def _forget_released_arenas(self) -> None:
        for number in [n for n, arena in self._arenas.items() if all(arena.released)]:
            del self._arenas[number]

    # Meeting and waiting

    def meet(self, header: bytes, *, timeout: float) -> list[bytes]:
        """Begin the next epoch: show `header` to all ranks and wait for theirs."""
        self._check_health()
        self.epoch += 1
        at = _HEADERS + self.epoch % 2 * _HEADER_STRIDE
        mine = self.rank * _BLOCK + at
        self._control[mine : mine + len(header)] = header
        self.post(0)
        self.wait(range(self.world_size), 0, timeout=timeout)
        return [self._control[r * _BLOCK + at : r * _BLOCK + at + len(header)] for r in range(self.world_size)]

    def post(self, point: int, *, wake: bool = True) -> None:
        """Say that this rank has passed `point` (1, 2, ...) of this epoch."""
        if self._words[_ALARM // 8]:  # who gave up may use its memory again: do not go on writing there
            self._check_health()
        # A lone rank has nobody to wake.
        self._signals[self.rank].post(self.epoch << _POINT_BITS | point, wake=wake and self.world_size > 1)

    def wait(self, ranks: Sequence[int], point: int, *, timeout: float) -> None:
        """Wait until `ranks` have passed `point` of this epoch.

        Raises CollectiveTimeoutError after `timeout` seconds without progress, PeerLostError if one of them died, or
        whatever another rank reported first.
        """
        value = self.epoch << _POINT_BITS | point
        for r in ranks:
            signal = self._signals[r]
            if signal.value >= value:
                continue
            look = functools.partial(self._look, r, value)
            if not signal.wait(value, spin=self._spin, timeout=timeout, look=look):
                late = [str(p) for p in ranks if self._signals[p].value < value]
                what = "join a collective" if point == 0 else "go on within a collective"
                self._report(_TIMED_OUT, r)
                raise self._remember(
                    CollectiveTimeoutError(
                        f"rank {self.rank} waited {timeout:g} s for rank(s) {', '.join(late)} to {what} (epoch "
                        f"{self.epoch}). Every rank must make the same calls; if a rank is only late, pass a longer "
                        f"timeout. {REOPEN}"
                    )
                )

    def is_lost(self, rank: int) -> bool:
        """Whether a rank has ended or closed its workspace: it will do nothing more."""
        return not self._holds_lock(rank) or self._state(rank)[0] == _CLOSED

    def _look(self, awaited: int, value: int) -> None:
        """Raise if the wait for `awaited` cannot end well."""
        self._check_health()
        # What a rank posted before it ended counts, so its signal is read after its lock.
        if self.is_lost(awaited) and self._signals[awaited].value < value:
            self._report(_LOST_PEER, awaited)
            how = "closed its workspace" if self._state(awaited)[0] == _CLOSED else "ended"
            raise self._remember(PeerLostError(f"rank {awaited} {how} while rank {self.rank} waited for it. {REOPEN}"))

    def _check_health(self) -> None:
        """Raise if this rank, or one of its peers, has reported a failure."""
        if os.getpid() != self._pid:
            raise FusedRingError(
                "a forked process cannot take part in its parent's collectives: it needs its own group"
            )
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))
        for r in range(self.world_size):
            state, culprit, epoch = self._state(r)
            if state == _TIMED_OUT:
                text = f"rank {r} gave up waiting for rank {culprit} in epoch {epoch}. {REOPEN}"
                raise self._remember(CollectiveTimeoutError(text))
            if state == _LOST_PEER:
                raise self._remember(PeerLostError(f"rank {culprit} was lost, as rank {r} reported. {REOPEN}"))
            if state == _LEFT:
                text = f"rank {r} left a collective half done (epoch {epoch}): see the error there. {REOPEN}"
                raise self._remember(FusedRingError(text))

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one left an epoch half done. Every later call raises on every rank."""
        if self._failure is None:
            self._report(_LEFT, self.rank)
            self._remember(FusedRingError(f"an earlier collective was left half done ({error!r}). {REOPEN}"))

    def close(self) -> None:
        """Let go of the memory. Not collective; ranks that still wait for this one are told."""
        if self._control_fd < 0:
            return
        self._remember(FusedRingError("this workspace was closed"))
        if self._state(self.rank)[0] == _RUNNING:  # a failure stays known to peers that come late
            self._report(_CLOSED, self.rank)
        self._signals[self.rank].post(self._signals[self.rank].value)
        os.close(self._control_fd)
        self._control_fd = -1
        self._arenas.clear()

    def _state(self, rank: int) -> tuple[int, int, int]:
        at = (rank * _BLOCK + _STATE) // 8
        return self._words[at], self._words[at + 1], self._words[at + 2]

    def _report(self, code: int, culprit: int) -> None:
        at = (self.rank * _BLOCK + _STATE) // 8
        self._words[at + 1], self._words[at + 2] = culprit, self.epoch
        self._words[at] = code
        self._words[_ALARM // 8] = 1

    def _remember(self, failure: FusedRingError) -> FusedRingError:
        self._failure = failure
        return failure

    def _holds_lock(self, rank: int) -> bool:
        if rank == self.rank:
            return True
        question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        kind = _FLOCK.unpack(fcntl.fcntl(self._control_fd, fcntl.F_GETLK, question))[0]
        return bool(kind != fcntl.F_UNLCK)


def _open_control(rendezvous: Rendezvous, timeout: float) -> tuple[int, int]:
    """The control file, made by rank 0 and opened by all: rank 0's process id, and this rank's descriptor."""
    fd, rank, purpose = -1, rendezvous.rank, "open the workspace"
    try:
        if rank == 0:
            fd = memfd.create(rendezvous.world_size * _BLOCK)
            memfd.reserve(fd, 0, rendezvous.world_size * _BLOCK)
        mine = {"host": _host(), "pid": os.getpid(), "uid": os.getuid(), "fd": fd}
        ranks = rendezvous.exchange(mine, timeout=timeout, purpose=purpose)
        problem = ""
        if any(r["host"] != ranks[0]["host"] for r in ranks):
            hosts = "; ".join(f"rank {i} in {r['host']}" for i, r in enumerate(ranks))
            problem = f"the host engine needs all ranks of the group in one machine or container ({hosts})"
        elif rank > 0:
            try:
                fd = memfd.open_from(ranks[0]["pid"], ranks[0]["fd"])
            except OSError as error:
                problem = (
                    f"rank {rank} (user {mine['uid']}) cannot open the shared memory of rank 0 (user "
                    f"{ranks[0]['uid']}): {error.strerror}. Run all ranks as one user"
                )
        problems = list(filter(None, rendezvous.exchange(problem, timeout=timeout, purpose=purpose)))
        if problems:
            raise FusedRingError(problems[0])
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    return int(ranks[0]["pid"]), fd


def _host() -> str:
    """Names the machine and the process namespace: ranks that share both can open each other's files."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{os.uname().nodename} {boot} {Path('/proc/self/ns/pid').readlink()}"


def _stride(nbytes: int) -> int:
    return memfd.round_up(max(nbytes, 1), memfd.PAGE)


def _region_start(nbytes: int, rank: int) -> int:
    return memfd.PAGE + rank * _stride(nbytes)


def _arena_bytes(nbytes: int, world_size: int) -> int:
    return _region_start(nbytes, world_size)
