"""Part e: the wrapper around a small GPT in a lone process, where averaging changes nothing but the rounding."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch
from torch import nn

from benchmarks.device.machine import UNMEASURED, device_of
from benchmarks.device.sheet import NotRunError, Sheet
from benchmarks.device.stream_marks import new_stream
from benchmarks.device.torch_compile import compiled
from benchmarks.device.trainer import Trainer, reproducible, same
from benchmarks.device.units import MB, name_of, percent
from fusedring.bench.gpt import loss_of
from fusedring.data_parallel.ddp import FusedRingDDP
from fusedring.engines.cuda import PARITY_BYTES
from fusedring.group.collectives import close
from fusedring.kernels.layout import region_bytes


def training(sheet: Sheet) -> None:
    """The part: memory, gradients, exposed communication, and what else is wrapped around a model."""
    device = device_of(sheet)
    trainer = Trainer.on(device, dry=sheet.dry)
    with reproducible():
        with sheet.attempt("memory beyond the unwrapped model's"):
            _memory(sheet, trainer)
        with sheet.attempt("gradients"):
            _gradients(sheet, trainer)
        with sheet.attempt("exposed communication"):
            _exposed(sheet, trainer)
        with sheet.attempt("autocast and GradScaler"):
            _mixed_precision(sheet, trainer)
        with sheet.attempt("whole step in a CUDA graph"):
            _graph(sheet, trainer)
        compiled(sheet, trainer)
    close()


def _memory(sheet: Sheet, trainer: Trainer) -> None:
    """The peak of a step with the wrapper and without, against what it says that it needs: buckets and slots."""
    if trainer.device.type != "cuda":
        raise NotRunError("no GPU memory under the interpreter")

    def peak(wrapped: bool) -> tuple[int, int]:
        model = trainer.wrap(trainer.model()) if wrapped else trainer.model()
        trainer.gradients(model)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        model.zero_grad()
        loss_of(model, trainer.batch(1)).backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        report = model.report() if isinstance(model, FusedRingDDP) else None
        buckets = sum(bucket.bytes for bucket in report.buckets) if report is not None else 0
        return torch.cuda.max_memory_allocated(), buckets

    peak(wrapped=False)  # libraries get their own memory
    without, _ = peak(wrapped=False)
    gc.collect()
    within, buckets = peak(wrapped=True)
    extra, allowed = within - without, buckets + region_bytes(1, PARITY_BYTES)
    sheet.row(
        "memory beyond the unwrapped model's",
        f"{extra / MB:.1f} MiB",
        f"{allowed / MB:.1f} MiB: {buckets / MB:.1f} of buckets, the rest slots",
        "ok" if extra <= 1.02 * allowed + MB else "missed",
        extra=extra,
        buckets=buckets,
        allowed=allowed,
    )


def _gradients(sheet: Sheet, trainer: Trainer) -> None:
    """Alone, the mean is the gradient itself, narrowed to the wire."""
    plain = trainer.gradients(trainer.model())
    reproduces = same(plain, trainer.gradients(trainer.model()))
    for wire in (None, torch.bfloat16):
        for algorithm in ("ring",) if sheet.dry else ("ring", "two_shot"):
            what = f"gradients, {algorithm}, wire {'None' if wire is None else name_of(wire)}, W=1"
            with sheet.attempt(what):
                found = trainer.gradients(trainer.wrap(trainer.model(), wire_dtype=wire, algorithm=algorithm))
                want = [g if wire is None else g.to(wire).to(g.dtype) for g in plain]
                _compare(sheet, what, found, want, reproduces)


def _compare(
    sheet: Sheet, what: str, found: Sequence[torch.Tensor], want: Sequence[torch.Tensor], reproduces: bool
) -> None:
    """To the bit, if the model alone gives the same bits twice; if not, nothing can be demanded of the wrapper."""
    equal = same(found, want)
    if equal or reproduces:
        far = max(float((a - b).abs().max()) for a, b in zip(found, want, strict=True))
        sheet.expect(equal, what, "equal to the bit", f"they differ, by {far:.3g} at most", far=far)
    else:
        sheet.row(what, verdict="not run", reason="the unwrapped model does not give the same bits twice")


def _exposed(sheet: Sheet, trainer: Trainer) -> None:
    """What the wrapper's own report says of the last of several backwards."""
    model = trainer.wrap(trainer.model(), wire_dtype="bf16")
    for step in range(1 if sheet.dry else 5):
        trainer.gradients(model, step)
    report = model.report()
    assert report is not None
    if sheet.dry:
        sheet.row("exposed communication, W=1", verdict="not run", reason=UNMEASURED)
        return
    backward = report.backward_end - report.backward_start
    sheet.row(
        "exposed communication, wire bf16, W=1",
        f"{1e3 * report.exposed_wait:.3f} ms after a backward of {1e3 * backward:.2f} ms, {percent(report.overlap)} "
        f"overlapped, {len(report.launches)} launches",
        exposed_wait=report.exposed_wait,
        backward=backward,
        overlap=report.overlap,
    )


def _mixed_precision(sheet: Sheet, trainer: Trainer) -> None:
    """Steps with autocast and GradScaler end with the same parameters as without the wrapper."""
    kind = trainer.device.type

    def train(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler(kind, init_scale=1024.0)
        for step in range(2 if sheet.dry else 5):
            with torch.autocast(kind, torch.bfloat16):
                loss = loss_of(model, trainer.batch(step))
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    plain = train(trainer.model())
    reproduces = same(plain, train(trainer.model()))
    _compare(sheet, "parameters after autocast and GradScaler", train(trainer.wrap(trainer.model())), plain, reproduces)


def _graph(sheet: Sheet, trainer: Trainer) -> None:
    """A training step, captured and replayed, gives the losses of as many steps that were not captured."""
    if trainer.device.type != "cuda":
        raise NotRunError("no CUDA graphs under the interpreter")
    before = 3

    def parts(model: nn.Module) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        batch = trainer.batch(0)

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss.detach()

        return batch, step

    batch, step = parts(trainer.model())
    want = []
    for number in range(before + trainer.steps):
        batch.copy_(trainer.batch(number))
        want.append(float(step()))
    batch, step = parts(trainer.wrap(trainer.model()))
    side = new_stream()  # as torch's documentation of graphs demands of steps before a capture
    side.wait_stream(torch.cuda.current_stream())
    found = []
    with torch.cuda.stream(side):
        for number in range(before):
            batch.copy_(trainer.batch(number))
            found.append(float(step()))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for number in range(before, before + trainer.steps):
        batch.copy_(trainer.batch(number))
        graph.replay()
        found.append(float(loss))
    far = max(abs(a - b) for a, b in zip(found, want, strict=True))
    sheet.expect(
        found == want,  # and not far == 0: max() passes over NaN
        "whole step in a CUDA graph",
        f"{trainer.steps} replays with the losses of uncaptured steps, {want[0]:.4f} to {want[-1]:.4f}",
        f"losses differ by up to {far:.3g}: {found[-1]:.6f} instead of {want[-1]:.6f} at the end",
        far=far,
    )
