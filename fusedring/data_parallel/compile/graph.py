"""Which announcements in a traced graph tell of all that the graph computes for a parameter.

In the graph an announcement is a call of `autograd_function_apply` with two graphs, for forward and for backward. Where
its parameter has other uses, in the graph or in graphs around it, it tells of a part only. Such a part must not be
taken: Inductor, for one, adds the rest to it in place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves


def take_out_partial(graph: GraphModule, operator: Any, used_elsewhere: Collection[int] = ()) -> None:
    """Have parameters that are used elsewhere, too, enter the graph directly.

    operator: what announces, in the backward part of an announcement. used_elsewhere: which inputs of the graph are
    used by the graph around it for other things.
    """
    inputs = _inputs(graph)
    shared = {inputs[index] for index in used_elsewhere}
    for node in list(graph.graph.nodes):
        bodies = [body for arg in node.args if (body := _body(graph, arg)) is not None]
        if any(each.target is operator for body in bodies for each in body.graph.nodes):
            parameter = node.args[len(bodies) + _aliased(bodies[0])]
            sole = parameter in inputs and parameter not in shared and len(parameter.users) == 1
            refused = any(user.target is torch.autograd.grad for user in parameter.users)  # when the graph is run
            if not sole and not refused:
                _replace(node, parameter)
            continue
        operands = [arg for arg in _nodes(node.args) if _body(graph, arg) is None]
        for body in bodies:
            elsewhere = {
                index
                for index, arg in enumerate(operands)
                if arg in shared or len(arg.users) > 1 or operands.count(arg) > 1
            }
            count = len(_inputs(body))
            take_out_partial(body, operator, elsewhere if count == len(operands) else range(count))
    graph.recompile()


def _inputs(graph: GraphModule) -> list[Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _nodes(args: Any) -> Iterable[Node]:
    return (leaf for leaf in tree_leaves(args) if isinstance(leaf, Node))


def _body(graph: GraphModule, arg: Any) -> GraphModule | None:
    """The graph within the graph that an argument stands for."""
    body = getattr(graph, str(arg.target), None) if isinstance(arg, Node) and arg.op == "get_attr" else None
    return body if isinstance(body, GraphModule) else None


def _aliased(forward: GraphModule) -> int:
    """Which input of an announcement is the parameter: that of which it makes an alias."""
    (alias,) = (node for node in forward.graph.nodes if node.target in ("view_as", torch.Tensor.view_as))
    return _inputs(forward).index(alias.args[0])


def _replace(announcement: Node, parameter: Node) -> None:
    for user in list(announcement.users):  # it gives a tuple of one
        user.replace_all_uses_with(parameter)
        user.graph.erase_node(user)
    announcement.graph.erase_node(announcement)
