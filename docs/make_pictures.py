"""Make the pictures of docs/how-it-works.md: python docs/make_pictures.py (needs matplotlib, takes 10 seconds)."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from fusedring.bench.gpt import GPT, GPTConfig, batch_at, corpus, loss_of
from fusedring.config import ALGORITHMS
from fusedring.data_parallel.ddp import FusedRingDDP
from fusedring.group.spawn import spawn
from fusedring.observe.pictures import draw_walk
from fusedring.observe.plots import draw_overlap
from fusedring.observe.report import StepReport
from fusedring.plan.plan import make_plan

PICTURES = Path(__file__).parent / "pictures"
ELEMENTS = 1_000_000


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for algorithm in ALGORITHMS:
        draw_walk(make_plan("all_reduce", algorithm, 4, ELEMENTS), PICTURES / f"{algorithm}.png")
    draw_overlap(spawn(train, 2)[0], PICTURES / "overlap.png")


def train() -> StepReport:
    """A few steps of the demo's model with small buckets; rank 0's report of the last backward."""
    config, data = GPTConfig(), corpus()
    model = FusedRingDDP(GPT(config), algorithm="ring", bucket_cap_mb=2)
    for step in range(5):
        model.zero_grad()
        loss_of(model, batch_at(data, config, step=step, rank=dist.get_rank(), size=8)).backward()
    report = model.report()
    assert report is not None
    return report


if __name__ == "__main__":
    main()
