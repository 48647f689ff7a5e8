"""A wrapper under torch.compile: its forward as it is traced, and what its graphs tell it when they run.

In a graph the wrapper does nothing by itself: the graph has operators that call it before and after the forward. It is
known there by a tag (see `operators`), which stands for its `InGraphs`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from fusedring.data_parallel.backward import Backward
from fusedring.data_parallel.buffers import BufferSync
from fusedring.data_parallel.compile import operators
from fusedring.data_parallel.compile.dynamo import is_compiled
from fusedring.data_parallel.compile.modules import make_announcing
from fusedring.torch_internals import BufferCommHookLocation


class Wrapper(Protocol):
    """What is asked of a wrapper. tag: what stands for it in a graph."""

    module: nn.Module
    device: torch.device
    device_ids: list[int] | None
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    _tag: torch.Tensor

    def _named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def _before_forward(self) -> None: ...
    def _syncs_buffers(self, when: BufferCommHookLocation) -> bool: ...
    def _sync_buffers(self) -> None: ...


def traced_forward(wrapper: Wrapper, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward in a graph: what the wrapper does, the graph has it do when it is run."""
    operators.make_all_announcing()
    if wrapper.device_ids:
        inputs, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(wrapper.device), (inputs, kwargs))
    if not torch.is_grad_enabled():
        operators.trace_forward_begins(wrapper._tag, [])
        return wrapper.module(*inputs, **kwargs)
    before, after = _buffers_to_sync(wrapper)
    operators.trace_forward_begins(wrapper._tag, before)
    announced = operators.traced_announcements()
    output = wrapper.module(*inputs, **kwargs)
    if operators.traced_announcements() == announced:
        output = operators.trace_outputs(wrapper._tag, output)
    operators.trace_forward_ends(wrapper._tag, after)
    return output


def _buffers_to_sync(wrapper: Wrapper) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Those that may be sent before a forward, and after one."""
    buffers = [buffer for _, buffer in wrapper._named_buffers()] if wrapper.forward_sync_buffers else []
    hook = getattr(wrapper, "buffer_hook", None)
    if hook is not None and hook.buffer_comm_hook_location == BufferCommHookLocation.POST_FORWARD:
        return [], buffers
    return buffers, []


class InGraphs:
    """What stands for a wrapper in graphs: an `operators.Listener`.

    tags: those of the parameters that its module announces, empty as long as nothing is compiled.
    """

    def __init__(self, wrapper: Wrapper, backward: Backward, buffers: BufferSync, tags: list[torch.Tensor]) -> None:
        self._wrapper, self._backward, self._buffers, self._tags = weakref.ref(wrapper), backward, buffers, tags
        self._announces = is_compiled(wrapper.module)
        self.tag = operators.tag(self)
        operators.listen(self)

    def follow_parameters(self) -> None:
        """The parameters are others now."""
        if self._announces:
            self.make_announcing()

    def make_announcing(self) -> None:
        """Have the module announce gradients in what is compiled from now on."""
        wrapper, trained = self._wrapper(), self._backward.trained
        if wrapper is None:
            return
        if not self._announces and trained.hooked:
            trained.hook(self._backward, Backward.on_gradient)  # anew, so that nothing in the hooks is compiled
        self._announces = True
        self._tags[:] = make_announcing(wrapper.module.modules(), (parameter for _, parameter in trained.named))

    def forward_begins(self, buffers: Sequence[torch.Tensor]) -> None:
        """As `Listener.forward_begins`."""
        wrapper = self._wrapper()
        if wrapper is not None:
            with self._buffers.in_graph(buffers):
                wrapper._before_forward()

    def forward_ends(self, buffers: Sequence[torch.Tensor]) -> None:
        """As `Listener.forward_ends`."""
        wrapper = self._wrapper()
        if wrapper is not None:
            if wrapper._syncs_buffers(BufferCommHookLocation.POST_FORWARD):
                with self._buffers.in_graph(buffers):
                    wrapper._sync_buffers()
            wrapper.require_forward_param_sync = self._backward.synced
            self._backward.outputs_are_seen()

    def backward_begins(self) -> None:
        """As `Listener.backward_begins`."""
        self._backward.begin_if_synced()

    def on_announced(self, parameter: nn.Parameter, grad: torch.Tensor, *, only_use: bool) -> None:
        """As `Listener.on_announced`."""
        self._backward.on_announced(parameter, grad, only_use=only_use)

    def refuse_traced(self, parameter: nn.Parameter) -> None:
        """As `Listener.refuse_traced`."""
        self._backward.refuse_traced(parameter)
