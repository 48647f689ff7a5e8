"""What other libraries take to average the same tensor: gloo, MPI, NCCL and torch's symmetric memory.

Each gives the mean over the ranks in `dtype`, by the operations that its users write: a sum and a division, and for a
narrower wire what torch's compress hooks do around them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from fusedring.bench.place import Place, total
from fusedring.config import dtype_name


@dataclass(frozen=True, slots=True)
class Case:
    """What is reduced: `nbytes` bytes of `dtype`, which cross between ranks as `wire` (None: as they are)."""

    nbytes: int
    dtype: torch.dtype
    wire: torch.dtype | None

    @property
    def elements(self) -> int:
        """Of the tensor."""
        return self.nbytes // self.dtype.itemsize

    def __str__(self) -> str:
        wire = f", wire {dtype_name(self.wire)}" if self.wire else ""
        return f"{self.nbytes:,} bytes of {dtype_name(self.dtype)}{wire}"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to reduce: `act` takes what is in `tensor` and returns the tensor that has the result.

    library: 'fusedring', 'gloo', ... or 'copy', which reduces nothing. tensors: 'workspace' or 'ordinary'.
    """

    library: str
    algorithm: str
    tensors: str
    tensor: torch.Tensor
    act: Callable[[], torch.Tensor]


Maker = Callable[[Case, Place], Way | str]
"""Makes the way of one library, or says why it cannot (the same on all ranks)."""


def with_torch(library: str, case: Case, place: Place) -> Way:
    """torch.distributed's all_reduce, and the division or the conversions around it."""
    tensor = torch.empty(case.elements, dtype=case.dtype, device=place.device)

    def plain() -> torch.Tensor:
        dist.all_reduce(tensor, group=place.group)
        return tensor.div_(place.world)

    def plain_mean() -> torch.Tensor:
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=place.group)
        return tensor

    def compressed() -> torch.Tensor:
        narrow = tensor.to(case.wire).div_(place.world)
        dist.all_reduce(narrow, group=place.group)
        return tensor.copy_(narrow)

    act = compressed if case.wire else plain_mean if library == "NCCL" else plain
    return Way(library, "", "ordinary", tensor, act)


def with_mpi(case: Case, place: Place) -> Way | str:
    """MPI's Allreduce in place, and the division."""
    if place.mpi is None:
        return "MPI did not start these ranks"
    if case.wire is not None or case.dtype not in (torch.float32, torch.float64):
        return "MPI has float32 and float64, and no narrower wire"
    from mpi4py import MPI

    tensor = torch.empty(case.elements, dtype=case.dtype)
    memory = tensor.numpy()

    def act() -> torch.Tensor:
        place.mpi.Allreduce(MPI.IN_PLACE, memory, op=MPI.SUM)
        return tensor.div_(place.world)

    return Way("MPI", "", "ordinary", tensor, act)


def with_symmetric_memory(name: str, case: Case, place: Place) -> Way | str:
    """One of torch's operations on symmetric memory, and the division."""
    if case.wire is not None:
        return "it has no narrower wire"
    way: Way | None = None
    why = "it failed on another rank"
    try:
        from fusedring.bench.symmetric_memory import symmetric_all_reduce

        assert place.group is not None
        memory, reduce = symmetric_all_reduce(name, case.elements, case.dtype, place.device, place.group)
        reduce()
        torch.cuda.synchronize(place.device)
        way = Way(f"torch {name}", "", "symmetric", memory, lambda: reduce().div_(place.world))
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"
    failed = total(int(way is None))  # all ranks take it, or none does
    return way if way is not None and failed == 0 else why


LIBRARIES: Mapping[str, Mapping[str, Maker]] = {
    "cpu": {"gloo": partial(with_torch, "gloo"), "MPI": with_mpi},
    "cuda": {
        "NCCL": partial(with_torch, "NCCL"),
        # Written out, because symmetric_memory.py cannot be imported everywhere.
        "torch one_shot_all_reduce": partial(with_symmetric_memory, "one_shot_all_reduce"),
        "torch two_shot_all_reduce_": partial(with_symmetric_memory, "two_shot_all_reduce_"),
        "torch multimem_all_reduce_": partial(with_symmetric_memory, "multimem_all_reduce_"),
    },
}
"""By the kind of device. The first one is what the others' speed is given in multiples of."""


def baseline(device: str) -> str:
    """The library whose time all others are compared with."""
    return next(iter(LIBRARIES[device]))


def others(
    case: Case, place: Place, libraries: Mapping[str, Mapping[str, Maker]] = LIBRARIES
) -> tuple[list[Way], dict[str, str]]:
    """The ways of all libraries that can be had here, and why the rest cannot (collective)."""
    ways, missing = [], {}
    for name, make in libraries[place.device.type].items():
        way = make(case, place)
        if isinstance(way, str):
            missing[name] = way
        else:
            ways.append(way)
    return ways, missing
