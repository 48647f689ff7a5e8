"""fusedring's averaging inside torch's own DistributedDataParallel.

    model = DistributedDataParallel(model)
    model.register_comm_hook(fusedring.CommHookState(wire_dtype="bf16"), fusedring.comm_hook)

Torch's class fills the buckets and calls the hook once for each, in the same order on all ranks. No annotation here is
a string (there is no `from __future__ import annotations`): torch compares those of a hook with the types themselves.
"""

import torch
import torch.distributed as dist

from fusedring.config import DTYPES, RingConfig, WireDtype
from fusedring.group.collectives import all_reduce
from fusedring.torch_internals import GradBucket


class CommHookState:
    """How `comm_hook` averages.

    process_group: the one that DistributedDataParallel was given; None is the default group.
    wire_dtype, algorithm, timeout: as for `fusedring.all_reduce`.

    Making one is not collective; the first bucket opens the group's workspace. Raises ValueError for wrong arguments.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        wire_dtype: WireDtype = None,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> None:
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise ValueError(
                f"process_group must be a process group that this rank is a member of, or None, got {process_group!r}"
            )
        self.process_group = process_group
        self.config = RingConfig(wire_dtype, algorithm, timeout=timeout)


def comm_hook(state: CommHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks, in place: what `DistributedDataParallel.register_comm_hook` takes.

    Every rank gets the bits that `fusedring.all_reduce` gives. A bucket may be float32, float64, float16, bfloat16, or
    complex, whose real and imaginary parts are averaged.

    A collective that fails ends `backward()` with a RuntimeError that holds the text of fusedring's error, since torch
    passes on no other type. After a MismatchError, or once all ranks have called `fusedring.close()`, training can go
    on. On a GPU such a failure is found by a later step. Raises ValueError for a bucket that cannot be reduced.
    """
    buffer: torch.Tensor = bucket.buffer()
    reals = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    if reals.dtype not in DTYPES or reals.layout != torch.strided:
        shapes = ", ".join(str(list(parameter.shape)) for parameter in bucket.parameters())
        raise ValueError(
            f"bucket {bucket.index()} (parameters of shape {shapes}) is {buffer.dtype}, {buffer.layout}, and gradients "
            f"of that kind cannot be reduced: they must be dense, and one of {', '.join(map(str, DTYPES))} or complex"
        )
    config = state.config
    work = all_reduce(
        reals,
        wire_dtype=config.wire_dtype,
        algorithm=config.algorithm,
        group=state.process_group,
        timeout=config.timeout,
        async_op=True,
    )

    def take(ended: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        ended.value()  # raises what went wrong. Only an exception in a callback is one for torch's DDP
        return buffer

    return work.get_future().then(take)
