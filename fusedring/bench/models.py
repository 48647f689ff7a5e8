"""Models of the kinds that people train, small enough for a laptop, whose training steps are timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fusedring.bench.gpt import GPT, VOCABULARY, GPTConfig


class Tiny(nn.Module):
    """So many parameters of one element each."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Their sum, times `x`."""
        return torch.cat(list(self.parts)).sum() * x


class LowRank(nn.Module):
    """A linear layer that is not trained, and beside it the product of two narrow ones that are (LoRA)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width) to the same shape."""
        result: torch.Tensor = self.frozen(x) + self.up(self.down(x))
        return result


class Residual(nn.Module):
    """Two convolutions with batch norms, beside a shortcut with a convolution of its own where the shape changes."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, channels, height, width) to (batch, out, height / stride, width / stride)."""
        return torch.relu(self.path(x) + self.shortcut(x))


def resnet18(classes: int = 10) -> nn.Module:
    """ResNet-18: images (batch, 3, height, width) to logits (batch, classes)."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks: list[nn.Module] = []
    for channels, out, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        blocks += [Residual(channels, out, stride), Residual(out, out, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def linears() -> nn.Module:
    """8 x Linear(1024): 8.4 million parameters."""
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))


def low_ranks() -> nn.Module:
    """LoRA of rank 8 over 8 x Linear(1024): 0.13 million trained parameters."""
    return nn.Sequential(*(LowRank(1024, 8) for _ in range(8)))


def perceptron() -> nn.Module:
    """0.3 million parameters."""
    layers = (nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 4))
    return nn.Sequential(*layers)


@dataclass(frozen=True, slots=True)
class Model:
    """What to train: its name, how it is made, one batch of inputs, and how many steps are timed in a full run.

    The loss is the mean of the squared outputs.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]
    turns: int


LINEARS, GPT_3M, RESNET, LORA = "8 x Linear(1024)", "GPT of 3 million", "ResNet-18, 64 x 64", "LoRA, 8 x Linear(1024)"
MLP, MANY = "MLP of 0.3 million", "2,500 of one element"

MODELS = (
    Model(LINEARS, linears, lambda: torch.randn(32, 1024), 60),
    Model(GPT_3M, lambda: GPT(GPTConfig()), lambda: torch.randint(VOCABULARY, (4, 64)), 60),
    Model(RESNET, resnet18, lambda: torch.randn(2, 3, 64, 64), 30),
    Model(LORA, low_ranks, lambda: torch.randn(32, 1024), 80),
    Model(MLP, perceptron, lambda: torch.randn(32, 32), 200),
    Model(MANY, lambda: Tiny(2500), lambda: torch.randn(1), 60),
)
