"""Shared memory of one machine: anonymous files that vanish with their last user.

A `memfd` has no name, so nothing stays behind after kill -9 and a small /dev/shm does not matter. Another process of
the same user opens it through /proc/<pid>/fd/<fd>. Every byte is reserved before use: touching an unreserved page of a
full machine would end the process with SIGBUS instead of an error.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

PAGE = mmap.PAGESIZE


def round_up(nbytes: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `nbytes`."""
    return -(-nbytes // multiple) * multiple


def create(nbytes: int) -> int:
    """A new anonymous shared file of `nbytes` bytes, not reserved yet; returns its descriptor. Raises OSError."""
    fd = os.memfd_create("fusedring", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_from(pid: int, fd: int) -> int:
    """Open the file behind descriptor `fd` of process `pid`, which must belong to the same user. Raises OSError."""
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def reserve(fd: int, offset: int, nbytes: int) -> None:
    """Back a range of the file with memory, on this process's NUMA node. Raises OSError."""
    if nbytes:
        os.posix_fallocate(fd, offset, nbytes)


def map_shared(fd: int, nbytes: int) -> mmap.mmap:
    """Map the whole file into this process. The mapping outlives `fd`, and ends with its last view."""
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def available_bytes() -> int:
    """Memory that this process could still get: what the kernel calls available, within its control group's limit."""
    available = _available_on_machine()
    limit, used = _control_group("memory.max"), _control_group("memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used + _reclaimable()))
    return available


def _available_on_machine() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _control_group_file(name: str) -> Path:
    group = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"), "/")
    return Path("/sys/fs/cgroup") / group.lstrip("/") / name


def _control_group(name: str) -> int | None:
    try:
        text = _control_group_file(name).read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _reclaimable() -> int:
    """Page cache that the control group counts as used but gives up on demand."""
    try:
        lines = _control_group_file("memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
