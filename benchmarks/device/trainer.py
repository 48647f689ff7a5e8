"""A small GPT, trained the same way every time, with the wrapper and without."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusedring.bench.gpt import GPT, GPTConfig, batch_at, corpus, loss_of
from fusedring.data_parallel.ddp import FusedRingDDP


@dataclass(frozen=True, slots=True)
class Trainer:
    """What the small GPT is trained with."""

    device: torch.device
    config: GPTConfig
    batch_size: int
    steps: int
    data: torch.Tensor

    @classmethod
    def on(cls, device: torch.device, *, dry: bool) -> Trainer:
        """Tiny if `dry`."""
        if dry:
            return cls(device, GPTConfig(context=8, width=32, heads=2, layers=1), 2, 2, corpus()[:10_000])
        return cls(device, GPTConfig(context=128, width=512, heads=8, layers=6), 16, 20, corpus())

    def model(self) -> GPT:
        """The same every time."""
        torch.manual_seed(0)
        return GPT(self.config).to(self.device)

    def wrap(self, model: nn.Module, **options: Any) -> FusedRingDDP:
        """In the wrapper, by way of the kernels."""
        device_ids: Any = [self.device.index] if self.device.type == "cuda" else None
        return FusedRingDDP(model, device_ids=device_ids, engine="triton", **options)

    def batch(self, step: int, rank: int = 0) -> torch.Tensor:
        """Of one rank at one step."""
        return batch_at(self.data, self.config, step=step, rank=rank, size=self.batch_size).to(self.device)

    def gradients(self, model: nn.Module, step: int = 0, rank: int = 0) -> list[torch.Tensor]:
        """Copies of the gradients of one forward and backward."""
        model.zero_grad()
        loss_of(model, self.batch(step, rank)).backward()  # type: ignore[no-untyped-call]
        return [_gradient(p).clone() for p in model.parameters()]


@contextmanager
def reproducible() -> Iterator[None]:
    """The same bits from the same model every time, where torch can."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(False)  # what is timed afterwards must not pay for it


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def same(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether all are equal."""
    return all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))
