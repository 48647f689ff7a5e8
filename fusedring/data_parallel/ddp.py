"""FusedRingDDP: the module wrapper that keeps replicas in step by averaging their gradients during backward."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import time
import warnings
import weakref
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from fusedring.config import RingConfig, WireDtype
from fusedring.data_parallel.buckets import bind, lay_out
from fusedring.data_parallel.checks import check_agreement, check_module, gpu_of, in_words
from fusedring.data_parallel.compile import operators as compiled
from fusedring.data_parallel.compile.dynamo import in_compiled_autograd, is_compiled, undisturbed
from fusedring.data_parallel.compile.modules import arm
from fusedring.data_parallel.scheduler import Backward, Scheduler
from fusedring.data_parallel.torch_contract import BROADCAST_BYTES, TorchContract, caps_in_bytes, group_of
from fusedring.errors import FusedRingError
from fusedring.group.communicator import communicator_of
from fusedring.log import logger, my_rank
from fusedring.observe.report import StepReport
from fusedring.observe.tracing import FORWARD, recording


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
        init_sync_buffers = self._choose_buffer_sync(broadcast_buffers, forward_sync_buffers)
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
        self._divide_by_initial_world_size = True
        self._is_shadow = False
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
        self._open(init_sync, init_sync_buffers)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. Whether the next backward is synced is decided here (see `no_sync`)."""
        if torch.compiler.is_compiling():
            return self._traced_forward(inputs, kwargs)
        started = time.perf_counter()
        if self.device_ids:
            inputs, kwargs = self._on_device(inputs, kwargs)
        compiled.arm_when_compiling()
        self._before_forward()
        output = self.module(*inputs, **kwargs)
        if self._syncs_buffers(_BufferCommHookLocation.POST_FORWARD):
            self._sync_buffers()
        if torch.is_grad_enabled():
            self.require_forward_param_sync = self._synced
            if self._synced:
                self._watch(output, inputs, kwargs)
        if self._scheduler is not None and recording():
            name = FORWARD if torch.is_grad_enabled() else f"{FORWARD} without gradients"
            self._scheduler.track.span(name, started, time.perf_counter(), synced=self._synced)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: a backward after a forward in this context averages nothing.

        The first backward after a forward outside of it averages everything that was accumulated. It holds for wrappers
        inside of the module, too.
        """
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break("FusedRingDDP.no_sync() within what is compiled")  # graphs are for both cases
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
        return self._scheduler.report if self._scheduler is not None else None

    # Opening

    def _on_device(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the inputs of a forward to the module's GPU, as torch's class does."""
        moved = _to_kwargs(inputs, kwargs, self.device, use_side_stream_for_tensor_copies=True)
        return moved[0][0], moved[1][0]

    def _trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self._named_parameters() if p.requires_grad]

    def _start_locally(self) -> None:
        """The state that is this rank's own, and starts anew in a copy of the wrapper."""
        self._scheduler: Scheduler | None = None
        self._synced = True
        self._decided = False
        self._hides_outputs = False
        self._backward: weakref.ref[Backward] = _NO_BACKWARD
        self._own_tags: list[torch.Tensor] = []
        self._unfinished = ""
        self._warned_of_bypass = False
        self._divisor: int | None = None
        self._last_error = ""
        self._buffer_futures: list[torch.futures.Future[Any]] = []
        self._tag = compiled.tag(self)
        self._armed = is_compiled(self.module)
        compiled.listen(self)
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        """Have `_on_gradient` called for each trainable parameter that the module has now."""
        self._parameters_at_start = self._trainable()
        self._index_of = {id(parameter): index for index, (_, parameter) in enumerate(self._parameters_at_start)}
        modules = list(self.module.modules())
        self._synced_forwards = 0
        self._order: list[int] = []
        self._contents = [
            (module._parameters, [(p, _trained_as(p)) for p in module._parameters.values()]) for module in modules
        ]
        self._children = [(module._modules, list(module._modules.values())) for module in modules if module._modules]
        self._register_hooks()
        if self._armed:
            self._arm()

    def _register_hooks(self) -> None:
        # The parameters outlive the wrapper, so their hooks must neither keep it alive nor stay when it is gone.
        hook = undisturbed(_gradient_hook)
        handles = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(hook, weakref.ref(self), index)
            )
            for index, (_, parameter) in enumerate(self._parameters_at_start)
        ]
        self._hooks = weakref.finalize(self, _remove, handles)
        self._hooks.atexit = False

    def _has_changed(self) -> bool:
        """Whether parameters were replaced, added, removed, frozen, unfrozen or converted since they were hooked."""
        for children, before in self._children:
            if len(children) != len(before) or any(map(operator.is_not, children.values(), before)):
                return True
        for parameters, known in self._contents:
            if len(parameters) != len(known):
                return True
            for now, (then, trained_as) in zip(parameters.values(), known, strict=True):
                # What torch.func.functional_call puts there for the time of a call is no parameter.
                if now is not then and (now is None or isinstance(now, nn.Parameter)):
                    return True
                if now is then and _trained_as(now) is not trained_as:
                    return True
        return False

    def _wrap_anew(self) -> Scheduler:
        """The module's parameters are others now, on all ranks (collective): a rank that disagrees is found."""
        if self._scheduler is not None and not self._scheduler.closed:
            self._scheduler.announce_wrapping(len(self._trainable()))
        self._hooks()
        self._hook_parameters()
        logger.info("the trainable parameters have changed: making buckets for them anew")
        return self._open(init_sync=False)

    def _open(self, init_sync: bool, init_sync_buffers: bool = False) -> Scheduler:
        """Agree with the other ranks and get memory for the buckets (collective)."""
        trainable = self._parameters_at_start
        layouts = lay_out(trainable, self.bucket_caps, self._order)
        self._members = [layout.members for layout in layouts]
        communicator = communicator_of(self.process_group, timeout=self.config.timeout)
        mine = [in_words("parameter", name, p) for name, p in self._named_parameters()]
        mine += [in_words("buffer", name, b) for name, b in self._named_buffers()]
        mine.append(
            f"{self.config}, bucket caps {list(self.bucket_caps)} bytes, "
            f"find_unused_parameters={self.find_unused_parameters}, "
            f"forward_sync_buffers={self.forward_sync_buffers}, init_sync={init_sync}"
        )
        check_agreement(communicator, mine, timeout=self.config.timeout, name=type(self).__name__)
        offsets, end = [], 0
        for layout in layouts:
            offsets.append(end)
            end += -(-layout.elements * layout.dtype.itemsize // 64) * 64
        memory = communicator.allocate(end, self.device, timeout=self.config.timeout)
        if init_sync:  # only now: a rank that gave up above would leave the others waiting in the broadcast
            state = [p for _, p in self._named_parameters()]
            self._broadcast([*state, *((b for _, b in self._named_buffers()) if init_sync_buffers else ())])
        buckets = [
            bind(layout, trainable, memory[at : at + layout.elements * layout.dtype.itemsize].view(layout.dtype))
            for at, layout in zip(offsets, layouts, strict=True)
        ]
        self._places = {
            index: (b, position) for b, layout in enumerate(layouts) for position, index in enumerate(layout.members)
        }
        self._scheduler = Scheduler(
            communicator, buckets, self.config, grad_is_view=self.gradient_as_bucket_view, after=self._scheduler
        )
        logger.info("%d buckets, %d bytes, world size %d", len(buckets), end, communicator.world_size)
        return self._scheduler

    def _learn_order(self, scheduler: Scheduler) -> Scheduler:
        """Before the second synced forward: lay the buckets out in the order in which rank 0's gradients came in the
        first backward (collective). Only where that makes other buckets.
        """
        if len(self._members) == 1 or scheduler.is_captured():
            return scheduler
        scheduler.announce_wrapping(len(self._parameters_at_start))
        place = {name: index for index, (name, _) in enumerate(self._parameters_at_start)}
        communicator = communicator_of(self.process_group, timeout=self.config.timeout)
        mine = [place[name] for name in scheduler.order]
        order: list[int] = communicator.exchange(
            mine if communicator.rank == 0 else None,
            timeout=self.config.timeout,
            purpose="learn the order of gradients",
        )[0]
        layouts = lay_out(self._parameters_at_start, self.bucket_caps, order)
        if [set(layout.members) for layout in layouts] == list(map(set, self._members)):
            return scheduler
        self._order = order
        logger.info("gradients come in another order than parameters were registered: making buckets anew")
        return self._open(init_sync=False)

    def _scheduler_or_open(self) -> Scheduler:
        if self._scheduler is None or self._scheduler.closed:
            return self._open(init_sync=False)
        return self._scheduler

    # Training

    def _before_forward(self) -> None:
        scheduler, in_backward = self._scheduler, Backward.under_way()
        if scheduler is not None and scheduler.in_step and not in_backward:
            scheduler.abandon()
        if not torch.is_grad_enabled():
            # If this is the first half of reentrant checkpointing, the forward that counts comes within backward.
            self._decided = self._decided and in_backward
            return
        if in_backward and self._decided:
            return  # a forward is repeated for its intermediate values; what was decided stands
        self._decided = True
        Join.notify_join_context(self)
        if self._join_config.enable:
            self._count_training_ranks()
        self._synced = self.require_backward_grad_sync and any(p.requires_grad for _, p in self._named_parameters())
        if not self._synced:
            if scheduler is not None:
                scheduler.expect_nothing()
            return
        if scheduler is not None and (late := scheduler.late_elsewhere()):
            self._tell_missing(late)
        if self._unfinished:
            text, self._unfinished = self._unfinished, ""
            self._log_and_throw(RuntimeError, text)
        scheduler = self._wrap_anew() if self._has_changed() else self._scheduler_or_open()
        self._synced_forwards += 1
        if self._synced_forwards == 2:
            scheduler = self._learn_order(scheduler)
        scheduler.expect(training=self.training, late=in_backward)
        scheduler.divisor = self._divisor
        if self._syncs_buffers(_BufferCommHookLocation.PRE_FORWARD):
            self._sync_buffers()

    def _watch(self, output: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notice the first gradient of a backward through `output`.

        A step begins with the first gradient of a parameter, since autograd.grad comes through the output as well. Only
        where there is no way from the output to a parameter does it begin at the output.
        """
        outputs = [tensor for tensor in _tensors_in(output) if tensor.grad_fn is not None]
        self._hides_outputs = not outputs
        inputs_need_grad = any(tensor.requires_grad for tensor in _tensors_in((inputs, kwargs)))
        alone = inputs_need_grad and not _lead_to_any(outputs, self._index_of)
        hook = functools.partial(undisturbed(_output_hook), self, alone)
        for tensor in outputs:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _on_output_gradient(self, alone: bool) -> None:
        if self._synced:
            scheduler, backward = self._enter_backward()
            if alone:
                scheduler.begin(backward)

    # Under torch.compile

    def _arm(self) -> None:
        """Have the module announce gradients in what is compiled from now on."""
        if not self._armed and self._hooks.alive:
            self._hooks()
            self._register_hooks()  # undisturbed
        self._armed = True
        self._own_tags = arm(self.module.modules(), (parameter for _, parameter in self._parameters_at_start))

    def _traced_forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`forward` in a graph: what the wrapper does, the graph has it do when it is run."""
        compiled.arm_all()
        if self.device_ids:
            inputs, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), (inputs, kwargs))
        if not torch.is_grad_enabled():
            compiled.trace_forward_begins(self._tag, [])
            return self.module(*inputs, **kwargs)
        before, after = self._buffers_to_sync()
        compiled.trace_forward_begins(self._tag, before)
        announced = compiled.traced_announcements()
        output = self.module(*inputs, **kwargs)
        if compiled.traced_announcements() == announced:
            output = compiled.trace_outputs(self._tag, output)
        compiled.trace_forward_ends(self._tag, after)
        return output

    def _buffers_to_sync(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Those that may be sent before a forward, and after one."""
        buffers = [buffer for _, buffer in self._named_buffers()] if self.forward_sync_buffers else []
        hook = getattr(self, "buffer_hook", None)
        if hook is not None and hook.buffer_comm_hook_location == _BufferCommHookLocation.POST_FORWARD:
            return [], buffers
        return buffers, []

    def _traced_forward_begins(self, buffers: Sequence[torch.Tensor]) -> None:
        with self._buffers_in_graph(buffers):
            self._before_forward()

    def _traced_forward_ends(self, buffers: Sequence[torch.Tensor]) -> None:
        if self._syncs_buffers(_BufferCommHookLocation.POST_FORWARD):
            with self._buffers_in_graph(buffers):
                self._sync_buffers()
        self.require_forward_param_sync = self._synced
        self._hides_outputs = False

    def _traced_backward_begins(self) -> None:
        if self._synced:
            self._begin_step()

    def _on_announced(self, parameter: nn.Parameter, grad: torch.Tensor, *, only_use: bool) -> None:
        """A gradient is computed, and on its way to `.grad`."""
        index = self._index_of.get(id(parameter))
        if index is None or not self._synced or not self._hooks.alive or _has_hooks_of_others(parameter):
            return
        if self._backward() is None and (self._scheduler is None or not self._scheduler.expecting):
            return  # `_on_gradient` deals with it
        self._begin_step().announced(*self._places[index], grad, probably_all=only_use)

    def _begin_step(self) -> Scheduler:
        """In a hook: from here on a step is under way. No caller keeps the `Backward`, as an error's frames would."""
        scheduler, backward = self._enter_backward()
        scheduler.begin(backward)
        return scheduler

    def _refuse_traced_backward(self, parameter: nn.Parameter) -> None:
        if self._synced and id(parameter) in self._index_of:
            raise RuntimeError(
                f"rank {my_rank()}: the gradient of parameter {self._name_of(parameter)} is computed in a compiled "
                "graph that contains the backward, so it cannot be averaged: call backward() outside of what "
                "torch.compile compiles, and leave torch._dynamo.config.trace_autograd_ops off"
            )

    def _name_of(self, parameter: nn.Parameter) -> str:
        return self._parameters_at_start[self._index_of[id(parameter)]][0]

    def _enter_backward(self) -> tuple[Scheduler, Backward]:
        """In a hook: have `_on_backward_end` called at the end of the outermost run of autograd's engine."""
        scheduler, backward = self._scheduler, self._backward()
        if scheduler is None or scheduler.closed:
            raise FusedRingError(
                f"rank {my_rank()}: the group's workspace was closed between the forward and the backward of a "
                f"{type(self).__name__}. Close it before a forward or after a backward, on all ranks"
            )
        if backward is None:
            if scheduler.in_step:
                scheduler.abandon()  # of a run that failed
            if in_compiled_autograd():
                raise FusedRingError(
                    f"rank {my_rank()}: a {type(self).__name__} cannot average gradients under compiled autograd, "
                    "which does not say when a backward ends. Leave torch._dynamo.config.compiled_autograd off; the "
                    "forward may be compiled"
                )
            backward = Backward(self._on_backward_end)
            failed = functools.partial(undisturbed(_run_failed), weakref.ref(self))
            self._backward = weakref.ref(backward, failed)
        return scheduler, backward

    def _on_gradient(self, index: int) -> None:
        """A parameter's gradient has been accumulated into `.grad`."""
        if not self._synced:
            return
        scheduler = self._scheduler
        if self._backward() is not None and scheduler is not None and scheduler.in_step:
            scheduler.ready(*self._places[index])  # what follows has been done
            return
        expected = scheduler is not None and scheduler.expecting
        if self._backward() is None and not expected and not self._hides_outputs:
            self._warn_of_bypass(index)
            return
        self._begin_step().ready(*self._places[index])

    def _warn_of_bypass(self, index: int) -> None:
        if not self._warned_of_bypass:
            self._warned_of_bypass = True
            warnings.warn(
                f"rank {my_rank()}: a gradient of parameter {self._parameters_at_start[index][0]} was computed without "
                f"calling the {type(self).__name__} around it. It stays as it is on this rank, and is averaged with "
                "those of the next synced backward. Call the wrapper, not the module inside it",
                stacklevel=3,
            )

    def _expect_synced_backward(self) -> None:
        if torch.is_grad_enabled() and not Backward.under_way():
            scheduler = self._scheduler_or_open()
            if not scheduler.expecting:
                self._synced = True
                scheduler.expect(training=self.training)
                scheduler.divisor = self._divisor

    def _on_backward_end(self) -> None:
        self._backward = _NO_BACKWARD
        compiled.forget_uses(self._own_tags)
        while self._buffer_futures:
            self._buffer_futures.pop().wait()
        scheduler = self._scheduler
        if scheduler is None or not scheduler.in_step:
            return
        if missing := scheduler.finish():
            self._tell_missing(missing)

    def _tell_missing(self, missing: list[str]) -> None:
        """Warn now, and have the next synced forward raise, unless it was expected."""
        if self.find_unused_parameters:
            return
        everywhere = ", ".join(missing)
        here = set(self._scheduler.late_here if self._scheduler is not None else ())
        indices = [(i, name) for i, (name, _) in enumerate(self._parameters_at_start) if name in here]
        numbers, names = " ".join(str(i) for i, _ in indices) or "none", ", ".join(n for _, n in indices) or "none"
        rank = my_rank()
        self._unfinished = (
            "Expected to have finished reduction in the prior iteration before starting a new one. This error "
            "indicates that your module has parameters that were not used in producing loss. You can enable unused "
            "parameter detection by passing the keyword argument `find_unused_parameters=True` to "
            f"`{type(self).__name__}`, and by making sure all `forward` function outputs participate in calculating "
            f"loss. Parameter indices which did not receive grad for rank {rank}: {numbers} (there is no need to set "
            "the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL). Parameters which did not "
            f"receive grad for rank {rank}: {names}. Parameters without a gradient on some rank: {everywhere}"
        )
        warnings.warn(
            f"no gradient on some rank for {everywhere}: it counted as zero there. The next forward will raise; pass "
            "find_unused_parameters=True if this is meant",
            stacklevel=2,
        )

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
    "_scheduler",
    "_places",
    "_parameters_at_start",
    "_contents",
    "_children",
    "_members",
    "_backward",
    "_hooks",
    "_index_of",
    "_tag",
    "_own_tags",
    "_armed",
    "process_group",
)
"""Attributes that a copy makes for itself."""

_NO_BACKWARD: weakref.ref[Backward] = weakref.ref(type("_Gone", (), {})())


def _trained_as(parameter: torch.Tensor | None) -> torch.dtype | None:
    """The dtype of its gradients; None if it has none."""
    return parameter.dtype if parameter is not None and parameter.requires_grad else None


def _gradient_hook(wrapper: weakref.ref[FusedRingDDP], index: int, _: torch.Tensor) -> None:
    living = wrapper()
    if living is not None:
        living._on_gradient(index)


def _output_hook(wrapper: FusedRingDDP, alone: bool, _: torch.Tensor) -> None:
    wrapper._on_output_gradient(alone)


def _has_hooks_of_others(parameter: torch.Tensor) -> bool:
    """Whether more is to happen between the computation of its gradient and the end of its accumulation."""
    after: dict[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    mine = (_gradient_hook, undisturbed(_gradient_hook))
    return bool(parameter._backward_hooks) or any(getattr(hook, "func", None) not in mine for hook in after.values())


def _run_failed(wrapper: weakref.ref[FusedRingDDP], run: weakref.ref[Backward]) -> None:
    """The engine has let go of a backward whose end was not called: an exception leaves it.

    What was launched by then still writes its averages, to where `.grad` may lie. So that is awaited here, before the
    user's code goes on, and may set gradients to zero.
    """
    living = wrapper()
    if living is not None and living._backward is run and living._scheduler is not None:
        living._scheduler.let_launches_end()


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested containers and dataclasses."""
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += _tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return found


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _lead_to_any(tensors: list[torch.Tensor], variables: Container[int]) -> bool:
    """Whether autograd's graph leads from one of `tensors` to a variable whose id is in `variables`."""
    stack = [tensor.grad_fn for tensor in tensors]
    seen = set(stack)
    while stack:
        node = stack.pop()
        assert node is not None
        if id(getattr(node, "variable", None)) in variables:
            return True
        following = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= following
        stack += following
    return False
