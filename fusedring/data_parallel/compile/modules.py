"""Modules whose parameters enter compiled graphs through `announce`.

Autograd runs late what was recorded early: an identity that is applied to a parameter at the start of the forward sees
its gradient at the end of the backward. So the parameter is caught where the module reads it. An *announcing* module
has a subclass of its class, with a property for every parameter. Outside of a compiler that gives the parameter itself.

It keeps looking like what it was: names, `isinstance`, pickles and copies are those of the class that it had.
"""

from __future__ import annotations

import copyreg
import operator
import types
from collections.abc import Iterable, MutableMapping
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fusedring.data_parallel.compile.dynamo import run_while_tracing
from fusedring.data_parallel.compile.operators import announce, tag
from fusedring.log import logger
from fusedring.torch_internals import transform_under_way


class _Announcing:
    """What the classes of announcing modules have in common, beside a property for each parameter."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Not that of the module's class, which would register an announcing class beside it, or more."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies are of the class that the module had, and untagged."""
        function, arguments, state, *rest = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if key != "_fusedring_tags"}
        own: Any = type(self)
        if "_fusedring_class" in own.__dict__:
            if function is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle wants the class of self there
                function, arguments = operator.call, (function, *arguments)
            function, *arguments = (own._fusedring_class if part is own else part for part in (function, *arguments))
        return function, tuple(arguments), state, *rest


def _property_for(name: str) -> property:
    def read(self: Any) -> Any:
        parameter = self._parameters.get(name)
        if parameter is None:
            return _other_attribute(self, name)
        tracing = torch.compiler.is_compiling() and torch.is_grad_enabled()
        if tracing and type(parameter) is nn.Parameter and parameter.requires_grad:
            own_tag = self._fusedring_tags.get(name)
            if own_tag is not None and not _enters_plainly():
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


@run_while_tracing
def _enters_plainly() -> bool:
    """Whether parameters stay as they are in what is traced: a program to be exported, or a transformed function."""
    # In traced code torch 2.11 takes the first for true.
    return torch.compiler.is_exporting() or transform_under_way() is not None


_classes: WeakValueDictionary[tuple[int, tuple[str, ...]], Any] = WeakValueDictionary()
_tags: MutableMapping[nn.Parameter, torch.Tensor] = WeakIdKeyDictionary()


def make_announcing(modules: Iterable[nn.Module], trained: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Have graphs that are compiled from now on announce gradients of the `trained` parameters. Returns their tags.

    A module whose class cannot have a subclass stays as it is: its gradients are noticed when their graph is through.
    """
    trained = list(trained)
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
        if own.__getattr__ is not nn.Module.__getattr__ or own.__getattribute__ is not object.__getattribute__:
            continue  # its attributes are not what it holds
        known: frozenset[str] = getattr(own, "_fusedring_names", frozenset())
        tags = {name: tag for name, tag in tags.items() if name in known or not hasattr(own, name)}
        if not tags.keys() <= known:
            base = own._fusedring_class if "_fusedring_class" in own.__dict__ else own
            try:
                module.__class__ = _announcing_class(base, tuple(tags))
            except Exception as error:  # from metaclasses, too
                logger.info("%s cannot announce gradients from compiled graphs: %s", base.__name__, error)
                continue
        module.__dict__["_fusedring_tags"] = {**module.__dict__.get("_fusedring_tags", {}), **tags}
    return [_tags[parameter] for parameter in trained if parameter in _tags]


def _tag_of(parameter: nn.Parameter) -> torch.Tensor:
    if parameter not in _tags:
        _tags[parameter] = tag(parameter)
    return _tags[parameter]


def _announcing_class(base: type, names: tuple[str, ...]) -> type:
    known = _classes.get((id(base), names))
    if known is not None:  # then the base lives, too
        return cast(type, known)
    contents = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "_fusedring_class": base,
        "_fusedring_names": frozenset(names) | getattr(base, "_fusedring_names", frozenset()),
        "_fusedring_tags": {},
        **{name: _property_for(name) for name in names},
    }
    bases = (base,) if issubclass(base, _Announcing) else (_Announcing, base)
    made = types.new_class(base.__name__, bases, exec_body=lambda body: body.update(contents))
    _classes[id(base), names] = made
    return made
