"""What a user may choose, checked in one place."""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from fusedring.kernels.layout import MOST_CHANNELS

Algorithm = Literal["ring", "two_shot", "one_shot", "master"]
Kind = Literal["all_reduce", "reduce_scatter", "all_gather"]
Op = Literal["avg", "sum"]
Engine = Literal["auto", "host", "triton"]
WireDtype = Literal["fp16", "bf16"] | torch.dtype | None

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
KINDS: tuple[Kind, ...] = get_args(Kind)
OPS: tuple[Op, ...] = get_args(Op)
ENGINES: tuple[Engine, ...] = get_args(Engine)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_WIRES = {None: None, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class RingConfig:
    """How tensors are reduced.

    wire_dtype: what crosses between ranks; None keeps the tensor's own dtype, otherwise torch.float16 or torch.bfloat16
        (given as such, or as 'fp16' or 'bf16').
    algorithm: 'auto' or one of `ALGORITHMS`.
    engine: 'auto', 'host' or 'triton'.
    timeout: seconds without progress in one wait after which a collective fails; None takes the process group's own.
    channels: programs of each kernel on a GPU; None stands for the engine's own number.
    """

    wire_dtype: WireDtype = None
    algorithm: str = "auto"
    engine: str = "auto"
    timeout: float | None = None
    channels: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "wire_dtype", check_wire_dtype(self.wire_dtype))
        if self.algorithm not in ("auto", *ALGORITHMS):
            raise ValueError(f"algorithm must be one of auto, {', '.join(ALGORITHMS)}, got {self.algorithm!r}")
        if self.engine not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {self.engine!r}")
        check_timeout(self.timeout)
        if self.channels is not None and not (type(self.channels) is int and 1 <= self.channels <= MOST_CHANNELS):
            raise ValueError(f"channels must be a number from 1 to {MOST_CHANNELS} or None, got {self.channels!r}")

    @property
    def wire(self) -> torch.dtype | None:
        """`wire_dtype` as a torch dtype."""
        assert self.wire_dtype is None or isinstance(self.wire_dtype, torch.dtype)
        return self.wire_dtype


def check_wire_dtype(wire_dtype: WireDtype) -> torch.dtype | None:
    """The torch dtype that a wire name stands for. Raises ValueError that lists the names."""
    if isinstance(wire_dtype, torch.dtype) and wire_dtype in _WIRES.values():
        return wire_dtype
    if wire_dtype is None or (isinstance(wire_dtype, str) and wire_dtype in _WIRES):
        return _WIRES[wire_dtype]
    raise ValueError(f"wire_dtype must be None, 'fp16', 'bf16', torch.float16 or torch.bfloat16, got {wire_dtype!r}")


def check_timeout(timeout: float | None) -> None:
    """Raises ValueError unless `timeout` is None or a positive number of seconds."""
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (number and 0 < timeout <= threading.TIMEOUT_MAX):
        raise ValueError(
            f"timeout must be a positive number of seconds, at most {threading.TIMEOUT_MAX:g}, or None, got {timeout!r}"
        )


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """'float32' for torch.float32."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The inverse of `dtype_name`, for dtypes that are reduced."""
    return _DTYPE_OF[name]


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which contributions to a tensor of `dtype` are scaled and summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_dtype(dtype: torch.dtype) -> None:
    """Raises ValueError for a dtype that no engine reduces."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")


def check_engine(engine: str, device: torch.device) -> None:
    """Raises ValueError unless `engine` runs on `device` here."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the tensor is on {device}: only tensors in host memory and on GPUs are reduced")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{device} was asked for, but there is no GPU here: use host memory and engine='host'")
    if device.type == "cuda" and engine == "host":
        raise ValueError(
            f"engine 'host' reduces tensors in host memory, and this one is on {device}: use engine='triton' or "
            "'auto', or move it with .cpu()"
        )
    if device.type == "cpu" and engine == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "engine 'triton' reduces CPU tensors only under Triton's interpreter: set TRITON_INTERPRET=1 before the "
            "start, or use engine='host'"
        )
    if engine == "triton" and importlib.util.find_spec("triton") is None:
        raise ValueError("engine 'triton' needs triton: pip install triton")


def scale_factor(op: str, scale: float | None, world_size: int, dtype: torch.dtype) -> float:
    """The one factor that every contribution is multiplied by: `scale`, divided by `world_size` for 'avg'.

    It is rounded to float32 (float64 for float64 tensors), so that every engine multiplies by the same number.
    """
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    if scale is not None and not isinstance(scale, (int, float)):
        raise ValueError(f"scale must be a number or None, got {scale!r}")
    factor = 1.0 if scale is None else float(scale)
    if op == "avg":
        factor /= world_size
    return factor if accumulate_dtype(dtype) == torch.float64 else _as_float32(factor)


_DTYPE_OF = {dtype_name(dtype): dtype for dtype in DTYPES}


@functools.lru_cache(maxsize=256)
def _as_float32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float64).to(torch.float32))
