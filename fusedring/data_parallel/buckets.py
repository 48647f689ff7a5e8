"""Which gradient lives where: buckets of one dtype, and each parameter's view into its bucket.

Parameters are packed in the order in which backward produces their gradients, so that a bucket fills early: first in
reverse order of registration, which is about that order, then in the order that was seen. A gradient starts at a
multiple of 16 elements; the padding stays zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusedring.config import DTYPES
from fusedring.plan.plan import ALIGNMENT
from fusedring.torch_internals import is_zero_tensor

_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


@dataclass(slots=True)
class Entry:
    """One parameter's place, from element `offset` of its bucket.

    `view` has the parameter's shape and, where they are dense, its strides. `own` is the gradient that was handed out
    last where it is not `view`: nobody else's, so it may be written.
    """

    name: str
    parameter: torch.nn.Parameter
    offset: int
    view: torch.Tensor
    own: torch.Tensor | None = None

    def dense_grad(self) -> torch.Tensor:
        """What is in `.grad`. Raises ValueError if that is sparse."""
        grad = self.parameter.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise ValueError(f"the gradient of parameter {self.name} is sparse: use sparse=False in its embedding")
        return grad.detach()

    def in_place(self, grad: torch.Tensor) -> torch.Tensor | None:
        """The memory of `grad` as a vector in the order of the bucket; None if its values do not lie there so."""
        plain = type(grad) is torch.Tensor and not grad.is_neg() and not is_zero_tensor(grad)
        if not plain or self.view.is_complex() or grad.dtype != self.view.dtype:
            return None
        if grad.stride() != self.view.stride():
            return None
        return grad.detach().as_strided((grad.numel(),), (1,))


@dataclass(slots=True)
class Bucket:
    """Gradients that are reduced by one launch: entry views into the one-dimensional `flat`, zero between them."""

    flat: torch.Tensor
    entries: list[Entry]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients, padding left out."""
        return sum(entry.parameter.nbytes for entry in self.entries)


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """A bucket before it has memory. members: indices of parameters; offsets: where each begins, in elements."""

    dtype: torch.dtype
    members: tuple[int, ...]
    offsets: tuple[int, ...]
    elements: int


def lay_out(
    parameters: Sequence[tuple[str, torch.nn.Parameter]], caps: Sequence[int], order: Sequence[int] = ()
) -> list[BucketLayout]:
    """Pack parameters into buckets of about caps[0], caps[1], ... bytes, for each dtype; the last cap goes on.

    order: indices of parameters as their gradients come; those that are not named come last, in reverse.

    A bucket is closed by the parameter that reaches its cap, as torch's DDP does. Buckets come in the order in which
    their last gradient is expected. Raises ValueError naming a parameter whose dtype cannot be reduced.
    """
    filling: dict[torch.dtype, list[int]] = {}
    filled: dict[torch.dtype, int] = {}
    closed: list[list[int]] = []
    count_of: dict[torch.dtype, int] = {}
    named = set(order)
    complete = [*order, *(i for i in reversed(range(len(parameters))) if i not in named)]
    for index in complete:
        name, parameter = parameters[index]
        dtype = _reduced_dtype(name, parameter)
        filling.setdefault(dtype, []).append(index)
        filled[dtype] = filled.get(dtype, 0) + parameter.nbytes
        number = count_of.get(dtype, 0)
        if filled[dtype] >= caps[min(number, len(caps) - 1)]:
            closed.append(filling.pop(dtype))
            filled[dtype], count_of[dtype] = 0, number + 1
    closed.extend(filling.values())
    come = {index: place for place, index in enumerate(complete)}
    closed.sort(key=lambda members: come[members[-1]])  # a bucket is complete once its last one has its gradient
    return [_lay_out_one(parameters, members) for members in closed]


def bind(layout: BucketLayout, parameters: Sequence[tuple[str, torch.nn.Parameter]], flat: torch.Tensor) -> Bucket:
    """Give a layout its memory: `flat`, of layout.dtype and layout.elements elements, is zeroed."""
    flat.zero_()
    entries = [
        Entry(*parameters[index], offset, _view_for(parameters[index][1], flat, offset))
        for index, offset in zip(layout.members, layout.offsets, strict=True)
    ]
    return Bucket(flat, entries)


def _reduced_dtype(name: str, parameter: torch.Tensor) -> torch.dtype:
    dtype = _REAL.get(parameter.dtype, parameter.dtype)
    if dtype not in DTYPES:
        raise ValueError(
            f"parameter {name} is {parameter.dtype}, and gradients of that dtype cannot be reduced: convert it to "
            f"one of {', '.join(map(str, DTYPES))} or set requires_grad=False"
        )
    return dtype


def _lay_out_one(parameters: Sequence[tuple[str, torch.nn.Parameter]], members: list[int]) -> BucketLayout:
    offsets, end = [], 0
    for index in members:
        name, parameter = parameters[index]
        offsets.append(end)
        reals = parameter.numel() * (2 if parameter.is_complex() else 1)
        end += _aligned(reals)
    return BucketLayout(_reduced_dtype(name, parameter), tuple(members), tuple(offsets), end)


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _view_for(parameter: torch.Tensor, flat: torch.Tensor, offset: int) -> torch.Tensor:
    elements = parameter.numel()
    if parameter.is_complex():
        run = torch.view_as_complex(flat[offset : offset + 2 * elements].view(elements, 2))
    else:
        run = flat[offset : offset + elements]
    # empty_like keeps the strides of a tensor that has neither gaps nor overlaps, and only of such a one.
    if torch.empty_like(parameter, device="meta").stride() == parameter.stride():
        return run.as_strided(parameter.size(), parameter.stride())
    return run.view(parameter.size())
