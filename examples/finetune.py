"""Fine-tune a frozen backbone: only small adapters train, and each rank keeps a part of the optimizer's state.

    torchrun --nproc-per-node 2 examples/finetune.py --steps 100 --checkpoint adapters.pt

Frozen parameters are in no bucket: what crosses between ranks is as large as the adapters. The checkpoint holds the
adapters alone.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import fusedring
from fusedring import FusedRingDDP


class Adapter(nn.Module):
    """A frozen layer and a narrow path beside it, which adds nothing at first."""

    def __init__(self, layer: nn.Linear, width: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(layer.in_features, width), nn.Linear(width, layer.out_features)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(nn.functional.gelu(self.down(x)))


def make_backbone() -> nn.Sequential:
    """Stands for a model that was trained before."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 16))


def main(arguments: list[str] | None = None) -> FusedRingDDP:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=8, help="of an adapter's narrow path")
    parser.add_argument("--checkpoint", type=Path, help="write the adapters there at the end")
    parser.add_argument("--resume", type=Path, help="start from these adapters")
    options = parser.parse_args(arguments)

    use_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_gpu else "gloo")

    model = make_backbone()
    teacher = make_backbone().requires_grad_(False).to(device)
    nn.init.normal_(teacher[4].bias)  # what is to be learnt: the backbone, with another last bias
    for position, layer in enumerate(model):
        if isinstance(layer, nn.Linear):
            model[position] = Adapter(layer, options.width)
    if options.resume:
        unknown = model.load_state_dict(torch.load(options.resume, map_location="cpu"), strict=False).unexpected_keys
        assert not unknown, unknown
    model = FusedRingDDP(model.to(device), device_ids=[device.index] if use_gpu else None)
    adapters = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
    # Averages are the same on all ranks, so each steps its part of the parameters and sends it to the others.
    optimizer = ZeroRedundancyOptimizer(adapters.values(), torch.optim.AdamW, lr=3e-3)

    generator = torch.Generator().manual_seed(1 + dist.get_rank())  # every rank has data of its own
    for step in range(options.steps):
        points = torch.randn(32, 64, generator=generator).to(device)
        loss = nn.functional.mse_loss(model(points), teacher(points))
        loss.backward()
        fusedring.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = fusedring.all_reduce(loss.detach().clone())
        if dist.get_rank() == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step} loss {mean_loss.item():.6f}", flush=True)
    if dist.get_rank() == 0 and options.checkpoint:
        torch.save({name: p.detach() for name, p in adapters.items()}, options.checkpoint)
    fusedring.close()
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
