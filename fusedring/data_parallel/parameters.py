"""The parameters whose gradients are averaged, and how the wrapper hears of them."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fusedring.data_parallel.compile.dynamo import undisturbed
from fusedring.torch_internals import hooks_after_accumulation, hooks_before_accumulation

T = TypeVar("T")


class TrainedParameters:
    """The trainable parameters of a module, as they are now, and whether they are that still.

    named: those that are not to be ignored, trainable or not.
    """

    def __init__(self, module: nn.Module, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.named = [(name, p) for name, p in named if p.requires_grad]
        self._index_of = {id(parameter): index for index, (_, parameter) in enumerate(self.named)}
        modules = list(module.modules())
        self._contents = [(m._parameters, [(p, _trained_as(p)) for p in m._parameters.values()]) for m in modules]
        self._children = [(m._modules, list(m._modules.values())) for m in modules if m._modules]
        self._hooks: weakref.finalize[Any, Any] | None = None

    def __contains__(self, parameter_id: object) -> bool:
        return parameter_id in self._index_of

    def index_of(self, parameter: torch.Tensor) -> int | None:
        """Its number; None for others."""
        return self._index_of.get(id(parameter))

    def have_changed(self) -> bool:
        """Whether the module's were replaced, added, removed, frozen, unfrozen or converted since."""
        for children, before in self._children:
            if len(children) != len(before) or any(map(operator.is_not, children.values(), before)):
                return True
        for parameters, known in self._contents:
            if len(parameters) != len(known):
                return True
            for now, (then, trained_as) in zip(parameters.values(), known, strict=True):
                # What torch.func.functional_call puts there for the time of a call is no parameter.
                if now is not then and (now is None or isinstance(now, nn.Parameter)):
                    return True
                if now is then and _trained_as(now) is not trained_as:
                    return True
        return False

    def hook(self, listener: T, told: Callable[[T, int], None]) -> None:
        """Have `told(listener, index)` called when the gradient of a parameter has been accumulated into `.grad`.

        It stays so until `unhook`, or until the listener is gone. The parameters outlive it, so their hooks must
        neither keep it alive nor stay when it is gone.
        """
        self.unhook()
        hook, weakly = undisturbed(_gradient_hook), weakref.ref(listener)
        handles = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(hook, weakly, told, index)
            )
            for index, (_, parameter) in enumerate(self.named)
        ]
        self._hooks = weakref.finalize(listener, _remove, handles)
        self._hooks.atexit = False

    def unhook(self) -> None:
        """Nobody is told any more."""
        if self._hooks is not None:
            self._hooks()

    @property
    def hooked(self) -> bool:
        """Whether somebody is told."""
        return self._hooks is not None and self._hooks.alive

    @staticmethod
    def has_hooks_of_others(parameter: torch.Tensor) -> bool:
        """Whether more is to happen between the computation of its gradient and the end of its accumulation."""
        after: dict[int, Any] = hooks_after_accumulation(parameter) or {}
        ours = (_gradient_hook, undisturbed(_gradient_hook))
        before = hooks_before_accumulation(parameter)
        return bool(before) or any(getattr(h, "func", None) not in ours for h in after.values())


def _trained_as(parameter: torch.Tensor | None) -> torch.dtype | None:
    """The dtype of its gradients; None if it has none."""
    return parameter.dtype if parameter is not None and parameter.requires_grad else None


def _gradient_hook(
    listener: Callable[[], T | None], told: Callable[[T, int], None], index: int, _: torch.Tensor
) -> None:
    living = listener()
    if living is not None:
        told(living, index)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
