"""Where in backward FusedRingDDP's launches begin under torch.compile, and what is compiled, with 2 ranks here.

python benchmarks/compiled.py [aot_eager|inductor ...]
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import fusedring
from fusedring.bench.compiled import compare


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
    fusedring.launch(measure, 2, sys.argv[1:] or ["aot_eager", "inductor"])


if __name__ == "__main__":
    main()
