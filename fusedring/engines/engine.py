"""What an engine is: whatever carries out the launches of a process group, one after the other.

host.py       torch operations on shared memory
interpreter.py  the kernels under Triton's interpreter, on shared memory
cuda.py       the kernels on GPUs
backend.py    the group's own backend, on GPUs whose kernels do not reach each other
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from fusedring.engines.work import Pending, Work
from fusedring.plan.launch import Launch, Outcome
from fusedring.plan.policy import Rule
from fusedring.transport.gpu import Gpu, Stream
from fusedring.transport.source import Source


class Engine(Protocol):
    """Carries out the launches of one process group on one kind of device, one after another.

    name: by which users ask for it and headers name it. rules: which algorithm 'auto' stands for here.
    in_caller: whether `start` runs in the thread that asks, not on the group's own. reads_in_place: whether parts of a
    tensor may be handed over as sources. tells_values: whether outcomes say what the kernels learnt of the results.
    tells_more: whether outcomes say if some rank has more to tell, since ranks meet before each launch.
    gpu: where the tensors lie; None for host memory.
    """

    name: str
    rules: Sequence[Rule]
    in_caller: bool
    reads_in_place: bool
    tells_values: bool
    tells_more: bool

    @property
    def gpu(self) -> Gpu | None: ...

    def work(self, result: torch.Tensor, label: str) -> Work:
        """What stands for a launch that gives `result`, before it is started."""
        ...

    def start(
        self,
        launch: Launch,
        tensor: torch.Tensor,
        *,
        timeout: float,
        sources: Sequence[Source] = (),
        after: Sequence[Stream] = (),
    ) -> Outcome | Pending:
        """Carry out `launch` on this rank's flat, contiguous `tensor`, in place; on a GPU, give it to its stream.

        sources: parts of the tensor that are read elsewhere. after: on a GPU, the streams that produce what is read.

        Raises MismatchError if the ranks' launches differ, CollectiveTimeoutError if a rank makes no progress for
        `timeout` seconds, PeerLostError if one has ended.
        """
        ...

    def settle(self) -> None:
        """Wait until what was started has ended, which is bounded."""
        ...

    def close(self) -> None:
        """Let go of the memory. Nothing runs any more."""
        ...

    def abandon(self) -> None:
        """Close without waiting for long, and without the other ranks."""
        ...
