"""The wire casts of the kernels, under Triton's interpreter, against integer rounding."""

import subprocess
import sys

CODE = """
import numpy as np, torch, triton, triton.language as tl
from fusedring.kernels.cast import narrow, widen
from tests.reference import round_to

@triton.jit
def round_trip(source, target, n, WIRE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(source + at, mask=at < n)
    tl.store(target + at, widen(narrow(x, WIRE), tl.float32), mask=at < n)

special = [0.0, -0.0, 1.00390625, 1.01171875, 65519.0, 65520.0, 1e-8, 3.4e38, float("inf"), -float("inf")]
x = torch.cat([torch.tensor(special), torch.randn(4000) * torch.logspace(-9, 9, 4000)])
for wire, dtype in ((tl.bfloat16, torch.bfloat16), (tl.float16, torch.float16)):
    y = torch.full_like(x, float("nan"))
    round_trip[(1,)](x, y, len(x), WIRE=wire, BLOCK=4096)
    assert torch.equal(y.view(torch.int32), torch.from_numpy(round_to(x.numpy(), dtype)).view(torch.int32)), dtype
    bad = torch.tensor([float("nan")]); out = torch.zeros(1)
    round_trip[(1,)](bad, out, 1, WIRE=wire, BLOCK=16)
    assert out.isnan().all()
"""


def test_narrowing_rounds_to_nearest_even(tmp_path):
    script = tmp_path / "cast_check.py"
    script.write_text(CODE)
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(p for p in sys.path if p) + ":."}
    subprocess.run([sys.executable, str(script)], check=True, timeout=120, env=environment)
