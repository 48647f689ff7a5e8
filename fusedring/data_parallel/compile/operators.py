"""What torch.compile keeps of a wrapper in its graphs.

A compiled backward is one node of autograd's graph: it hands over all gradients when it is through with the last. So
that launches still begin with the first, each parameter enters a graph through `announce`, an identity whose backward
tells the wrapper of the gradient as soon as it is computed. `modules` sees to that.

What is told is a notice, no more. The gradient goes its usual way, through all hooks, to `.grad`. It is announced only
if it is all that the graph computes for the parameter: where a parameter has other uses in the graph, its announcement
is taken out again, when the graph is complete. What comes from outside of the graph is for `Announcements` to see. A
graph may be run by nobody's wrapper, or not by backward but by autograd.grad: then nobody takes notice.

Graphs know parameters and wrappers by *tags*: tensors without dimensions in host memory that hold a number. A number in
the graph itself would have the same code compiled anew for every layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from fusedring.data_parallel.compile.dynamo import before_compiling, count_in_graph, run_while_tracing, when_traced
from fusedring.data_parallel.compile.graph import take_out_partial
from fusedring.torch_internals import current_run, will_run_node

_library = torch.library.Library("fusedring", "DEF")  # type: ignore[no-untyped-call]
_numbers = itertools.count(1)
_traced = [0]
"""How many announcements have been traced."""
_tagged: WeakValueDictionary[int, Any] = WeakValueDictionary()
_uses: dict[int, int] = {}
"""By tag: how often a parameter has entered graphs in forwards, less how often its gradient has come out since."""
_listeners: WeakSet[Listener] = WeakSet()


class Listener(Protocol):
    """What the operators in a graph call: it stands for one wrapper."""

    def make_announcing(self) -> None:
        """Something is being compiled: see `modules`."""

    def forward_begins(self, buffers: Sequence[torch.Tensor]) -> None:
        """A forward begins, with gradients or without. buffers: copies of the module's, perhaps, which it reads."""

    def forward_ends(self, buffers: Sequence[torch.Tensor]) -> None:
        """A forward with gradients ends. buffers: copies of the module's, perhaps, which overwrite them afterwards."""

    def backward_begins(self) -> None:
        """A gradient has come to an output of a forward that uses no parameter."""

    def on_announced(self, parameter: nn.Parameter, grad: torch.Tensor, *, only_use: bool) -> None:
        """`grad` is on its way to the `.grad` of a parameter, anybody's. only_use: whether no other graph used it."""

    def refuse_traced(self, parameter: nn.Parameter) -> None:
        """A graph computes a gradient of a parameter, anybody's, but not in a backward that autograd runs."""


# An input of all that is announced. Autograd runs its node only in a backward for all leaves: not in autograd.grad, and
# not for some `inputs`.
_leaf = torch.zeros((), device="cpu", requires_grad=True)
_leaf_node = torch.autograd.graph.get_gradient_edge(_leaf).node


def _in_full_backward() -> bool:
    return current_run() >= 0 and will_run_node(_leaf_node)


def tag(thing: object) -> torch.Tensor:
    """A tensor, int64 without dimensions, that stands for `thing` in a graph as long as it lives."""
    number = next(_numbers)
    _tagged[number] = thing
    return torch.tensor(number, device="cpu")


def _run_forward(wrapper: torch.Tensor, buffers: Sequence[torch.Tensor], before: bool, grad: bool, _: str) -> None:
    living: Listener | None = _tagged.get(int(wrapper))
    if living is not None:
        with torch.set_grad_enabled(grad):
            (living.forward_begins if before else living.forward_ends)(buffers)


def _run_backward(grad: torch.Tensor, wrapper: torch.Tensor) -> None:
    living: Listener | None = _tagged.get(int(wrapper))
    if living is not None and _in_full_backward():
        living.backward_begins()


def _run_use(parameter: torch.Tensor) -> None:
    number = int(parameter)
    _uses[number] = _uses.get(number, 0) + 1


def _run_gradient(grad: torch.Tensor, parameter: torch.Tensor) -> None:
    number = int(parameter)
    living: nn.Parameter | None = _tagged.get(number)
    uses = _uses.pop(number, 0)
    if uses > 1:
        _uses[number] = uses - 1
    if living is None:
        return
    for listener in list(_listeners):
        if current_run() < 0:
            listener.refuse_traced(living)
        elif _in_full_backward():
            listener.on_announced(living, grad, only_use=uses == 1)


def _define(schema: str, run: Any) -> Any:
    """An operator without a result. It is kept for what it does, and never becomes part of a CUDA graph."""
    _library.define(schema, tags=(torch.Tag.cudagraph_unsafe,))  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"fusedring::{name}", lambda *_: None, lib=_library)
    operator = getattr(torch.ops.fusedring, name).default
    torch.fx.node.has_side_effect(operator)
    return operator


_forward = _define(
    "forward(Tensor wrapper, Tensor(a!)[] buffers, bool before, bool grad, str call) -> ()", _run_forward
)
_use = _define("use(Tensor parameter) -> ()", _run_use)
_backward = _define("backward(Tensor grad, Tensor wrapper) -> ()", _run_backward)
_gradient = _define("gradient(Tensor grad, Tensor parameter) -> ()", _run_gradient)


class _Announce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, tag: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tag)
        _use(tag)
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (tag,) = ctx.saved_tensors
        _gradient(grad, tag)
        return grad, None, None


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, tag: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tag)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (tag,) = ctx.saved_tensors
        _backward(grad, tag)
        return grad, None, None


def announce(parameter: torch.Tensor, tag: torch.Tensor) -> torch.Tensor:
    """In traced code: an alias of the parameter, whose gradient is told of when the graph has computed it."""
    _watch_graph()
    alias: torch.Tensor = _Announce.apply(parameter, tag, _leaf)  # type: ignore[no-untyped-call]
    return alias


@run_while_tracing
def _watch_graph() -> None:
    _traced[0] += 1
    when_traced(_take_out_partial)


@run_while_tracing
def traced_announcements() -> str:
    """How many there have been, as traced code sees it."""
    return str(_traced[0])


@run_while_tracing
def _call() -> str:
    """Another name for each call in a graph: two that are equal would be taken for one."""
    return str(count_in_graph())


def _take_out_partial(graph: torch.fx.GraphModule) -> None:
    take_out_partial(graph, _gradient)


def forget_uses(tags: Iterable[torch.Tensor]) -> None:
    """A backward is over: no gradient of these parameters comes from an earlier forward any more."""
    for each in tags if _uses else ():
        _uses.pop(int(each), None)


def trace_forward_begins(wrapper: torch.Tensor, buffers: list[torch.Tensor]) -> None:
    """In a traced forward: have the wrapper prepare for it when the graph is run. It may overwrite the buffers."""
    _forward(wrapper, buffers, True, torch.is_grad_enabled(), _call())


def trace_forward_ends(wrapper: torch.Tensor, buffers: list[torch.Tensor]) -> None:
    """In a traced forward: have the wrapper deal with its buffers after it when the graph is run."""
    _forward(wrapper, buffers, False, True, _call())


def trace_outputs(wrapper: torch.Tensor, outputs: Any) -> Any:
    """In a traced forward that announces nothing: have the wrapper told of a backward, which may come to no parameter.

    Other outputs stay as they are: autograd has to see what the user overwrites.
    """

    def begin(tensor: torch.Tensor) -> torch.Tensor:
        return _Begin.apply(tensor, wrapper, _leaf) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]

    return tree_map_only(torch.Tensor, begin, outputs)


def listen(listener: Listener) -> None:
    """Tell `listener` of announced gradients, and when something is compiled."""
    _listeners.add(listener)


@run_while_tracing
def make_all_announcing() -> None:
    """Have the modules of all wrappers announce gradients, now or, in a traced forward, while it is traced."""
    for listener in list(_listeners):
        listener.make_announcing()


def announce_when_compiling() -> None:
    """Have `make_all_announcing` called before anything is compiled. To be called again: a reset forgets it."""
    before_compiling(_make_all_announcing)


def _make_all_announcing(_: Any) -> None:
    make_all_announcing()
