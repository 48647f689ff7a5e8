"""Of part e: torch.compile around the wrapper and inside of it, on one stream and on several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.device.sheet import NotRunError, Sheet
from benchmarks.device.stream_marks import new_stream
from benchmarks.device.trainer import Trainer, same

_STEPS = 4
"""Launches begin within a compiled backward from the third step on."""


def compiled(sheet: Sheet, trainer: Trainer) -> None:
    """Gradients in both orders, with CUDA graphs, and from several streams."""
    trainer = replace(trainer, config=replace(trainer.config, layers=1))
    backend = "aot_eager" if sheet.dry else "inductor"  # Inductor takes minutes on a busy CPU
    with sheet.attempt("torch.compile and FusedRingDDP"):
        _both_orders(sheet, trainer, backend)
    with sheet.attempt('torch.compile with mode="reduce-overhead"'):
        _cuda_graphs(sheet, trainer)
    with sheet.attempt("layers compiled, on two streams"):
        _two_streams(sheet, trainer, backend)


def _both_orders(sheet: Sheet, trainer: Trainer, backend: str) -> None:
    """The compiled wrapper against the compiled model: compilation alone may change bits."""
    _need_time(sheet)

    def compile_it(model: nn.Module) -> Any:
        torch._dynamo.reset()
        return torch.compile(model, backend=backend)

    try:
        plain = _gradients(trainer, compile_it(trainer.model()))
    except Exception as error:
        raise NotRunError(f"torch.compile of the model alone: {type(error).__name__}: {str(error)[:120]}") from error
    reproduces = same(plain, _gradients(trainer, compile_it(trainer.model())))
    orders: dict[str, Callable[[], Any]] = {
        "torch.compile(FusedRingDDP(model))": lambda: compile_it(trainer.wrap(trainer.model(), bucket_cap_mb=0.5)),
        "FusedRingDDP(torch.compile(model))": lambda: trainer.wrap(compile_it(trainer.model()), bucket_cap_mb=0.5),
    }
    for name, make in orders.items():
        found = _gradients(trainer, make())
        what = f"gradients of {name}, {backend}"
        if same(found, plain):
            sheet.expect(True, what, "equal to the bit to those of the compiled model")
            continue
        far = _distance(trainer, found, plain)
        value = f"{far:.3g} of what other roundings explain" + ("" if reproduces else "; the model alone varies, too")
        sheet.expect(far <= 1, what, value, "further from those of the compiled model than rounding explains", far=far)


def _cuda_graphs(sheet: Sheet, trainer: Trainer) -> None:
    """Inductor's CUDA graphs leave out what tells the wrapper of gradients; else replays would tell it nothing."""
    if trainer.device.type != "cuda":
        raise NotRunError("no CUDA graphs under the interpreter")
    _need_time(sheet)
    torch._dynamo.reset()
    plain = _gradients(trainer, trainer.model())
    model: Any = torch.compile(trainer.wrap(trainer.model(), bucket_cap_mb=0.5), mode="reduce-overhead")
    far = _distance(trainer, _gradients(trainer, model, steps=2 * _STEPS), plain)
    sheet.expect(
        far <= 1,
        'gradients with mode="reduce-overhead"',
        f"{far:.3g} of what other roundings explain, after {2 * _STEPS} steps",
        f"{far:.3g} times as far from those of the model alone as rounding explains",
        far=far,
    )


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class _OnTwoStreams(nn.Module):
    """Layers that take turns on two streams, each after the other; so does their backward, as autograd has it."""

    def __init__(self, layers: Sequence[nn.Module], streams: Sequence[Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.streams = streams

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All layers, in order."""
        caller = before = torch.cuda.current_stream()
        for index, layer in enumerate(self.layers):
            stream = self.streams[index % len(self.streams)]
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                x = layer(x)
            before = stream
        caller.wait_stream(before)
        return x


def _two_streams(sheet: Sheet, trainer: Trainer, backend: str) -> None:
    """A bucket whose gradients come from two streams is read when both are there, and not before."""
    if trainer.device.type != "cuda":
        raise NotRunError("no streams under the interpreter")
    _need_time(sheet)
    torch._dynamo.reset()
    width, streams, steps = 2048, [new_stream(), new_stream()], 5 * _STEPS
    torch.manual_seed(0)
    layers = [_Layer(width).to(trainer.device) for _ in range(6)]
    parameters = [p for layer in layers for p in layer.parameters()]
    x = torch.randn(4096, width, device=trainer.device)
    for layer in layers:
        layer.compile(backend=backend)

    def step(model: nn.Module) -> list[torch.Tensor]:
        for parameter in parameters:
            parameter.grad = None
        model(x).square().mean().backward()
        torch.cuda.synchronize()
        return [p.grad.clone() for p in parameters if p.grad is not None]

    plain = step(_OnTwoStreams(layers, streams))
    wrapped = trainer.wrap(_OnTwoStreams(layers, streams))
    wrong = sum(not same(step(wrapped), plain) for _ in range(steps))
    what = "gradients of layers compiled, on two streams"
    sheet.expect(wrong == 0, what, f"equal to the bit in {steps} steps", f"others in {wrong} of {steps} steps")


def _need_time(sheet: Sheet) -> None:
    if sheet.seconds_left < (0 if sheet.dry else 25):
        raise NotRunError("no time for the compiler")


def _gradients(trainer: Trainer, model: nn.Module, *, steps: int = _STEPS) -> list[torch.Tensor]:
    """Of the last of several steps on the same batch."""
    for _ in range(steps):
        found = trainer.gradients(model, step=1)
    return found


def _distance(trainer: Trainer, found: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> float:
    """The largest difference, in what other roundings explain at most; NaN if there is one.

    The wrapper may split the graph elsewhere, so that Inductor fuses otherwise. A gradient element is a sum over all
    tokens of the batch, each rounded a few times: T terms give at most T roundings of a sum of magnitudes, of which the
    largest gradient of the tensor, times the square root of T, is taken as the size.
    """
    terms = trainer.batch_size * trainer.config.context
    unit = torch.finfo(torch.float32).eps
    each = [(a - b).abs().max() / (b.abs().max() * unit * terms**1.5) for a, b in zip(found, plain, strict=True)]
    return float(torch.stack(each).max())
