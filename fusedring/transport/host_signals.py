"""Signals between processes: words in shared memory that only grow, and how to wait for them.

Memory order. A signal has one writer. The writer stores data, then `post`s; a reader that sees the new value sees the
data. x86-64 keeps stores in order and loads in order, so plain accesses are enough; elsewhere `_fence` orders them
(written for aarch64 after the kernel's documentation, never run there).

Sleeping. Beside each signal stands a *bell*, a 32-bit futex word that its writer bumps after every post. A waiter reads
the bell, looks at the signal, and sleeps only while the bell still has the value it read, so no post is missed. The
futex call lets go of the GIL, so a waiting communication thread costs backward nothing.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable

_MACHINE = platform.machine()
_FUTEX_NUMBER = {"x86_64": 202, "aarch64": 98}
_MEMBARRIER_NUMBER = 283
_MEMBARRIER_PRIVATE_EXPEDITED, _MEMBARRIER_REGISTER_PRIVATE_EXPEDITED = 1 << 3, 1 << 4
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYBODY = 0, 1, 2**31 - 1

SPIN_SECONDS = 20e-6
"""How long a waiter looks before it sleeps. Waking a sleeper costs about as much (50 µs in a virtual machine)."""

SLICE_SECONDS = 0.02
"""The longest sleep between two looks at the peers' health: how soon a death is noticed."""


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_prompt_syscall = ctypes.PyDLL(None).syscall
"""Keeps the GIL: for calls that return at once, where handing it over and back would cost more than the call."""
for _call in (_syscall, _prompt_syscall):
    _call.restype = ctypes.c_long
    _call.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint,
    ]


def check_machine() -> None:
    """Raises RuntimeError on a processor whose system calls and memory order this file does not know."""
    if _MACHINE not in _FUTEX_NUMBER:
        raise RuntimeError(f"fusedring's host engine runs on {' and '.join(_FUTEX_NUMBER)}, not on {_MACHINE}")
    if _MACHINE != "x86_64":
        _syscall(_MEMBARRIER_NUMBER, None, 0, 0, None, None, 0)
        _membarrier(_MEMBARRIER_REGISTER_PRIVATE_EXPEDITED)


def _membarrier(command: int) -> None:
    if _syscall(_MEMBARRIER_NUMBER, command, 0, 0, None, None, 0) != 0:
        raise OSError(ctypes.get_errno(), "membarrier failed")


if _MACHINE == "x86_64":

    def _fence() -> None:
        """Stores stay behind stores, and loads behind loads: nothing to do."""
else:

    def _fence() -> None:
        """A full barrier in the calling thread."""
        _membarrier(_MEMBARRIER_PRIVATE_EXPEDITED)


class Signal:
    """One growing 64-bit word and its bell, in 16 bytes of shared memory.

    words: a memoryview with format 'Q' over the shared mapping; index: where the signal's word stands in it; address:
    the address of that word.
    """

    __slots__ = ("_bell_address", "_index", "_words")

    def __init__(self, words: memoryview, index: int, address: int) -> None:
        self._words, self._index, self._bell_address = words, index, address + 8

    @property
    def value(self) -> int:
        """What was posted last; 0 at first."""
        value: int = self._words[self._index]
        _fence()
        return value

    def post(self, value: int, *, wake: bool = True) -> None:
        """Publish `value`, which is above all earlier ones, after everything this thread stored before.

        wake=False leaves sleepers asleep: for progress that nobody waits for.
        """
        _fence()
        self._words[self._index] = value
        if wake:
            self._words[self._index + 1] = (self._words[self._index + 1] + 1) & 0xFFFFFFFF
            _prompt_syscall(_FUTEX_NUMBER[_MACHINE], self._bell_address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def sleep(self, ready: Callable[[], bool], seconds: float) -> None:
        """Sleep until the next post, for `seconds` at most; not at all if `ready()` holds."""
        bell = self._words[self._index + 1]
        if ready():
            return
        span = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        _syscall(_FUTEX_NUMBER[_MACHINE], self._bell_address, _FUTEX_WAIT, bell, ctypes.addressof(span), None, 0)

    def wait(self, value: int, *, spin: bool, timeout: float, look: Callable[[], None]) -> bool:
        """Wait until the signal has reached `value`; False after `timeout` seconds in which it did not move.

        spin: look for a moment before the first sleep (not when ranks outnumber cores). look: called about every
        `SLICE_SECONDS`; it raises to end the wait.
        """
        if self.value >= value:
            return True
        if spin:
            until = time.perf_counter() + SPIN_SECONDS
            while time.perf_counter() < until:
                if self.value >= value:
                    return True
        seen, moved = self.value, time.monotonic()
        while True:
            self.sleep(lambda: self.value >= value, min(SLICE_SECONDS, timeout))
            now = self.value
            if now >= value:
                return True
            look()
            if now != seen:
                seen, moved = now, time.monotonic()
            elif time.monotonic() - moved >= timeout:
                return False


def cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0))
