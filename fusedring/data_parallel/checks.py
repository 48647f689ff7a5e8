"""What may be wrapped, and whether all ranks wrapped the same."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fusedring.config import check_engine, dtype_name
from fusedring.errors import MismatchError
from fusedring.group.communicator import Communicator

Device = int | str | torch.device


def check_module(module: nn.Module, parameters: Sequence[tuple[str, nn.Parameter]], *, engine: str, name: str) -> None:
    """What torch's class checks, with its exception types. parameters: those not to be ignored; name: the wrapper's."""
    if any(is_lazy(parameter) for _, parameter in parameters):
        raise RuntimeError(
            f"Modules with uninitialized parameters can't be used with `{name}`. "
            "Run a dummy forward pass to correctly initialize the modules"
        )
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise RuntimeError(f"{name} is not needed when a module doesn't have any parameters that require a gradient.")
    first_name, first = parameters[0]
    for parameter_name, parameter in parameters:
        if parameter.device != first.device:
            raise ValueError(
                f"all parameters must be on one device, but {first_name} is on {first.device} and {parameter_name} "
                f"on {parameter.device}: wrap the parts on their own, or move the module with .to({first.device})"
            )
    for parameter_name, parameter in parameters:
        try:
            check_engine(engine, parameter.device)
        except ValueError as error:
            raise ValueError(f"parameter {parameter_name}: {error}") from None
    for module_name, part in module.named_modules():
        if getattr(part, "sparse", False) is True and isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(
                f"parameter {f'{module_name}.weight'.lstrip('.')} has sparse gradients, which cannot be reduced: "
                "make the embedding with sparse=False"
            )


def gpu_of(device: torch.device, device_ids: Sequence[Device] | None, output_device: Device | None) -> list[int] | None:
    """The index of the module's GPU, if it was named. Raises ValueError if another device was."""
    named = [*(device_ids or ()), *(() if output_device is None else (output_device,))]
    if device.type == "cpu" and named:
        raise ValueError(
            "device_ids and output_device must be None for a module in host memory, which the host engine reduces, "
            f"got {device_ids} and {output_device}: move the module to its GPU first, or leave them out"
        )
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids must name one GPU, one process for each, got {list(device_ids)}")
    for given in named:
        index = given if isinstance(given, int) else torch.device(given).index
        if index != device.index:
            raise ValueError(
                f"the module is on {device}, but device_ids={device_ids} and output_device={output_device} "
                "were given: call module.to() with the device that you name here"
            )
    return [device.index] if device_ids else None


def check_agreement(communicator: Communicator, mine: Sequence[str], *, timeout: float | None, name: str) -> None:
    """All ranks compare what they wrapped, in words (collective). name: the wrapper's.

    Raises MismatchError, with the same text everywhere, at the first difference.
    """
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    exchange = functools.partial(communicator.exchange, timeout=timeout, purpose=f"wrap a module in {name}")
    if len(set(exchange(digest))) == 1:
        return
    everyone: list[list[str]] = exchange(list(mine))
    for at in range(max(map(len, everyone))):
        entries = [entries[at] if at < len(entries) else "nothing more" for entries in everyone]
        if any(entry != entries[0] for entry in entries):
            sides = "; ".join(f"rank {rank}: {entry}" for rank, entry in enumerate(entries))
            raise MismatchError(
                f"the ranks wrapped different modules or options ({sides}). Build the same model on every rank"
            )


def in_words(what: str, name: str, tensor: torch.Tensor) -> str:
    """A parameter or buffer, as far as ranks have to agree on it."""
    kind = dtype_name(tensor.dtype)
    frozen = " (requires_grad=False)" if what == "parameter" and not tensor.requires_grad else ""
    return f"{what} {name} {kind} {list(tensor.shape)}{frozen}"
