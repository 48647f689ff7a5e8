"""Gradients that a compiled backward announces: computed, and accumulated into `.grad` when its graph is through.

An announced gradient may be taken into its bucket at once, long before. That is right only if it is all that the
parameter gets in this backward, which nobody knows yet. So it is taken if it was so in the backward before; and when
autograd has accumulated, it is checked: what is in `.grad` has to be the very memory that was announced, not written
since. For that, what was in `.grad` before is set aside meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusedring.data_parallel.buckets import Entry


@dataclass(slots=True)
class _Announced:
    """memory, version: data_ptr() and version of the announced tensor. parts: how many were announced.

    before: the `.grad` that was set aside. taken: whether the sum of it and the gradient is in the bucket.
    """

    memory: int
    version: int
    before: torch.Tensor | None
    taken: bool
    parts: int = 1

    def put_back(self, parameter: torch.Tensor) -> None:
        """What was set aside becomes `.grad` again, if nothing has been accumulated."""
        if parameter.grad is None:
            parameter.grad = self.before


class Announcements:
    """Of the entries of one scheduler. True while some are announced that have not been accumulated.

    after: those of the scheduler before, whose parameters these may be, too.
    """

    def __init__(self, entries: Sequence[Entry], after: Announcements | None) -> None:
        self._entries = entries
        self._whole: set[int] = {id(e.parameter) for e in entries} & (after._whole if after is not None else set())
        """The ids of parameters whose gradient was all that had been announced, when last one was announced."""
        self._open: dict[int, _Announced] = {}
        self.partial: set[int] = set()
        """The ids of entries that were taken in this step, though it was not all of their gradient."""

    def __bool__(self) -> bool:
        return bool(self._open)

    def __contains__(self, entry: Entry) -> bool:
        return id(entry) in self._open

    @property
    def may_be_partial(self) -> bool:
        """Whether an entry was taken in part in this step, or may turn out to have been."""
        return bool(self._open) or bool(self.partial)

    def announce(self, entry: Entry, grad: torch.Tensor, *, probably_all: bool) -> bool:
        """`grad` is on its way to the entry's `.grad`. Returns whether it was taken into the bucket.

        grad: with the shape of the parameter. probably_all: whether no other graph has used the parameter since the
        last backward. Raises RuntimeError for one more gradient of an entry whose first was taken.
        """
        known = self._open.get(id(entry))
        if known is not None:
            if known.taken:
                raise twice(entry)
            known.parts += 1
            return False
        parameter, before = entry.parameter, entry.parameter.grad
        may_be_read = before is None or before.layout == torch.strided
        taken = probably_all and id(parameter) in self._whole and may_be_read and _lies_as(grad, entry.view)
        if taken:
            if before is entry.view:
                entry.view.add_(grad)
            elif before is None:
                entry.view.copy_(grad)
            else:
                torch.add(before.detach(), grad, out=entry.view)
        self._open[id(entry)] = _Announced(grad.data_ptr(), grad._version, before, taken)
        parameter.grad = None
        return taken

    def settle(self, entry: Entry) -> bool:
        """A gradient has been accumulated. Returns whether it had been taken when it was announced."""
        known = self._open.pop(id(entry), None)
        if known is None:
            return False
        parameter, grad = entry.parameter, entry.parameter.grad
        whole = (
            grad is not None
            and known.parts == 1
            and grad.layout == torch.strided
            and (grad.data_ptr(), grad._version) == (known.memory, known.version)
        )
        (self._whole.add if whole else self._whole.discard)(id(parameter))
        if known.taken and not whole:
            self.partial.add(id(entry))
        if known.before is not None:
            if not known.taken and grad is not None:
                known.before.add_(grad)
            parameter.grad = known.before
        return known.taken

    def settle_all(self) -> None:
        """Autograd is through: what it has not accumulated by now, it will not."""
        for entry in self._entries if self._open else ():
            self.settle(entry)

    def withdraw(self) -> None:
        """The backward has failed: nothing more comes, and what was set aside is put back."""
        for entry in self._entries if self._open else ():
            known = self._open.pop(id(entry), None)
            if known is not None:
                known.put_back(entry.parameter)
        self.partial.clear()


def refuse(names: Sequence[str]) -> None:
    """Raises RuntimeError if entries of these names were partial on some rank."""
    if names:
        raise RuntimeError(
            f"the gradient of parameter {', '.join(names)} is not what a compiled backward had computed when it was "
            "sent: on some rank the parameter was used outside of the compiled part, too, which it was not in the step "
            "before. The gradients of this step are wrong on all ranks; those of the next will be right"
        )


def twice(entry: Entry) -> RuntimeError:
    """What is wrong where a gradient comes when one was taken already."""
    return RuntimeError(
        f"the gradient of parameter {entry.name} became ready twice in one backward, and the first may have been sent "
        "already. Use checkpoint(..., use_reentrant=False), or no_sync() around all but the last of several backward "
        "passes"
    )


def _lies_as(grad: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether autograd makes `grad` the `.grad` of a parameter with the strides of `view`, instead of copying it."""
    strides = zip(grad.shape, grad.stride(), view.stride(), strict=True)
    return grad.dtype == view.dtype and all(size == 1 or a == b for size, a, b in strides)
