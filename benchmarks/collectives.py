"""Compare all_reduce with gloo: `torchrun --nproc-per-node 2 benchmarks/collectives.py`.

For each size: how many times faster than gloo each algorithm is (medians of the slowest rank, in turn with gloo's),
its busbw as nccl-tests defines it, and how many concurrent copies of the same bytes two_shot takes.
"""

import torch
import torch.distributed as dist

from fusedring.bench.against_gloo import compare
from fusedring.config import ALGORITHMS

SIZES = ((64 << 10, 200), (1 << 20, 100), (4 << 20, 50), (25 << 20, 20), (100 << 20, 10))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"{world} ranks; times faster than gloo (busbw GB/s)")
        print(
            f"{'bytes':>10} " + " ".join(f"{name:>16}" for name in ALGORITHMS) + f" {'two_shot/copy':>14} {'#wrong':>7}"
        )
    for nbytes, repeats in SIZES:
        result = compare(nbytes, repeats)
        if dist.get_rank() == 0:
            cells = [
                f"{result.gloo / seconds:8.1f} ({2 * (world - 1) / world * nbytes / seconds / 1e9:4.1f})"
                for seconds in result.algorithms.values()
            ]
            ratio = result.algorithms["two_shot"] / result.copy
            print(f"{nbytes:>10} " + " ".join(f"{c:>16}" for c in cells) + f" {ratio:>14.1f} {result.wrong:>7}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
