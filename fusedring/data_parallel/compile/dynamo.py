"""What Dynamo, which traces for torch.compile, is asked and told, where it is in use: it takes seconds to import.

Little of it is public API, so nothing else in fusedring calls Dynamo. TRIED in `torch_internals` goes for this, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

F = TypeVar("F", bound=Callable[..., Any])


def run_while_tracing(function: F) -> F:
    """Have code that is traced run `function` then and there; its result becomes a constant.

    As torch._dynamo.assume_constant_result does.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def undisturbed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, where nothing in it is compiled, though what calls it is. For functions of modules only, which stay.

    To be called when something may be about to be compiled, not before.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return function
    if function not in _undisturbed:
        _undisturbed[function] = dynamo.disable(function)
    return _undisturbed[function]


_undisturbed: dict[Callable[..., Any], Callable[..., Any]] = {}


def before_compiling(callback: Callable[[Any], None]) -> None:
    """Have `callback` called before anything is compiled. To be asked for now and then, since a reset forgets it."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and callback not in dynamo.callback_handler.start_callbacks:
        dynamo.callback_handler.register_start_callback(callback)


def when_traced(finish: Callable[[torch.fx.GraphModule], None]) -> None:
    """While a graph is traced: have `finish` called with it when it is complete, once, before anything compiles it."""
    output = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator.current_tx().output
    if finish not in output.register_finalizer_fns:
        output.add_graph_finalizer(finish)


def count_in_graph() -> int:
    """While a graph is traced: 1, 2, ..., anew for every graph, so that the same code gives the same graph again."""
    output = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator.current_tx().output
    output._fusedring_count = getattr(output, "_fusedring_count", 0) + 1
    return int(output._fusedring_count)


def break_graph(why: str) -> None:
    """In traced code: have the graph end here, and another begin."""
    torch._dynamo.graph_break(why)


def in_compiled_autograd() -> bool:
    """Whether a backward runs under compiled autograd, which calls hooks but not what they queue for the end."""
    region = sys.modules.get("torch._dynamo.compiled_autograd")
    return region is not None and bool(region.in_compiled_autograd_region)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was used on some part of it."""
    return any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in module.modules())
