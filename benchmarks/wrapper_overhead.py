"""What FusedRingDDP costs the host in a step, for 2,500 parameters of one element each, in a lone process.

python benchmarks/wrapper_overhead.py
"""

from __future__ import annotations

import torch

from fusedring.bench.overhead import overhead


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}; microseconds of a step, medians in turn")
    for _ in range(3):
        cost = overhead()
        print(f"{cost.per_parameter:.2f} for each of {cost.parameters} parameters, {cost.per_bucket:.0f} for a bucket")


if __name__ == "__main__":
    main()
