"""What the host spends on one kernel launch of a bucket, up to the driver.

python benchmarks/launch_cost.py
"""

from __future__ import annotations

import torch
import triton

from fusedring.bench.launches import launch_cost


def main() -> None:
    print(f"torch {torch.__version__}, triton {triton.__version__}; microseconds for one bucket, medians")
    print(f"{'':15} {'preparing, its gradients':^28} {'launching':^20}")
    print(f"{'MiB':>6} {'tensors':>8} {'unchanged':>10} {'moved':>8} {'built':>8} {'again':>8} {'by triton':>10}")
    for megabytes, tensors in ((1, 4), (4, 12), (25, 12), (25, 100)):
        cost = launch_cost(elements=megabytes << 18, tensors=tensors)
        print(
            f"{megabytes:6} {tensors:8} {cost.unchanged:10.1f} {cost.moved:8.1f} {cost.built:8.1f} {cost.launch:8.1f} "
            f"{cost.first_path:10.1f}"
        )


if __name__ == "__main__":
    main()
