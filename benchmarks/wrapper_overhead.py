"""What FusedRingDDP costs the host in a step, for 2,500 parameters of one element each: in a lone process, or on ranks.

python benchmarks/wrapper_overhead.py
torchrun --nproc-per-node 2 benchmarks/wrapper_overhead.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import fusedring
from fusedring.bench.overhead import overhead


def main() -> None:
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    ranks, first = (dist.get_world_size(), dist.get_rank() == 0) if dist.is_initialized() else (1, True)
    if first:
        print(f"torch {torch.__version__}, {ranks} rank(s); microseconds of a step, medians of steps in turn")
    for _ in range(3):
        cost = overhead()
        if first:
            print(
                f"{cost.per_parameter:.2f} for each of {cost.parameters} parameters; for each of {cost.buckets} "
                f"buckets {cost.per_bucket:.0f}, and {cost.per_launch:.0f} for its launch"
            )
    fusedring.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
