"""Gradients that a compiled backward announces: computed, and accumulated into `.grad` when its graph is through.

An announced gradient may be taken into its bucket at once, long before. That is right only if it is all that the
parameter gets in this backward, which nobody knows yet. So it is taken if it was so in the backward before; and when
autograd has accumulated, it is checked: what is in `.grad` has to be the very memory that was announced, not written
since. For that, what was in `.grad` before is set aside meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fusedring.buckets import Entry


@dataclass(slots=True)
class _Announced:
    """memory, version: of the announced tensor. parts: how many were announced. before: the `.grad` set aside.

    taken: whether the sum of `before` and the gradient is in the bucket.
    """

    memory: int
    version: int
    before: torch.Tensor | None
    taken: bool
    parts: int = 1


class Announcements:
    """Of the entries of one scheduler. True while some are announced that have not been accumulated.

    after: those of the scheduler before, whose parameters these may be, too.
    """

    def __init__(self, after: Announcements | None = None) -> None:
        self._whole: set[int] = set(after._whole) if after is not None else set()
        """The ids of parameters whose gradient was what had been announced, in their last backward."""
        self._open: dict[int, _Announced] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def __contains__(self, entry: Entry) -> bool:
        return id(entry) in self._open

    def announce(self, entry: Entry, grad: torch.Tensor, *, probably_all: bool) -> bool:
        """`grad` is on its way to the entry's `.grad`. Returns whether it was taken into the bucket.

        probably_all: whether one forward has led to this backward. Raises RuntimeError for one more gradient of an
        entry whose first was taken.
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
        """A gradient has been accumulated. Returns whether it had been taken when it was announced.

        Raises RuntimeError if that was not all of it.
        """
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
            raise RuntimeError(
                f"the gradient of parameter {entry.name} is more than a compiled backward had computed when it was "
                "sent: the parameter was used outside of the compiled part, too, which it was not in the step before"
            )
        if known.before is not None:
            if not known.taken and grad is not None:
                known.before.add_(grad)
            parameter.grad = known.before
        return known.taken

    def settle_all(self, entries: Iterable[Entry]) -> None:
        """Autograd is through: what it has not accumulated by now, it will not."""
        if self._open:
            for entry in entries:
                self.settle(entry)

    def withdraw(self, entries: Iterable[Entry]) -> None:
        """The backward has failed: nothing more comes, and what was set aside is put back."""
        for entry in entries if self._open else ():
            known = self._open.pop(id(entry), None)
            if known is not None and entry.parameter.grad is None:
                entry.parameter.grad = known.before

    def forget(self) -> None:
        """The step is over, well or not."""
        self._open.clear()


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
