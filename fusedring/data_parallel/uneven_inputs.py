"""Training with uneven inputs: what a rank that has run out of inputs does while others still train.

Part of torch's Join context: such a rank shadows each iteration of the others, collective by collective, with gradients
of zero; at the end all take the model of a rank that trained to the last.
"""

from __future__ import annotations

from typing import Protocol

from torch.distributed.algorithms.join import JoinHook


class Shadowing(Protocol):
    """What is asked of a wrapper."""

    _divide_by_initial_world_size: bool

    def _shadow_iteration(self) -> None: ...
    def _sync_final_model(self, is_last_joiner: bool) -> None: ...


class UnevenInputs(JoinHook):
    """The hook of one wrapper. divide_by_initial_world_size: or else by the number of ranks that still train."""

    def __init__(self, wrapper: Shadowing, *, divide_by_initial_world_size: bool) -> None:
        self._wrapper = wrapper
        wrapper._divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """Shadow one iteration of the others: forward, then backward."""
        self._wrapper._shadow_iteration()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the model of a rank that joined last."""
        self._wrapper._sync_final_model(is_last_joiner)
