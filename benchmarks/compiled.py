"""Where in backward FusedRingDDP's launches begin under torch.compile, and what is compiled, with 2 ranks here.

python benchmarks/compiled.py [aot_eager|inductor ...]
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fusedring
from fusedring import FusedRingDDP

ORDERS = ("eager", "outside", "inside", "layers")


@dataclass(frozen=True, slots=True)
class Compiled:
    """How an order of compiling and wrapping went: `outside` compiles the wrapper, `inside` what it wraps.

    first, last: the part of `backward()` after which the first and the last launch began, medians of steps. graphs: how
    many were compiled in all steps; breaks: of graphs; recompiled: how often a frame was compiled again.
    """

    order: str
    first: float
    last: float
    graphs: int
    breaks: int
    recompiled: int


class Layer(nn.Module):
    """A linear map and a nonlinearity, as a module of its own, so that it can be compiled by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """relu(linear(x)), (batch, width)."""
        hidden: torch.Tensor = self.linear(x)
        return hidden.relu()


def compare(backend: str, *, width: int = 1024, layers: int = 8, batch: int = 512, steps: int = 20) -> list[Compiled]:
    """All orders, on all ranks (collective). Every second step begins with a micro-batch under no_sync."""
    torch._dynamo.reset()
    made = [(order, *_make(order, backend, width, layers)) for order in ORDERS]
    x = torch.randn(batch, width, requires_grad=True)
    begun: dict[str, list[tuple[float, float]]] = {order: [] for order in ORDERS}
    counted: dict[str, tuple[int, ...]] = dict.fromkeys(ORDERS, (0, 0, 0))
    for step in range(steps):
        for order, wrapper, model in made:
            before = _counts()
            wrapper.zero_grad()
            for synced in (False, True)[(step + 1) % 2 :]:
                if dist.is_initialized():
                    dist.barrier()
                with nullcontext() if synced else wrapper.no_sync():
                    loss = model(x).square().mean()
                    began = time.perf_counter()
                    loss.backward()
            now = _counts()
            counted[order] = tuple(c + n - b for c, n, b in zip(counted[order], now, before, strict=True))
            report = wrapper.report()
            assert report is not None
            starts = [(launch.start - began) / (report.backward_end - began) for launch in report.launches]
            if step >= steps // 4:  # before, graphs are compiled, and the order of gradients is learnt
                begun[order].append((starts[0], starts[-1]))
    results = []
    for order in ORDERS:
        first, last = map(statistics.median, zip(*begun[order], strict=True))
        results.append(Compiled(order, first, last, *counted[order]))
    return results


def _make(order: str, backend: str, width: int, layers: int) -> tuple[FusedRingDDP, Callable[..., Any]]:
    compile_it: Callable[..., Any] = functools.partial(torch.compile, backend=backend, fullgraph=True)
    torch.manual_seed(0)
    module = nn.Sequential(*(Layer(width) for _ in range(layers)))
    if order == "layers":
        for layer in module:
            layer.compile(backend=backend, fullgraph=True)
    wrapper = FusedRingDDP(compile_it(module) if order == "inside" else module, bucket_cap_mb=width * width / (1 << 18))
    return wrapper, compile_it(wrapper) if order == "outside" else wrapper


def _counts() -> tuple[int, int, int]:
    counters = torch._dynamo.utils.counters
    again = (times - 1 for times in torch._dynamo.convert_frame.FRAME_COMPILE_COUNTER.values())
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), sum(again)


def measure(backends: list[str]) -> None:
    torch.set_num_threads(1)
    for backend in backends:
        for each in compare(backend):
            if dist.get_rank() == 0:
                columns = f"{each.first:12.2f} {each.last:12.2f} {each.graphs:7} {each.breaks:7} {each.recompiled:11}"
                print(f"{backend:10} {each.order:8} {columns}", flush=True)


def main() -> None:
    print(f"torch {torch.__version__}; 8 x Linear(1024), batch 512, 20 steps, every second with a part under no_sync")
    print("after which part of backward launches begin, medians; and what was compiled in all steps")
    print(f"{'backend':10} {'order':8} {'first launch':>12} {'last launch':>12} {'graphs':>7} {'breaks':>7} recompiled")
    fusedring.spawn(measure, 2, sys.argv[1:] or ["aot_eager", "inductor"])


if __name__ == "__main__":
    main()
