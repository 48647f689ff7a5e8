"""Where the bytes of a launch lie: in the workspace, or in tensors that are read where they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Location:
    """Where a tensor begins in the workspace: `offset` bytes into this rank's region of arena number `arena`."""

    arena: int
    offset: int


@dataclass(frozen=True, slots=True)
class Source:
    """Elements [start, start + tensor.numel()) are read from `tensor`, a vector of the launch's dtype."""

    start: int
    tensor: torch.Tensor
