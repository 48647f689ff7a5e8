"""The collectives that a user calls. All ranks of the group call them in the same order with the same arguments."""

from __future__ import annotations

import math
from typing import Literal, TypedDict, Unpack, overload

import torch
import torch.distributed as dist

from fusedring.config import (
    RingConfig,
    WireDtype,
    check_dtype,
    check_engine,
    check_timeout,
    dtype_name,
    scale_factor,
)
from fusedring.engines.work import Work
from fusedring.group.groups import close, communicator_of
from fusedring.plan.launch import Launch
from fusedring.plan.plan import split_evenly

__all__ = ["Work", "all_gather", "all_reduce", "close", "empty", "reduce_scatter"]

Group = dist.ProcessGroup | None


class _Options(TypedDict, total=False):
    wire_dtype: WireDtype
    algorithm: str
    engine: str
    group: Group
    timeout: float | None


class _ReduceOptions(_Options, total=False):
    op: str
    scale: float | None


def empty(
    *size: int | tuple[int, ...],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    group: Group = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """An uninitialised tensor in the group's workspace (collective): reduced without being copied.

    size: as for torch.empty, the same on all ranks. dtype: float32, float64, float16 or bfloat16; None is torch's
    default dtype. The memory is given back after the tensor is gone on all ranks, at the group's next `empty`.

    Raises ValueError for a size, dtype or device that cannot be, MismatchError if ranks ask for different numbers of
    bytes, OutOfMemoryError if there is not enough memory, CollectiveTimeoutError naming ranks that do not come within
    `timeout` seconds (None: the group's own timeout).
    """
    shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)  # type: ignore[arg-type]
    if any(n < 0 for n in shape):
        raise ValueError(f"size must not be negative, got {tuple(shape)}")
    dtype = dtype or torch.get_default_dtype()
    check_dtype(dtype)
    check_timeout(timeout)
    device = torch.device(device)
    check_engine("auto", device)
    communicator = communicator_of(group, timeout=timeout)
    memory = communicator.allocate(math.prod(shape) * dtype.itemsize, device, timeout=timeout)
    return memory.view(dtype).view(shape)


@overload
def all_reduce(
    tensor: torch.Tensor, *, async_op: Literal[False] = False, **options: Unpack[_ReduceOptions]
) -> torch.Tensor: ...
@overload
def all_reduce(tensor: torch.Tensor, *, async_op: Literal[True], **options: Unpack[_ReduceOptions]) -> Work: ...
def all_reduce(
    tensor: torch.Tensor,
    *,
    op: str = "avg",
    scale: float | None = None,
    wire_dtype: WireDtype = None,
    algorithm: str = "auto",
    engine: str = "auto",
    group: Group = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> torch.Tensor | Work:
    """Replace `tensor` on every rank by scale · (mean or sum over the ranks), the same bits everywhere.

    tensor: contiguous, float32, float64, float16 or bfloat16, of any shape; the same element count and dtype on all
        ranks, in the workspace (`empty`) or not.
    op: 'avg' or 'sum'. scale: a number, applied before anything is narrowed; None is 1.
    wire_dtype: None (the tensor's own dtype), 'fp16', 'bf16', torch.float16 or torch.bfloat16.
    algorithm: 'auto', 'ring', 'two_shot', 'one_shot' or 'master'. engine: 'auto', 'host' or 'triton'.
    timeout: seconds without progress in one wait; None is the group's own timeout.

    Returns `tensor`, or with async_op=True a `Work`; leave the tensor alone until its `wait` has returned.

    Raises ValueError for wrong arguments, RuntimeError if several processes run without a process group, MismatchError
    (same text on every rank, nothing written) if ranks differ in kind, size, dtype, algorithm or scale,
    CollectiveTimeoutError naming the ranks that made no progress, PeerLostError if one of them ended.
    """
    config = RingConfig(wire_dtype, algorithm, engine, timeout)
    return _collective("all_reduce", tensor, op, scale, config, group, async_op)


@overload
def reduce_scatter(
    tensor: torch.Tensor, *, async_op: Literal[False] = False, **options: Unpack[_ReduceOptions]
) -> torch.Tensor: ...
@overload
def reduce_scatter(tensor: torch.Tensor, *, async_op: Literal[True], **options: Unpack[_ReduceOptions]) -> Work: ...
def reduce_scatter(
    tensor: torch.Tensor,
    *,
    op: str = "avg",
    scale: float | None = None,
    wire_dtype: WireDtype = None,
    algorithm: str = "auto",
    engine: str = "auto",
    group: Group = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> torch.Tensor | Work:
    """Reduce as `all_reduce`, but leave at rank r only part r of the flattened tensor, as a view of it.

    Parts are multiples of 16 elements, as even as that allows; the rest of the tensor is unspecified afterwards.
    `all_gather` of the same tensor then completes what `all_reduce` would have given, bit for bit.

    Returns the view (one-dimensional), or with async_op=True a `Work` whose result() it is. Raises as `all_reduce`.
    """
    config = RingConfig(wire_dtype, algorithm, engine, timeout)
    return _collective("reduce_scatter", tensor, op, scale, config, group, async_op)


@overload
def all_gather(
    tensor: torch.Tensor, *, async_op: Literal[False] = False, **options: Unpack[_Options]
) -> torch.Tensor: ...
@overload
def all_gather(tensor: torch.Tensor, *, async_op: Literal[True], **options: Unpack[_Options]) -> Work: ...
def all_gather(
    tensor: torch.Tensor,
    *,
    wire_dtype: WireDtype = None,
    algorithm: str = "auto",
    engine: str = "auto",
    group: Group = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> torch.Tensor | Work:
    """Give every rank the part that `reduce_scatter` leaves at each: part r of the flattened tensor comes from rank r.

    In place. Values are narrowed to the wire dtype, at their owner too. Returns and raises as `all_reduce`.
    """
    config = RingConfig(wire_dtype, algorithm, engine, timeout)
    return _collective("all_gather", tensor, "sum", None, config, group, async_op)


def _collective(
    kind: str,
    tensor: torch.Tensor,
    op: str,
    scale: float | None,
    config: RingConfig,
    group: Group,
    async_op: bool,
) -> torch.Tensor | Work:
    _check_tensor(tensor)
    check_engine(config.engine, tensor.device)
    scale_factor(op, scale, 1, tensor.dtype)
    communicator = communicator_of(group, timeout=config.timeout)
    engine = communicator.engine_for(config.engine, tensor.device, timeout=config.timeout)
    launch = Launch(
        kind,
        communicator.algorithm_for(config.algorithm, tensor.nbytes, engine),
        tensor.numel(),
        dtype_name(tensor.dtype),
        dtype_name(config.wire or tensor.dtype),
        scale_factor(op, scale, communicator.world_size, tensor.dtype),
        engine.name,
    )
    flat = tensor.detach().view(-1)
    result = tensor
    if kind == "reduce_scatter":
        start, stop = split_evenly(launch.elements, communicator.world_size)[communicator.rank]
        result = flat[start:stop]
    _bump_version(tensor)
    if async_op:
        return communicator.submit(engine, launch, flat, result=result, timeout=config.timeout)
    communicator.run(engine, launch, flat, timeout=config.timeout)
    return result


def _check_tensor(tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"expected a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ValueError(f"the tensor must be dense, got layout {tensor.layout}")
    check_dtype(tensor.dtype)
    if not tensor.is_contiguous():
        raise ValueError(
            f"the tensor must be contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}: "
            "reduce tensor.contiguous() and copy it back"
        )


def _bump_version(tensor: torch.Tensor) -> None:
    """Autograd must notice that a tensor it saved was changed."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
