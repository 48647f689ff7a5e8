"""A small character-level GPT and a corpus that every machine has: the source text of Python's standard library."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

CORPUS_BYTES = 4 << 20
VOCABULARY = 128


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of the model; the default has 3.2 million parameters (13 MB of float32 gradients)."""

    context: int = 64
    width: int = 256
    heads: int = 4
    layers: int = 4


class Block(nn.Module):
    """Attention, then a feed-forward layer, each behind a layer norm and beside a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.up, self.down = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        hidden: torch.Tensor = self.down(functional.gelu(self.up(self.norm_mlp(x))))
        return x + hidden


class GPT(nn.Module):
    """Predicts the next character: tokens (batch, length) of int64 to logits (batch, length, VOCABULARY)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def corpus() -> torch.Tensor:
    """About 4 MB of Python source as character codes below VOCABULARY, int64, the same on every run of one machine."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += bytes(min(byte, VOCABULARY - 1) for byte in path.read_bytes())
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8).long()


def batch_at(data: torch.Tensor, config: GPTConfig, *, step: int, rank: int, size: int) -> torch.Tensor:
    """The batch of one rank at one step, (size, context + 1): inputs are all but the last column, targets the rest."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    starts = torch.randint(len(data) - config.context - 1, (size,), generator=generator)
    return torch.stack([data[start : start + config.context + 1] for start in starts.tolist()])


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per character."""
    logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))
