"""Train a small classifier on every GPU of this machine, or on CPU processes where there is none.

    torchrun --nproc-per-node 2 examples/train.py --epochs 3 --checkpoint run.pt
    torchrun --nproc-per-node 2 examples/train.py --epochs 6 --checkpoint run.pt --resume run.pt

Shows mixed precision, gradient accumulation, clipping, checkpoints and an averaged copy (EMA) of the weights. Replace
`make_model` and `make_data` by yours.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import fusedring
from fusedring import FusedRingDDP


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))


def make_data() -> Dataset:
    """Points of which a fixed random map says to which of 8 classes they belong."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(2048, 32, generator=generator)
    return TensorDataset(points, (points @ torch.randn(32, 8, generator=generator)).argmax(1))


def main(arguments: list[str] | None = None) -> FusedRingDDP:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="samples of each rank in one forward")
    parser.add_argument("--accumulate", type=int, default=2, help="forwards for each optimizer step")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--wire", choices=("fp16", "bf16"), help="what crosses between ranks; default: float32")
    parser.add_argument("--checkpoint", type=Path, help="write the state there after every epoch")
    parser.add_argument("--resume", type=Path, help="go on from that checkpoint")
    options = parser.parse_args(arguments)

    # torchrun has set RANK, LOCAL_RANK and WORLD_SIZE.
    use_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_gpu else "gloo")
    is_first = dist.get_rank() == 0
    torch.manual_seed(0)  # rank 0's weights are sent to all in any case

    saved = torch.load(options.resume, map_location=device) if options.resume else None
    model = make_model().to(device)
    if saved:  # before wrapping: what rank 0 loads reaches all ranks
        load_weights(model, saved["model"])
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99)) if is_first else None
    model = FusedRingDDP(model, device_ids=[device.index] if use_gpu else None, wire_dtype=options.wire)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    precision = getattr(torch, options.precision)
    scaler = torch.amp.GradScaler(device.type, enabled=precision is torch.float16)
    first_epoch = 0
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
        first_epoch = saved["epoch"]
        if average is not None:
            average.load_state_dict(saved["average"])

    data = make_data()
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=options.batch, sampler=sampler, pin_memory=use_gpu, drop_last=True)
    for epoch in range(first_epoch, options.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch
        loss_of_step = torch.zeros((), device=device)
        for number, (points, classes) in enumerate(loader, start=1):
            last_of_step = number % options.accumulate == 0 or number == len(loader)
            # Only the last backward of a step averages. The forward decides that, so it belongs into no_sync, too.
            with nullcontext() if last_of_step else model.no_sync():
                with torch.autocast(device.type, precision, enabled=precision is not torch.float32):
                    logits = model(points.to(device, non_blocking=True))
                    loss = nn.functional.cross_entropy(logits, classes.to(device, non_blocking=True))
                scaler.scale(loss / options.accumulate).backward()
            loss_of_step += loss.detach() / options.accumulate
            if not last_of_step:
                continue
            scaler.unscale_(optimizer)
            fusedring.clip_grad_norm_(model, 1.0)
            scaler.step(optimizer)  # an infinity is in the average of all ranks, so all skip the step or none
            scaler.update()
            optimizer.zero_grad()
            if average is not None:
                average.update_parameters(model.module)
            fusedring.all_reduce(loss_of_step)  # the mean over the ranks
            if is_first:
                print(f"epoch {epoch} batch {number} loss {loss_of_step.item():.6f}", flush=True)
            loss_of_step.zero_()
        if average is not None and options.checkpoint:
            state = {
                "model": model.module.state_dict(),  # without "module.", so that it loads anywhere
                "average": average.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
                "epoch": epoch + 1,
            }
            unfinished = options.checkpoint.with_suffix(".tmp")
            torch.save(state, unfinished)
            unfinished.replace(options.checkpoint)  # a run that is ended here leaves the older one whole
    fusedring.close()
    dist.destroy_process_group()
    return model


def load_weights(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """From the state of the bare module, or of a wrapper (FusedRingDDP, DistributedDataParallel) with its prefix."""
    state = dict(state)
    consume_prefix_in_state_dict_if_present(state, "module.")
    model.load_state_dict(state)


if __name__ == "__main__":
    main()
