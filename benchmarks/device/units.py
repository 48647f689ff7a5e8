"""How rows write bytes, fractions and dtypes."""

from __future__ import annotations

import torch

MB = 1 << 20


def percent(fraction: float) -> str:
    """Without decimals."""
    return f"{100 * fraction:.0f} %"


def name_of(dtype: torch.dtype) -> str:
    """Without 'torch.'."""
    return str(dtype).removeprefix("torch.")
