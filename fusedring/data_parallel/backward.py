"""When a synced backward of a wrapper begins, which gradients it brings, and when it ends or fails.

A step is driven by hooks. It begins with the first gradient that reaches the wrapper in a run of autograd's engine, and
finishes in a callback at the end of the *outermost* run, so that nobody sees a half-reduced gradient: a callback queued
inside of reentrant checkpointing would be called at the end of the nested run.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
import weakref
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fusedring.data_parallel.compile.dynamo import in_compiled_autograd, undisturbed
from fusedring.data_parallel.parameters import TrainedParameters
from fusedring.data_parallel.scheduler import Scheduler
from fusedring.data_parallel.step import Step
from fusedring.errors import FusedRingError
from fusedring.log import my_rank
from fusedring.torch_internals import call_at_end_of_run, current_run


class Run:
    """One run of autograd's engine, from a wrapper's first hook in it to `end`, which the engine calls at its end.

    Only the engine holds it, and lets go of it when the run ends, well or not. So a weak reference tells that a run
    failed: it is dead, and `end` was not called. Make it inside a hook of the outermost run.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self.number = current_run()
        self.started = time.perf_counter()
        self._end = end
        end_of_run = functools.partial(undisturbed(Run._ended), self)
        call_at_end_of_run(end_of_run)

    def _ended(self) -> None:
        self._end()

    @staticmethod
    def under_way() -> bool:
        """Whether this thread is inside of any run of autograd's engine."""
        return current_run() >= 0


class Backward:
    """The backward passes of one wrapper. name: of its class, for messages. at_end: called when one has ended.

    synced: whether the last forward that counts was synced, so that the next backward is. decided: whether a forward
    has decided that since the last one without gradients. unfinished: what the next synced forward has to raise, "" if
    nothing. scheduler, places: what drives the buckets, and where in them each parameter lies (bucket, position).
    """

    def __init__(self, name: str, trained: TrainedParameters, at_end: Callable[[], None]) -> None:
        self._name, self._at_end = name, at_end
        self.trained = trained
        self.scheduler: Scheduler | None = None
        self.places: Mapping[int, tuple[int, int]] = {}
        self.synced, self.decided = True, False
        self.expects_unused = False
        self.unfinished = ""
        self._run: weakref.ref[Run] = _NO_RUN
        self._hides_outputs = False
        self._warned_of_bypass = False

    @property
    def expecting(self) -> bool:
        """Whether a synced forward has run and not all buckets were launched since."""
        return self.scheduler is not None and self.scheduler.turn.expecting

    # Where it begins

    def watch(self, output: Any, inputs: Any) -> None:
        """Notice the first gradient of a backward through `output`, of a synced forward of `inputs`.

        A step begins with the first gradient of a parameter, since autograd.grad comes through the output as well. Only
        where there is no way from the output to a parameter does it begin at the output.
        """
        outputs = [tensor for tensor in _tensors_in(output) if tensor.grad_fn is not None]
        self._hides_outputs = not outputs
        inputs_need_grad = any(tensor.requires_grad for tensor in _tensors_in(inputs))
        alone = inputs_need_grad and not _lead_to_any(outputs, self.trained)
        hook = functools.partial(undisturbed(_output_hook), self, alone)
        for tensor in outputs:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def outputs_are_seen(self) -> None:
        """The forward ran in a graph, which notices for itself."""
        self._hides_outputs = False

    def on_output_gradient(self, *, alone: bool) -> None:
        """A gradient has come to an output of the wrapper. alone: none will come to a parameter."""
        if self.synced:
            scheduler, run = self._enter()
            if alone:
                scheduler.begin(run.number, run.started)

    def begin_if_synced(self) -> None:
        """In a hook: if the backward is to be synced, a step is under way from here on."""
        if self.synced:
            self._begin()

    def _begin(self) -> tuple[Scheduler, Step]:
        """No caller keeps the `Run`, as an error's frames would."""
        scheduler, run = self._enter()
        return scheduler, scheduler.begin(run.number, run.started)

    def _enter(self) -> tuple[Scheduler, Run]:
        """In a hook: have `_on_end` called at the end of the outermost run of autograd's engine."""
        scheduler, run = self.scheduler, self._run()
        if scheduler is None or scheduler.closed:
            raise FusedRingError(
                f"rank {my_rank()}: the group's workspace was closed between the forward and the backward of a "
                f"{self._name}. Close it before a forward or after a backward, on all ranks"
            )
        if run is None:
            scheduler.abandon()  # the step of a run that failed
            if in_compiled_autograd():
                raise FusedRingError(
                    f"rank {my_rank()}: a {self._name} cannot average gradients under compiled autograd, "
                    "which does not say when a backward ends. Leave torch._dynamo.config.compiled_autograd off; the "
                    "forward may be compiled"
                )
            run = Run(self._on_end)
            self._run = weakref.ref(run, functools.partial(undisturbed(_run_failed), weakref.ref(self)))
        return scheduler, run

    # What it brings

    def on_gradient(self, index: int) -> None:
        """The gradient of parameter number `index` has been accumulated into `.grad`."""
        if not self.synced:
            return
        scheduler = self.scheduler
        if scheduler is not None and scheduler.step is not None and self._run() is not None:
            scheduler.ready(scheduler.step, *self.places[index])  # what follows has been done
            return
        if self._run() is None and not self.expecting and not self._hides_outputs:
            self._warn_of_bypass(index)
            return
        scheduler, step = self._begin()
        scheduler.ready(step, *self.places[index])

    def on_announced(self, parameter: nn.Parameter, grad: torch.Tensor, *, only_use: bool) -> None:
        """A gradient is computed, and on its way to `.grad`. only_use: whether no other graph used the parameter."""
        index = self.trained.index_of(parameter)
        hooked = index is not None and self.synced and self.trained.hooked
        if index is None or not hooked or self.trained.has_hooks_of_others(parameter):
            return
        if self._run() is None and not self.expecting:
            return  # `on_gradient` deals with it
        scheduler, step = self._begin()
        scheduler.announced(step, *self.places[index], grad, probably_all=only_use)

    def refuse_traced(self, parameter: nn.Parameter) -> None:
        """A graph computes a parameter's gradient, but not in a backward that autograd runs: raises RuntimeError."""
        index = self.trained.index_of(parameter)
        if self.synced and index is not None:
            raise RuntimeError(
                f"rank {my_rank()}: the gradient of parameter {self.trained.named[index][0]} is computed in a compiled "
                "graph that contains the backward, so it cannot be averaged: call backward() outside of what "
                "torch.compile compiles, and leave torch._dynamo.config.trace_autograd_ops off"
            )

    def _warn_of_bypass(self, index: int) -> None:
        if not self._warned_of_bypass:
            self._warned_of_bypass = True
            warnings.warn(
                f"rank {my_rank()}: a gradient of parameter {self.trained.named[index][0]} was computed without "
                f"calling the {self._name} around it. It stays as it is on this rank, and is averaged with "
                "those of the next synced backward. Call the wrapper, not the module inside it",
                stacklevel=3,
            )

    # Where it ends

    def _on_end(self) -> None:
        self._run = _NO_RUN
        self._at_end()
        scheduler = self.scheduler
        if scheduler is not None and scheduler.step is not None and (missing := scheduler.finish(scheduler.step)):
            self.tell_missing(missing)

    def let_launches_end(self, run: weakref.ref[Run]) -> None:
        """The engine has let go of a run whose end was not called: an exception leaves it.

        What was launched by then still writes its averages, to where `.grad` may lie. So that is awaited here, before
        the user's code goes on, and may set gradients to zero.
        """
        if self._run is run and self.scheduler is not None:
            self.scheduler.let_launches_end()

    def abandon_failed(self) -> None:
        """Before a forward: forget the step of a run that failed. Raises what went wrong in its launches."""
        if self.scheduler is not None and not Run.under_way():
            self.scheduler.abandon()

    def tell_missing(self, missing: list[str]) -> None:
        """Warn now, and have the next synced forward raise, unless it was expected."""
        if self.expects_unused:
            return
        everywhere = ", ".join(missing)
        here = set(self.scheduler.late_here if self.scheduler is not None else ())
        indices = [(i, name) for i, (name, _) in enumerate(self.trained.named) if name in here]
        numbers, names = " ".join(str(i) for i, _ in indices) or "none", ", ".join(n for _, n in indices) or "none"
        rank = my_rank()
        self.unfinished = (
            "Expected to have finished reduction in the prior iteration before starting a new one. This error "
            "indicates that your module has parameters that were not used in producing loss. You can enable unused "
            "parameter detection by passing the keyword argument `find_unused_parameters=True` to "
            f"`{self._name}`, and by making sure all `forward` function outputs participate in calculating "
            f"loss. Parameter indices which did not receive grad for rank {rank}: {numbers} (there is no need to set "
            "the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL). Parameters which did not "
            f"receive grad for rank {rank}: {names}. Parameters without a gradient on some rank: {everywhere}"
        )
        warnings.warn(
            f"no gradient on some rank for {everywhere}: it counted as zero there. The next forward will raise; pass "
            "find_unused_parameters=True if this is meant",
            stacklevel=2,
        )


_NO_RUN: weakref.ref[Run] = weakref.ref(type("_Gone", (), {})())


def _output_hook(backward: Backward, alone: bool, _: torch.Tensor) -> None:
    backward.on_output_gradient(alone=alone)


def _run_failed(backward: weakref.ref[Backward], run: weakref.ref[Run]) -> None:
    living = backward()
    if living is not None:
        living.let_launches_end(run)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested containers and dataclasses."""
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += _tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return found


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
