"""What fusedring uses of torch's autograd, torch.distributed and the profiler though it is no public API.

Any release of torch may take it away, so all of it is here, under a name that says what it gives. TRIED names the
releases on which each was tried; what was not tried says so. There are two more such rooms: Dynamo's is
`data_parallel/compile/dynamo.py`, and torch.distributed._symmetric_memory is used in `transport/gpu_memory.py` alone
(torch's own operations on it are timed in `bench/symmetric_memory.py`).

What has no public equivalent, but many libraries rely on, stays where it is needed: `torch._foreach_copy_` and
`torch.utils._pytree`, a tensor's `_version`, a module's `_parameters` and `_modules`, and, in a wrapper that takes the
place of DistributedDataParallel, what that class has.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.distributed import _BufferCommHookLocation

TRIED = ("2.11.0", "2.13.0", "2.14.1")

# Autograd

current_run = torch._C._current_graph_task_id
"""The number of the run of autograd's engine that this thread is in; negative outside of all."""

call_at_end_of_run = torch.autograd.Variable._execution_engine.queue_callback
"""In a hook: have a function without arguments called at the end of the run, unless that fails."""

will_run_node = torch._C._will_engine_execute_node
"""In a hook: whether the run executes this node of autograd's graph, too."""

transform_under_way = torch._C._functorch.peek_interpreter_stack
"""What torch.func is transforming a function with just now, its innermost; None outside of all."""

hooks_before_accumulation = operator.attrgetter("_backward_hooks")
"""Of a parameter: by id, those of `register_hook`; None or empty if there are none."""

hooks_after_accumulation = operator.attrgetter("_post_accumulate_grad_hooks")
"""Of a parameter: by id, those of `register_post_accumulate_grad_hook`; None or empty if there are none."""

is_zero_tensor = torch.Tensor._is_zerotensor
"""Whether a tensor stands for zeros without having memory for them."""

# Profiler

profiler_is_on = torch._C._autograd._profiler_enabled
"""Whether torch's profiler records this thread."""

end_span_with = torch.autograd.profiler.record_function._call_end_callbacks_on_future
"""end_span_with(span, future): have a span that was entered end when the future is done, on whatever thread that is."""

# torch.distributed

broadcast_coalesced = torch._C._distributed_c10d._broadcast_coalesced
"""broadcast_coalesced(group, tensors, bytes at a time, source): the source's values to all ranks, in place."""

BufferCommHookLocation = _BufferCommHookLocation
"""When a hook for buffers wants to be called: PRE_FORWARD or POST_FORWARD."""

BuiltinCommHookType = torch._C._distributed_c10d.BuiltinCommHookType
GradBucket = torch._C._distributed_c10d.GradBucket
"""Both are public, in torch.distributed, but type checkers do not see them there."""

inputs_on_device = _to_kwargs
"""Arguments and keyword arguments of a forward, copied to a device; each as a tuple of one, for one device."""

store_of = distributed_c10d._get_process_group_store
"""The store that a process group was made with, under a prefix of its own."""


def living_groups() -> Collection[dist.ProcessGroup]:
    """The process groups that this rank is a member of and that were not destroyed."""
    return distributed_c10d._world.pg_map


def is_member(group: dist.ProcessGroup) -> bool:
    """Whether this rank is: `new_group` gives something that is no group to those that are not."""
    return not distributed_c10d._rank_not_in_group(group)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """What a process group was made with; None if none of its backends tells."""
    for device in group._device_types:
        options = getattr(group._get_backend(torch.device(device)), "options", None)
        if options is not None:
            timeout: timedelta = options._timeout
            return timeout
    return None


def nvlinks() -> list[list[int]] | None:
    """How many NVLinks join every two of this process's GPUs, by their indices; None where torch cannot tell.

    Tried only where there is no GPU.
    """
    try:
        detect = torch._C._distributed_c10d._detect_dma_connectivity  # type: ignore[attr-defined]
        matrix: list[list[int]] = detect(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
    except (RuntimeError, AttributeError):  # not on this platform
        return None
    return matrix
