"""Gradient clipping by the total norm, on whole buckets where gradients lie in them.

After the backward of a FusedRingDDP the gradients are averaged and the same on all ranks, so their norm is a local
matter. They are views of a few large vectors; so one pass over each vector stands for thousands of small ones. The
padding between gradients is zero, which adds nothing to a norm, and is kept so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fusedring.data_parallel.buckets import Bucket
from fusedring.data_parallel.ddp import FusedRingDDP
from fusedring.data_parallel.scheduler import Scheduler


@torch.no_grad()
def clip_grad_norm_(
    model_or_parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    reuse_norm: bool = False,
) -> torch.Tensor:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)), in place: `torch.nn.utils.clip_grad_norm_`, but faster.

    model_or_parameters: a module, such as a FusedRingDDP after its backward, or parameters. Only of a module is it
        known that gradients lie together. A parameter that comes several times counts once; None gradients are skipped.
    norm_type, error_if_nonfinite, foreach: as for torch's function.
    reuse_norm: take the norm that the launches of the last backward have learnt (`StepReport.grad_norm`), instead of
        reading the gradients for it; on a GPU the host waits for those launches. Gradients are read all the same where
        that norm is not known, where its squares overflowed float32, and where operators have changed them since. What
        leaves no version behind is not noticed: a change through `.data` or numpy, `GradScaler.unscale_`, a collective
        of torch.distributed, the replay of a CUDA graph. Do not ask for it after one of these.

    Returns the norm of all gradients as one vector, before they were scaled: a tensor without dimensions, the same bits
    on every rank. It may differ from what torch's function gives, since n elements are summed in another order: by n/2
    eps of the dtype in which they are summed at most, and by little in practice. Norms of 16-bit gradients are rounded
    to 16 bits, there once for each tensor and here once for each bucket; a reused norm is summed in float32, whatever
    the gradients are. Scaled gradients differ accordingly.

    Raises RuntimeError with error_if_nonfinite=True if the norm is infinite or NaN; then nothing was scaled. Raises
    ValueError for reuse_norm with another norm_type than 2.
    """
    if reuse_norm and norm_type != 2:
        raise ValueError(f"reuse_norm knows the norm of type 2, got norm_type={norm_type}: leave one of them out")
    if isinstance(model_or_parameters, nn.Module):
        model_or_parameters, schedulers = _contents(model_or_parameters)
    else:
        schedulers = []
        if isinstance(model_or_parameters, torch.Tensor):
            model_or_parameters = [model_or_parameters]
    parameters = {id(parameter): parameter for parameter in model_or_parameters}
    vectors: list[_Vector] = []
    in_vectors: set[int] = set()
    known: list[float] = []
    grads: list[torch.Tensor] = []
    # In norms of other orders zeros count, or the number of tensors.
    for scheduler in schedulers if norm_type > 0 else ():
        averages = scheduler.results.averages() if reuse_norm else None
        for index, (bucket, vector) in enumerate(zip(scheduler.buckets, _vectors_of(scheduler), strict=True)):
            if vector is None or not vector.members <= parameters.keys():
                continue
            if all(entry.parameter.grad is entry.view for entry in bucket.entries):
                vectors.append(vector)
                in_vectors |= vector.members
                if averages is not None and averages[index].holds_for(bucket):
                    known.append(averages[index].squares)
                else:
                    grads.append(vector.elements)
    others = [p for key, p in parameters.items() if key not in in_vectors and p.grad is not None]
    grads += [p.grad for p in others if p.grad is not None]
    if known:  # as if it were one more gradient
        device = vectors[0].elements.device
        grads.append(torch.tensor(math.sqrt(sum(known)), dtype=torch.float32, device=device))
    norm = torch.nn.utils.get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
    if vectors:
        norm = norm.to(next(p.grad.device for p in parameters.values() if p.grad is not None))  # as torch has it
        factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
        for vector in vectors:
            vector.scale(factor)
    torch.nn.utils.clip_grads_with_norm_(others, max_norm, norm, foreach)
    return norm


@dataclass(frozen=True, slots=True)
class _Vector:
    """The gradients of a bucket.

    padding: positions of what lies between them. members: the ids of their parameters, which the bucket keeps alive.
    """

    elements: torch.Tensor
    padding: torch.Tensor
    members: frozenset[int]

    def scale(self, factor: torch.Tensor) -> None:
        self.elements.mul_(factor.to(self.elements.device))
        if self.padding.numel() > 0:
            # A factor of NaN, which is for the gradients alone, would stay in the padding for all later steps.
            self.elements.index_fill_(0, self.padding, 0)


_vectors: WeakKeyDictionary[Scheduler, list[_Vector | None]] = WeakKeyDictionary()


def _vectors_of(scheduler: Scheduler) -> list[_Vector | None]:
    """One for each bucket; None if it is empty, or complex: absolute values are not those of the parts."""
    if scheduler not in _vectors:
        _vectors[scheduler] = [_vector_of(bucket) for bucket in scheduler.buckets]
    return _vectors[scheduler]


def _vector_of(bucket: Bucket) -> _Vector | None:
    last = bucket.entries[-1]
    elements = bucket.flat[: last.offset + last.view.numel()]
    if elements.numel() == 0 or any(entry.view.is_complex() for entry in bucket.entries):
        return None
    is_padding = torch.ones(elements.numel(), dtype=torch.bool)
    for entry in bucket.entries:
        is_padding[entry.offset : entry.offset + entry.view.numel()] = False
    members = frozenset(id(entry.parameter) for entry in bucket.entries)
    return _Vector(elements, is_padding.nonzero().flatten().to(elements.device), members)


def _contents(model: nn.Module) -> tuple[Iterable[torch.Tensor], list[Scheduler]]:
    """The module's parameters, and the schedulers of the wrappers in it, itself included."""
    wrappers = [module for module in model.modules() if isinstance(module, FusedRingDDP)]
    return model.parameters(), [w._scheduler for w in wrappers if w._scheduler is not None]
