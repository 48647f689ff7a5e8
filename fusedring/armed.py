"""Modules whose parameters enter compiled graphs through `announce`.

Autograd runs late what was recorded early: an identity that is applied to a parameter at the start of the forward sees
its gradient at the end of the backward. So the parameter is caught where the module reads it. An *armed* module has a
subclass of its class, with a property for every parameter. Outside of a compiler that gives the parameter itself.

It keeps looking like what it was: names, `isinstance`, pickles and copies are those of the class that it had.
"""

from __future__ import annotations

import copyreg
import operator
import types
from collections.abc import Iterable, MutableMapping
from typing import Any, cast

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fusedring.compiled import announce, tag
from fusedring.log import logger


class _Armed:
    """What the classes of armed modules have in common, beside a property for each parameter."""

    _fusedring_class: type
    _fusedring_tags: dict[str, torch.Tensor]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies are of the class that the module had, and untagged."""
        function, arguments, state, *rest = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if key != "_fusedring_tags"}
        if function is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle wants the class of self there
            function, arguments = operator.call, (function, self._fusedring_class, *arguments[1:])
        return function, arguments, state, *rest


def _property_for(name: str) -> property:
    def read(self: Any) -> Any:
        parameter = self._parameters.get(name)
        if parameter is None:
            return _other_attribute(self, name)
        if torch.compiler.is_compiling() and torch.is_grad_enabled() and parameter.requires_grad:
            own_tag = self._fusedring_tags.get(name)
            if own_tag is not None and not _is_exporting():
                return announce(parameter, own_tag)
        return parameter

    def write(self: Any, value: Any) -> None:
        self.__dict__[name] = value  # nn.Module has seen that it is no parameter

    def delete(self: Any) -> None:
        self.__dict__.pop(name, None)

    return property(read, write, delete)


def _other_attribute(module: Any, name: str) -> Any:
    """What a module has in place of a parameter that it had."""
    if name in module._parameters:
        return None
    if name in module.__dict__:
        return module.__dict__[name]
    raise AttributeError(name)  # nn.Module looks among buffers and modules


def _is_exporting() -> bool:
    return torch.compiler.is_exporting()


# Asked while something is traced: torch 2.11 takes torch.compiler.is_exporting() for true there.
_is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]

_classes: dict[tuple[type, tuple[str, ...]], type] = {}
_properties: set[property] = set()
_tags: MutableMapping[nn.Parameter, torch.Tensor] = WeakIdKeyDictionary()


def arm(modules: Iterable[nn.Module], trained: Iterable[nn.Parameter]) -> None:
    """Have graphs that are compiled from now on announce gradients of the `trained` parameters.

    A module whose class cannot have a subclass stays as it is: its gradients are noticed when their graph is through.
    """
    ids = {id(parameter) for parameter in trained}
    for module in modules:
        tags = {
            name: _tag_of(parameter)
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in ids and type(parameter) is nn.Parameter
        }
        if not tags or isinstance(module, torch.jit.ScriptModule):
            continue
        own: Any = type(module)
        if not all(getattr(own, name, None) in _properties for name in tags):
            base = own._fusedring_class if "_fusedring_class" in own.__dict__ else own
            try:
                module.__class__ = _armed_class(base, tuple(tags))
            except TypeError as error:
                logger.info("%s cannot announce gradients from compiled graphs: %s", base.__name__, error)
                continue
        module.__dict__["_fusedring_tags"] = tags


def _tag_of(parameter: nn.Parameter) -> torch.Tensor:
    if parameter not in _tags:
        _tags[parameter] = tag(parameter)
    return _tags[parameter]


def _armed_class(base: type, names: tuple[str, ...]) -> type:
    if (base, names) not in _classes:
        properties = {name: _property_for(name) for name in names}
        contents = {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "_fusedring_class": base,
            "_fusedring_tags": {},
            **properties,
        }
        _classes[base, names] = types.new_class(
            base.__name__, (_Armed, base), exec_body=lambda body: body.update(contents)
        )
        _properties.update(properties.values())
    return _classes[base, names]
