"""What recording a trace costs: training steps with and without it, in turn.

torchrun --nproc-per-node 2 benchmarks/trace_overhead.py [--pairs 60]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import fusedring
from fusedring.bench.clock import in_turn, seconds_of, slowest_rank
from fusedring.bench.gpt import GPT, GPTConfig, batch_at, corpus, loss_of
from fusedring.observe.tracing import Recorder, Track, _recorders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    config, data = GPTConfig(), corpus()
    model = fusedring.FusedRingDDP(GPT(config), algorithm="ring")
    batch = batch_at(data, config, step=0, rank=dist.get_rank(), size=8)

    def step() -> None:
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    with tempfile.TemporaryDirectory() as directory:

        def traced() -> float:
            with fusedring.trace(directory):
                return seconds_of(step)

        times = in_turn({"with": traced, "without": lambda: seconds_of(step)}, pairs, warm_up=2)
    on, off = map(slowest_rank, times.values())
    if dist.get_rank() == 0:
        ratios = [a / b for a, b in zip(on, off, strict=True)]
        median = statistics.median(on) / statistics.median(off)
        quartiles = statistics.quantiles(ratios, n=4)
        print(f"{pairs} pairs of steps on {dist.get_world_size()} ranks, torch {torch.__version__}")
        print(f"step with trace / without: {median:.3f} (ratio of medians)")
        print(f"of each pair: median {quartiles[1]:.3f}, quartiles {quartiles[0]:.3f} and {quartiles[2]:.3f}")
        events, seconds = _cost_of_events(model, batch)
        share = events * seconds / statistics.median(off)
        print(f"{events} events a step, {1e6 * seconds:.2f} us each: {share:.2%} of a step")
    else:
        _cost_of_events(model, batch)
    fusedring.close()
    dist.destroy_process_group()


def _cost_of_events(model: fusedring.FusedRingDDP, batch: torch.Tensor) -> tuple[int, float]:
    """How many events this rank records in a step, and the seconds that recording one takes."""
    with tempfile.TemporaryDirectory() as directory:
        recorder = Recorder(Path(directory))
        _recorders.append(recorder)
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        events = len(recorder._events)
        track, repeats = Track("cost"), 20_000
        start = time.perf_counter()
        for _ in range(repeats):
            track.mark("gradient ready", time.perf_counter(), parameter="weight", bucket=0)
        seconds = (time.perf_counter() - start) / repeats
        _recorders.remove(recorder)
    return events, seconds


if __name__ == "__main__":
    main()
