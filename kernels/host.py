"""One launch on host memory as one compiled function: meet, see that all ranks launch the same, reduce, leave.

`launch` takes the address of a job (see host_layout.py) and says why it came back: because the launch has ended,
because ranks differ, because some rank has failed, or because a wait has lasted for a slice of time. Then the caller
may look after the other ranks, and call it again with the same job: it goes on where it was, since every position
begins with its waits and does nothing before they have ended.
"""

from fusedring.kernels.host_direct import run_direct, run_exchange, stage_exchange, stage_first_window
from fusedring.kernels.host_layout import (
    ALARMED,
    ALGORITHM,
    ALL_REDUCE,
    ARENA,
    CLOCK,
    KIND,
    MEETING,
    MISMATCH,
    NOT_BEGUN,
    ONE_SHOT,
    POSITION,
    RANK,
    RING,
    STARTED,
    WAITING,
    WORLD,
)
from fusedring.kernels.host_memory import (
    compiled,
    default_floating_point,
    get,
    is_alarmed,
    now,
    post,
    put,
    restore_floating_point,
    wait,
)
from fusedring.kernels.host_places import header_of, read_headers
from fusedring.kernels.host_ring import run_ring


@compiled
def _is_exchange(job):
    """Whether every rank sums everything: one_shot, whose other kinds are those of two_shot."""
    return get(job, ALGORITHM) == ONE_SHOT and get(job, KIND) == ALL_REDUCE


@compiled
def _is_ring(job):
    return get(job, ALGORITHM) == RING and get(job, WORLD) > 1


@compiled
def _begin(job):
    """Come to the meeting. What goes to this rank's own slot may be written before: nobody reads there now."""
    point = 0
    if _is_exchange(job):
        stage_exchange(job, 0)
    elif not _is_ring(job) and get(header_of(job, get(job, RANK)), ARENA) < 0:
        stage_first_window(job)
        point = 1
    post(job, point)


@compiled
def _run(job):
    if get(job, POSITION) == NOT_BEGUN:
        if is_alarmed(job):
            return ALARMED
        _begin(job)
        put(job, POSITION, MEETING)
    if get(job, POSITION) == MEETING:
        for other in range(get(job, WORLD)):
            if not wait(job, other, 0):
                return WAITING
        put(job, STARTED, now(job))
        if not read_headers(job):
            return MISMATCH
        put(job, POSITION, 0)
    if _is_exchange(job):
        return run_exchange(job)
    if _is_ring(job):
        return run_ring(job)
    return run_direct(job)


def launch(job):
    """Begin or go on with a launch; returns why it came back."""
    before = default_floating_point(job + 8 * CLOCK)
    reason = _run(job)
    restore_floating_point(job + 8 * CLOCK, before)
    return reason
