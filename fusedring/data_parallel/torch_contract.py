"""What torch's DistributedDataParallel promises beside averaging gradients: buffers, hooks, uneven inputs, the rest.

Torch's class builds a Reducer in its constructor and relies on it in most of its methods. This one keeps the methods,
with their names and meaning, and has no Reducer.
"""

from __future__ import annotations

import os
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel.distributed import DistributedDataParallel

from fusedring.config import dtype_name
from fusedring.data_parallel.backward import Backward
from fusedring.data_parallel.buffers import BufferSync, broadcast
from fusedring.data_parallel.scheduler import Scheduler
from fusedring.data_parallel.uneven_inputs import TrainingRanks, UnevenInputs
from fusedring.data_parallel.user_hook import CommHook, Hook
from fusedring.log import my_rank
from fusedring.torch_internals import BufferCommHookLocation, BuiltinCommHookType, is_member

DEFAULT_BUCKET_MB = 25.0
FIRST_BUCKET_MB = 1.0
"""With the default cap the first bucket is small, so that communication starts early. Both are torch's numbers."""


class ReducerCalls:
    """What others call on torch's Reducer, between a forward and its backward."""

    def __init__(self, wrapper: TorchContract) -> None:
        self._wrapper = wrapper

    def prepare_for_forward(self) -> None:
        """Nothing is to be prepared."""

    def prepare_for_backward(self, outputs: Any) -> None:
        """The next backward is synced, even if no forward announced it."""
        self._wrapper._expect_synced_backward()

    def _rebuild_buckets(self) -> bool:
        return False

    def _delay_all_reduce(self) -> None: ...


class TorchContract(DistributedDataParallel):
    """Torch's class without its Reducer. A subclass averages the gradients, by a `Scheduler`."""

    module: nn.Module
    forward_sync_buffers: bool
    parameters_to_ignore: set[str]
    bucket_bytes_cap: int
    _training_ranks: TrainingRanks
    _backward: Backward
    _buffers_under_way: BufferSync
    _last_error: str

    @property
    def _scheduler(self) -> Scheduler | None:
        """What drives the buckets, if there are any."""
        return self._backward.scheduler

    @abstractmethod
    def _scheduler_or_open(self) -> Scheduler:
        """What drives the buckets; opens them where there are none."""

    @abstractmethod
    def _expect_synced_backward(self) -> None:
        """The next backward is synced, whatever the last forward decided."""

    @property
    def reducer(self) -> ReducerCalls:  # type: ignore[override]
        """For libraries that call it in training steps of their own (Accelerate, Lightning)."""
        return ReducerCalls(self)

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that are not to be ignored, each once, trainable or not."""
        return ((name, p) for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore)

    def _named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that are not to be ignored."""
        return ((name, b) for name, b in self.module.named_buffers() if name not in self.parameters_to_ignore)

    @property
    def broadcast_buffers(self) -> bool:
        """`forward_sync_buffers` by its older name."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    # Buffers

    def _syncs_buffers(self, when: BufferCommHookLocation) -> bool:
        """Whether buffers are to be sent now: before forward, or where a hook wants it."""
        hook = getattr(self, "buffer_hook", None)
        chosen = BufferCommHookLocation.PRE_FORWARD if hook is None else hook.buffer_comm_hook_location
        return bool(when == chosen and self.will_sync_module_buffers())

    def will_sync_module_buffers(self) -> bool:
        """Whether a forward now would send buffers: not where the forward before was not synced."""
        return (
            self.forward_sync_buffers
            and self.require_forward_param_sync
            and self.require_backward_grad_sync
            and torch.is_grad_enabled()
            and next(self._named_buffers(), None) is not None
        )

    def _sync_buffers(self) -> None:
        source: int = self._find_common_rank(self._distributed_rank, True) if self._join_config.enable else 0  # type: ignore[no-untyped-call]
        self._sync_module_buffers(source)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        """By the hook of `_register_buffer_comm_hook`, whose futures backward waits for; else by broadcast."""
        hook = getattr(self, "buffer_hook", None)
        if hook is None:
            self._default_broadcast_coalesced(authoritative_rank=authoritative_rank)
        else:
            with torch.no_grad():
                futures = hook.buffer_comm_hook(
                    hook.buffer_comm_hook_state, self._buffers_under_way.of(self._named_buffers())
                )
            self._buffers_under_way.futures += futures or []

    def _default_broadcast_coalesced(
        self, bufs: Any = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """What happens without a hook, for hooks that want just that."""
        buffers = self._buffers_under_way.of(self._named_buffers()).values() if bufs is None else bufs
        broadcast(self.process_group, list(buffers), authoritative_rank)

    # Hooks of the user

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let `hook(state, bucket)` sum the gradients: as torch's class, see there.

        bucket: a `GradBucket` of this library, with the methods of torch's. The hook has to divide by the world size.
        wire_dtype and algorithm do not apply. Raises RuntimeError for a second hook.
        """
        self._check_comm_hook(hook)  # type: ignore[no-untyped-call]
        self._set_comm_hook(CommHook(state, hook, hook.__qualname__))

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """The Python hook of the same name."""
        hooks = {
            BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        self._set_comm_hook(CommHook(self.process_group, hooks[comm_hook_type], str(comm_hook_type)))

    def _set_comm_hook(self, hook: CommHook) -> None:
        scheduler = self._scheduler_or_open()
        if scheduler.hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        scheduler.set_hook(hook)

    # Uneven inputs

    def join_hook(self, **kwargs: Any) -> UnevenInputs:
        """What torch's Join calls when this rank has run out of inputs."""
        self._training_ranks.by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return UnevenInputs(self)

    def _count_training_ranks(self, *, trains: bool) -> bool:
        """All ranks tell each other who trains (collective); returns whether anybody does."""
        return self._training_ranks.count(self.process_group, self.device, trains=trains)

    # What torch's class has beside the documented

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """The keys of torch's class that mean something here."""
        trainable, scheduler = self._backward.trained.named, self._scheduler
        environment = {
            key: os.environ.get(variable, "N/A")
            for key, variable in (
                ("master_port", "MASTER_PORT"),
                ("master_addr", "MASTER_ADDR"),
                ("torch_distributed_debug", "TORCH_DISTRIBUTED_DEBUG"),
                ("cuda_visible_devices", "CUDA_VISIBLE_DEVICES"),
            )
        }
        hook = scheduler.hook if scheduler is not None else None
        return {
            **environment,
            "world_size": 1 if self.process_group is None else dist.get_world_size(self.process_group),
            "rank": my_rank(),
            "module_name": type(self.module).__name__,
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "output_device": -1 if self.output_device is None else self.output_device,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "backend_name": "" if self.process_group is None else dist.get_backend(self.process_group),
            "iteration": scheduler.numbers.begun if scheduler is not None else 0,
            "dtypes": ", ".join(dict.fromkeys(dtype_name(p.dtype) for _, p in trainable)),
            "total_parameter_size_bytes": sum(p.nbytes for _, p in trainable),
            "num_parameter_tensors": len(trainable),
            "bucket_sizes": ", ".join(str(bucket.gradient_bytes) for bucket in scheduler.buckets)
            if scheduler is not None
            else "",
            "has_rebuilt_buckets": 0,
            "can_set_static_graph": 1,
            **({"comm_hook": hook.name} if hook is not None else {}),
            **({"has_error": 1, "error": self._last_error} if self._last_error else {}),
        }

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        """Raise, and tell `_get_ddp_logging_data`."""
        self._last_error = f"{type(self.module).__name__}: {err_msg}"
        raise err_type(err_msg)

    def _set_static_graph(self) -> None:
        """Nothing depends on it: every graph may change."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
        self.static_graph = True

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Every step is logged."""
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")

    def _remove_autograd_hooks(self) -> None:
        """Gradients stay as they are from now on, on this rank."""
        self._backward.trained.unhook()

    def _check_reducer_finalized(self) -> None:
        """Raises RuntimeError if a backward has not come to its end."""
        if self._scheduler is not None and self._scheduler.step is not None:
            raise RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one.")

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Average over other ranks from the next synced forward on, which opens buckets in that group."""
        if is_member(new_process_group):
            self.process_group = new_process_group
            self._backward.scheduler = None

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        raise RuntimeError("an optimizer cannot step in backward: gradients are averaged when all of it is done")

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        raise RuntimeError("sparse gradients are not reduced: make the embedding with sparse=False")


def group_of(group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The group that is meant, None for a lone process. Raises RuntimeError for both, or a mesh of more dimensions."""
    if mesh is None:
        return group or (dist.group.WORLD if dist.is_initialized() else None)
    if group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {mesh}.")
    return mesh.get_group(mesh_dim=0)


def caps_in_bytes(cap_mb: float | None, cap_mb_list: Sequence[float] | None) -> tuple[int, ...]:
    """How large each bucket may become; the last number is that of all further ones. Raises ValueError from 0 down."""
    caps = tuple(cap_mb_list or ()) or ((FIRST_BUCKET_MB, DEFAULT_BUCKET_MB) if cap_mb is None else (cap_mb,))
    if not all(cap > 0 for cap in caps):
        raise ValueError(f"bucket caps must be positive, got bucket_cap_mb={cap_mb}, bucket_cap_mb_list={cap_mb_list}")
    return tuple(int(cap * (1 << 20)) for cap in caps)
