"""FusedRingDDP: the module wrapper that keeps replicas in step by averaging their gradients during backward."""

from __future__ import annotations

import copy
import functools
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import DeviceMesh

from fusedring.config import RingConfig, WireDtype
from fusedring.data_parallel.backward import Backward, Run
from fusedring.data_parallel.bucket_memory import BucketMemory, Wrapped
from fusedring.data_parallel.buffers import BROADCAST_BYTES, BufferSync, broadcast, chosen_sync
from fusedring.data_parallel.checks import check_module, gpu_of, in_words
from fusedring.data_parallel.compile import operators
from fusedring.data_parallel.compile.dynamo import break_graph
from fusedring.data_parallel.compile.wrapper import InGraphs, traced_forward
from fusedring.data_parallel.parameters import TrainedParameters
from fusedring.data_parallel.scheduler import Scheduler
from fusedring.data_parallel.torch_contract import TorchContract, caps_in_bytes, group_of
from fusedring.data_parallel.uneven_inputs import TrainingRanks
from fusedring.log import logger
from fusedring.observe.report import StepReport
from fusedring.observe.tracing import FORWARD, recording
from fusedring.torch_internals import BufferCommHookLocation, inputs_on_device


class FusedRingDDP(TorchContract):
    """Data parallelism as `torch.nn.parallel.DistributedDataParallel`: change one line, train as before.

    Every rank runs the same module on its own part of the batch; at the end of `backward()` every parameter's `.grad`
    is the mean over the ranks, the same bits everywhere. Averaging overlaps backward, bucket by bucket.

    module: the module to wrap, the same on all ranks, with all parameters in host memory or on one GPU. Its parameters
        and buffers are overwritten by rank 0's.
    device_ids, output_device: None, or that GPU ([i], i); then inputs are moved to it.
    forward_sync_buffers: send rank 0's buffers to all ranks before every synced forward. broadcast_buffers: the same by
        its older name, where False means not at the start either.
    init_sync: broadcast the module's state now.
    process_group, device_mesh: a group, or a 1-D mesh that stands for one; None is the default group.
    bucket_cap_mb, bucket_cap_mb_list: MiB of gradients per launch, of all or of each; None is 25 with a first of 1.
    find_unused_parameters: True expects parameters to go without a gradient now and then. A parameter that only some
        ranks used gets the mean, with zero for the others; one that no rank used keeps its `.grad`. If False, the same
        happens, but a warning names the parameters and the next synced forward raises RuntimeError.
    gradient_as_bucket_view: `.grad` is a view into the bucket (the default here, unlike in torch's class): gradients
        are not copied back, and zero_grad(set_to_none=False) saves the copy into the bucket as well.
    delay_all_reduce_named_params, param_to_hook_all_reduce: both or none; these parameters are averaged as the others.
    dim, check_reduction, static_graph, skip_all_reduce_unused_params, batched_grad_copy: accepted; nothing depends on
        them. mixed_precision: refused, see wire_dtype and torch.autocast.
    wire_dtype, algorithm, engine, timeout: as for `fusedring.all_reduce`.
    channels: programs of each kernel on a GPU, 1 to 128: more are faster, and leave fewer multiprocessors to backward.

    A parameter's own hooks see its local gradient. What they change in `.grad` is averaged if they were registered
    before wrapping; of later ones it is unspecified.

    Raises RuntimeError for a module without trainable parameters or with uninitialised ones, ValueError for wrong
    arguments (naming a parameter whose gradient cannot be reduced), MismatchError with the same text on every rank if
    the ranks' modules or options differ.

    It is a subclass of torch's class, since others ask for that with isinstance, but has no Reducer.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: object = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        wire_dtype: WireDtype = None,
        algorithm: str = "auto",
        engine: str = "auto",
        timeout: float | None = None,
        channels: int | None = None,
    ) -> None:
        nn.Module.__init__(self)  # not torch's class, which would build its Reducer
        Joinable.__init__(self)
        self.config = RingConfig(wire_dtype, algorithm, engine, timeout, channels)
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time"
            )
        if mixed_precision is not None:
            raise ValueError(
                "mixed_precision keeps a second copy of the parameters: use torch.autocast for the forward, and "
                "wire_dtype for what crosses between ranks"
            )
        if check_reduction:
            warnings.warn("check_reduction is deprecated, and nothing depends on it", FutureWarning, stacklevel=2)
        self.module = module
        self.dim = dim
        self.process_group = group_of(process_group, device_mesh)  # type: ignore[assignment]
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.forward_sync_buffers, init_sync_buffers = chosen_sync(broadcast_buffers, forward_sync_buffers)
        self.bucket_caps = caps_in_bytes(bucket_cap_mb, bucket_cap_mb_list)
        self.bucket_bytes_cap = max(self.bucket_caps)
        self.bucket_bytes_cap_list = list(self.bucket_caps) if bucket_cap_mb_list else []
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.mixed_precision = None
        self.logger = None
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        check_module(module, list(self._named_parameters()), engine=self.config.engine, name=type(self).__name__)
        self.device = next(p for _, p in self._named_parameters()).device
        self.device_type = self.device.type
        self.is_multi_device_module = False
        self.device_ids = gpu_of(self.device, device_ids, output_device)
        self.output_device = self.device.index if self.device_ids else None
        self.broadcast_bucket_size = BROADCAST_BYTES
        self.use_side_stream_for_tensor_copies = True
        self._passing_sync_batchnorm_handle(self.module)  # type: ignore[no-untyped-call]
        self._start_locally()
        self._open(init_sync=init_sync, init_sync_buffers=init_sync_buffers)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. Whether the next backward is synced is decided here (see `no_sync`)."""
        if torch.compiler.is_compiling():
            return traced_forward(self, inputs, kwargs)
        started = time.perf_counter()
        if self.device_ids:
            inputs, kwargs = self._on_device(inputs, kwargs)
        operators.announce_when_compiling()
        self._before_forward()
        output = self.module(*inputs, **kwargs)
        if self._syncs_buffers(BufferCommHookLocation.POST_FORWARD):
            self._sync_buffers()
        synced = self._backward.synced
        if torch.is_grad_enabled():
            self.require_forward_param_sync = synced
            if synced:
                self._backward.watch(output, (inputs, kwargs))
        if self._scheduler is not None and recording():
            name = FORWARD if torch.is_grad_enabled() else f"{FORWARD} without gradients"
            self._scheduler.track.span(name, started, time.perf_counter(), synced=synced)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: a backward after a forward in this context averages nothing.

        The first backward after a forward outside of it averages everything that was accumulated. It holds for wrappers
        inside of the module, too.
        """
        if torch.compiler.is_compiling():
            break_graph("FusedRingDDP.no_sync() within what is compiled")  # graphs are for both cases
        wrappers = [module for module in self.modules() if isinstance(module, FusedRingDDP)]
        before = [wrapper.require_backward_grad_sync for wrapper in wrappers]
        for wrapper in wrappers:
            wrapper.require_backward_grad_sync = False
        try:
            yield
        finally:
            for wrapper, synced in zip(wrappers, before, strict=True):
                wrapper.require_backward_grad_sync = synced

    def report(self) -> StepReport | None:
        """What the last synced backward did and when; None before the first."""
        return self._scheduler.results.report if self._scheduler is not None else None

    # Opening

    def _start_locally(self) -> None:
        """The state that is this rank's own, and starts anew in a copy of the wrapper."""
        self._training_ranks = TrainingRanks()
        self._last_error = ""
        self._buffers_under_way = BufferSync()
        tags: list[torch.Tensor] = []
        trained = TrainedParameters(self.module, self._named_parameters())
        self._backward = Backward(
            type(self).__name__, trained, functools.partial(_at_end, self._buffers_under_way, tags)
        )
        self._in_graphs = InGraphs(self, self._backward, self._buffers_under_way, tags)
        self._tag = self._in_graphs.tag
        self._follow(trained)

    def _follow(self, trained: TrainedParameters) -> None:
        """Hear of the gradients of these parameters, which get buckets of their own."""
        self._backward.trained = trained
        self._synced_forwards = 0
        self._memory = BucketMemory(trained)
        trained.hook(self._backward, Backward.on_gradient)
        self._in_graphs.follow_parameters()

    def _wrap_anew(self) -> Scheduler:
        """The module's parameters are others now, on all ranks (collective): a rank that disagrees is found."""
        trained = TrainedParameters(self.module, self._named_parameters())
        if self._scheduler is not None and not self._scheduler.closed:
            self._scheduler.announce_new_buckets(len(trained.named))
        self._backward.trained.unhook()
        self._follow(trained)
        logger.info("the trainable parameters have changed: making buckets for them anew")
        return self._open()

    def _open(self, *, init_sync: bool = False, init_sync_buffers: bool = False) -> Scheduler:
        """Agree with the other ranks and get memory for the buckets (collective)."""
        parameters, buffers = list(self._named_parameters()), list(self._named_buffers())
        statements = [in_words("parameter", name, p) for name, p in parameters]
        statements += [in_words("buffer", name, b) for name, b in buffers]
        statements.append(
            f"{self.config}, bucket caps {list(self.bucket_caps)} bytes, "
            f"find_unused_parameters={self.find_unused_parameters}, "
            f"forward_sync_buffers={self.forward_sync_buffers}, init_sync={init_sync}"
        )

        def send_state() -> None:
            if init_sync:
                state = [p for _, p in parameters] + ([b for _, b in buffers] if init_sync_buffers else [])
                broadcast(self.process_group, state)

        opened = self._memory.open(self._wrapped(), statements, before=self._scheduler, meanwhile=send_state)
        self._backward.scheduler, self._backward.places = opened.scheduler, opened.places
        return opened.scheduler

    def _wrapped(self) -> Wrapped:
        ignored = self.parameters_to_ignore
        return Wrapped(
            name=type(self).__name__,
            group=self.process_group,
            config=self.config,
            device=self.device,
            caps=self.bucket_caps,
            grad_is_view=self.gradient_as_bucket_view,
            whole=not any(p.requires_grad and name in ignored for name, p in self.module.named_parameters()),
        )

    def _scheduler_or_open(self) -> Scheduler:
        if self._scheduler is None or self._scheduler.closed:
            return self._open()
        return self._scheduler

    # Training

    def _before_forward(self) -> None:
        """Decide whether the next backward is synced, and be ready for it."""
        backward, in_backward = self._backward, Run.under_way()
        backward.abandon_failed()
        if not torch.is_grad_enabled():
            # If this is the first half of reentrant checkpointing, the forward that counts comes within backward.
            backward.decided = backward.decided and in_backward
            return
        if in_backward and backward.decided:
            return  # a forward is repeated for its intermediate values; what was decided stands
        backward.decided, backward.expects_unused = True, self.find_unused_parameters
        Join.notify_join_context(self)
        if self._join_config.enable:
            self._count_training_ranks(trains=self.require_backward_grad_sync)
        backward.synced = self.require_backward_grad_sync and any(p.requires_grad for _, p in self._named_parameters())
        scheduler = self._scheduler
        if not backward.synced:
            if scheduler is not None:
                scheduler.turn.expecting = False
            return
        if scheduler is not None and (late := scheduler.late_elsewhere()):
            backward.tell_missing(late)
        if backward.unfinished:
            text, backward.unfinished = backward.unfinished, ""
            self._log_and_throw(RuntimeError, text)
        scheduler = self._wrap_anew() if backward.trained.have_changed() else self._scheduler_or_open()
        self._synced_forwards += 1
        if self._synced_forwards == 2 and self._memory.learn_order(self._wrapped(), scheduler):
            scheduler = self._open()
        scheduler.expect(training=self.training, late=in_backward)
        scheduler.divisor = self._training_ranks.divisor
        if self._syncs_buffers(BufferCommHookLocation.PRE_FORWARD):
            self._sync_buffers()

    def _expect_synced_backward(self) -> None:
        if torch.is_grad_enabled() and not Run.under_way():
            scheduler = self._scheduler_or_open()
            if not scheduler.turn.expecting:
                self._backward.synced, self._backward.expects_unused = True, self.find_unused_parameters
                scheduler.expect(training=self.training)
                scheduler.divisor = self._training_ranks.divisor

    def _on_device(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the inputs of a forward to the module's GPU, as torch's class does."""
        moved = inputs_on_device(inputs, kwargs, self.device, use_side_stream_for_tensor_copies=True)
        return moved[0][0], moved[1][0]

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what ties the wrapper to its ranks."""
        state = dict(self.__dict__)
        for name in _OF_THIS_RANK:
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy opens its buckets at its first synced forward, in the default group."""
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        self.process_group = group_of(None, None)  # type: ignore[assignment]
        self._start_locally()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        new.process_group = self.process_group
        return new


_OF_THIS_RANK = (
    "_backward",
    "_buffers_under_way",
    "_in_graphs",
    "_memory",
    "_tag",
    "_training_ranks",
    "process_group",
)
"""Attributes that a copy makes for itself."""


def _at_end(buffers: BufferSync, tags: list[torch.Tensor]) -> None:
    """A backward has ended."""
    operators.forget_uses(tags)
    buffers.wait()
