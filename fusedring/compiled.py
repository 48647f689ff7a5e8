"""What torch.compile keeps of a wrapper in its graphs.

A compiled backward is one node of autograd's graph: it hands over all gradients when it is through with the last. So
that launches still begin with the first, each parameter enters a graph through `announce`, an identity whose backward
tells the wrapper of the gradient as soon as it is computed. `armed` sees to that.

What is told is a notice, no more. The gradient goes its usual way, through all hooks, to `.grad`; there the wrapper
checks that it is the one that was announced. A graph may be run by nobody's wrapper, or not by backward but by
autograd.grad: then nobody takes notice.

Graphs know parameters and wrappers by *tags*: tensors without dimensions in host memory that hold a number. A number in
the graph itself would have the same code compiled anew for every layer.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

_library = torch.library.Library("fusedring", "DEF")  # type: ignore[no-untyped-call]
_numbers = itertools.count(1)
_tagged: WeakValueDictionary[int, Any] = WeakValueDictionary()
_wrappers: WeakSet[Wrapper] = WeakSet()


class Wrapper(Protocol):
    """What the operators in a graph call."""

    module: nn.Module

    def _arm(self) -> None:
        """Something is being compiled: see `armed`."""

    def _traced_forward_begins(self, buffers: Sequence[torch.Tensor]) -> None:
        """A forward begins, whose buffers these are."""

    def _traced_forward_ends(self, buffers: Sequence[torch.Tensor]) -> None:
        """And ends."""

    def _traced_backward_begins(self) -> None:
        """A gradient has come to an output of the forward, and goes on to parameters."""

    def _on_announced(self, parameter: nn.Parameter, grad: torch.Tensor) -> None:
        """`grad`, or a part of it, is on its way to the `.grad` of a parameter, anybody's."""

    def _refuse_traced_backward(self, parameter: nn.Parameter) -> None:
        """A graph computes a gradient of a parameter, anybody's, but not in a backward that autograd runs."""


# Autograd runs the node of a leaf only in a backward for all leaves: not in autograd.grad, and not for some `inputs`.
_leaf = torch.zeros((), device="cpu", requires_grad=True)
_leaf_node = torch.autograd.graph.get_gradient_edge(_leaf).node


def _in_full_backward() -> bool:
    return bool(torch._C._current_graph_task_id() >= 0 and torch._C._will_engine_execute_node(_leaf_node))


def tag(thing: object) -> torch.Tensor:
    """A tensor that stands for `thing` in a graph as long as it lives."""
    number = next(_numbers)
    _tagged[number] = thing
    return torch.tensor(number, device="cpu")


def _run_forward(wrapper: torch.Tensor, buffers: Sequence[torch.Tensor], before: bool) -> None:
    living: Wrapper | None = _tagged.get(int(wrapper))
    if living is not None:
        with torch.enable_grad():
            (living._traced_forward_begins if before else living._traced_forward_ends)(buffers)


def _run_backward(grad: torch.Tensor, wrapper: torch.Tensor) -> None:
    living: Wrapper | None = _tagged.get(int(wrapper))
    if living is not None and _in_full_backward():
        living._traced_backward_begins()


def _run_gradient(grad: torch.Tensor, parameter: torch.Tensor) -> None:
    living: nn.Parameter | None = _tagged.get(int(parameter))
    if living is None:
        return
    for wrapper in list(_wrappers):
        if torch._C._current_graph_task_id() < 0:
            wrapper._refuse_traced_backward(living)
        elif _in_full_backward():
            wrapper._on_announced(living, grad)


def _define(schema: str, run: Any) -> Any:
    """An operator without a result. It is kept for what it does, and never becomes part of a CUDA graph."""
    _library.define(schema, tags=(torch.Tag.cudagraph_unsafe,))  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"fusedring::{name}", lambda *_: None, lib=_library)
    operator = getattr(torch.ops.fusedring, name).default
    torch.fx.node.has_side_effect(operator)
    return operator


_forward = _define("forward(Tensor wrapper, Tensor(a!)[] buffers, bool before) -> ()", _run_forward)
_backward = _define("backward(Tensor grad, Tensor wrapper) -> ()", _run_backward)
_gradient = _define("gradient(Tensor grad, Tensor parameter) -> ()", _run_gradient)


class _Announce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, tag: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tag)
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (tag,) = ctx.saved_tensors
        _gradient(grad, tag)
        return grad, None, None


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, tag: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tag)
        # Autograd would not let the user overwrite a view that comes from here.
        free: torch.Tensor = torch.ops.aten._unsafe_view(output, output.shape)
        return free

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (tag,) = ctx.saved_tensors
        _backward(grad, tag)
        return grad, None, None


def announce(parameter: torch.Tensor, tag: torch.Tensor) -> torch.Tensor:
    """In traced code: the parameter, or an alias of it, whose gradient is told of when the graph has computed it."""
    alias: torch.Tensor = _Announce.apply(parameter, tag, _leaf)  # type: ignore[no-untyped-call]
    return alias


def trace_forward_begins(wrapper: torch.Tensor, buffers: list[torch.Tensor]) -> None:
    """In a traced forward: have the wrapper prepare for it when the graph is run. It may overwrite the buffers."""
    _forward(wrapper, buffers, True)


def trace_forward_ends(wrapper: torch.Tensor, buffers: list[torch.Tensor]) -> None:
    """In a traced forward: have the wrapper deal with its buffers after it when the graph is run."""
    _forward(wrapper, buffers, False)


def trace_outputs(wrapper: torch.Tensor, output: Any) -> Any:
    """In a traced forward: have the wrapper told when a backward comes to its output."""

    def begin(tensor: torch.Tensor) -> torch.Tensor:
        return _Begin.apply(tensor, wrapper, _leaf) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]

    return begin(output) if isinstance(output, torch.Tensor) else tree_map_only(torch.Tensor, begin, output)


def listen(wrapper: Wrapper) -> None:
    """Tell `wrapper` of announced gradients, and when something is compiled."""
    _wrappers.add(wrapper)


def arm_all() -> None:
    """Arm the modules of all wrappers. Called by a forward that is traced, while it is traced."""
    for wrapper in list(_wrappers):
        wrapper._arm()


arm_all._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch._dynamo.assume_constant_result does


def arm_when_compiling() -> None:
    """Have `arm_all` called before anything is compiled. To be called again now and then: a reset forgets it."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and _on_compile_start not in dynamo.callback_handler.start_callbacks:
        dynamo.callback_handler.register_start_callback(_on_compile_start)


def _on_compile_start(_: Any) -> None:
    arm_all()


def undisturbed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, where nothing in it is compiled, though what calls it is.

    To be called when something is about to be compiled, not before: torch.compile takes seconds to import.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return function
    if function not in _undisturbed:
        _undisturbed[function] = dynamo.disable(function)
    return _undisturbed[function]


_undisturbed: dict[Callable[..., Any], Callable[..., Any]] = {}
"""For functions of modules only, which stay."""


def in_compiled_autograd() -> bool:
    """Whether a backward runs under compiled autograd, which calls hooks but not what they queue for the end."""
    region = sys.modules.get("torch._dynamo.compiled_autograd")
    return region is not None and bool(region.in_compiled_autograd_region)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was used on some part of it."""
    return any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in module.modules())
