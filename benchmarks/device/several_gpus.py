"""Part f: one process for each GPU, to the bit, and against NCCL and torch's wrapper."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.device.cases import TIMED_PAIRS, Case
from benchmarks.device.machine import UNMEASURED, device_of
from benchmarks.device.reference import different_bits, error_bound, exact, reduced
from benchmarks.device.sheet import NotRunError, Sheet
from benchmarks.device.stream_marks import mark, seconds_between
from benchmarks.device.trainer import Trainer, reproducible
from benchmarks.device.units import MB, name_of
from fusedring.bench.clock import slowest_rank
from fusedring.bench.gpt import loss_of
from fusedring.config import ALGORITHMS, scale_factor
from fusedring.group.collectives import all_reduce, close


def several_gpus(sheet: Sheet) -> None:
    """The part; in the dry mode two processes over gloo, for correctness only."""
    device_of(sheet)
    world = 2 if sheet.dry else torch.cuda.device_count()
    if world < 2:
        raise NotRunError("1 GPU")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, str(Path(folder) / "store"), sheet)
        torch.multiprocessing.spawn(_as_rank, args=arguments, nprocs=world)  # type: ignore[attr-defined, no-untyped-call]


def _as_rank(rank: int, world: int, store: str, sheet: Sheet) -> None:
    """A rank's process. Only rank 0's rows are kept."""
    if rank != 0:
        sheet.path = None
    if sheet.dry:
        device, backend = torch.device("cpu"), "gloo"
    else:
        device, backend = torch.device("cuda", rank), "nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=30),
        device_id=None if sheet.dry else device,
    )
    try:
        _check_ranks(sheet, device)
        _train_ranks(sheet, device)
        if sheet.dry:
            sheet.row("busbw and step time", verdict="not run", reason=UNMEASURED)
        else:
            _race(sheet, device)
        close()
    except BaseException:
        traceback.print_exc()
        raise
    dist.destroy_process_group()


def _sum_of_ranks(number: int, device: torch.device) -> int:
    total = torch.tensor(number, device=device)
    dist.all_reduce(total)
    return int(total)


def _check_ranks(sheet: Sheet, device: torch.device) -> None:
    """Every rank knows all inputs, and so what must come out, to the bit."""
    rank, world = dist.get_rank(), dist.get_world_size()
    elements = 517 if sheet.dry else 1_000_003
    for dtype, wire in TIMED_PAIRS:
        wrong = 0
        for algorithm in ALGORITHMS if dtype != wire or not sheet.dry else ("ring",):
            inputs = [
                torch.randn(elements, generator=torch.Generator().manual_seed(r)).to(device, dtype)
                for r in range(world)
            ]
            x = inputs[rank].clone()
            how = Case("all_reduce", algorithm, dtype, wire).how
            all_reduce(x, engine="triton", **how)
            wrong += different_bits(x, reduced(inputs, algorithm, wire, scale_factor("avg", None, world, dtype)))
        total = _sum_of_ranks(wrong, device)
        what = f"all_reduce of {name_of(dtype)}, wire {name_of(wire)}, on {world} processes"
        sheet.expect(total == 0, what, "to the bit", f"{total} elements differ", wrong=total)


def _train_ranks(sheet: Sheet, device: torch.device) -> None:
    """Gradients are the same bits on all ranks, and the mean of the ranks' own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    trainer = Trainer.on(device, dry=sheet.dry)
    with reproducible():
        own = torch.cat([g.view(-1) for g in trainer.gradients(trainer.model(), rank=rank)])
        model = trainer.wrap(trainer.model(), algorithm="two_shot")
        found = torch.cat([g.view(-1) for g in trainer.gradients(model, rank=rank)])
    everyone = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(everyone, own)
    factor = scale_factor("avg", None, world, own.dtype)
    far = (found.double() - exact(everyone, factor)).abs()
    beyond = int((far > error_bound(everyone, "two_shot", own.dtype, factor)).sum())
    dist.all_gather(everyone, found)
    differ = sum(different_bits(x, found) for x in everyone)
    problems = _sum_of_ranks(beyond + differ, device)
    sheet.expect(
        problems == 0,
        f"gradients of FusedRingDDP on {world} processes",
        "the same bits everywhere, and the mean within rounding",
        f"{beyond} elements are not the mean, {differ} differ between ranks",
    )


def _race(sheet: Sheet, device: torch.device) -> None:
    """busbw against NCCL and torch's symmetric memory, and the step time of the GPT against torch's wrapper."""
    for (dtype, wire), megabytes in product(TIMED_PAIRS, (1, 4, 16, 64, 256)):
        what = f"busbw of {name_of(dtype)}, wire {name_of(wire)}, {megabytes} MB"
        if _sum_of_ranks(int(sheet.seconds_left < 15), device):  # all ranks go on, or none does
            sheet.row(what, verdict="not run", reason="no time")
            continue
        with sheet.attempt(what):
            _race_all_reduce(sheet, device, dtype, wire, megabytes * MB)
    with sheet.attempt("step of the GPT"):
        _race_training(sheet, device)


def _race_all_reduce(sheet: Sheet, device: torch.device, dtype: torch.dtype, wire: torch.dtype, nbytes: int) -> None:
    world = dist.get_world_size()
    x = torch.ones(nbytes // dtype.itemsize, dtype=dtype, device=device)
    how = Case("all_reduce", "auto", dtype, wire).how

    def with_nccl() -> None:
        narrow = x.to(wire)
        dist.all_reduce(narrow, op=dist.ReduceOp.AVG)
        x.copy_(narrow)  # which does nothing if the wire is the dtype itself

    ways: dict[str, Callable[[], object]] = {
        "fusedring": lambda: all_reduce(x, **how),
        "NCCL": with_nccl,
    }
    missing = {}
    for name in ("two_shot_all_reduce_", "one_shot_all_reduce"):
        way = (
            _symmetric(name, nbytes // dtype.itemsize, dtype, device)
            if dtype == wire
            else "its wire is the dtype itself"
        )
        if isinstance(way, str):
            missing[name] = way
        else:
            ways[name] = way
    seconds = {name: _slowest_seconds(way, 20, device) for name, way in ways.items()}
    busbw = {name: 2 * (world - 1) / world * nbytes / took / 1e9 for name, took in seconds.items()}
    value = ", ".join(f"{name} {rate:.1f}" for name, rate in busbw.items()) + " GB/s"
    slower = busbw["fusedring"] < busbw["NCCL"]
    what = f"busbw of {name_of(dtype)}, wire {name_of(wire)}, {nbytes // MB} MB"
    without = "; ".join(f"without {name}: {why}" for name, why in missing.items())
    sheet.row(what, value, "NCCL's", "missed" if slower else "ok", without, seconds=seconds, missing=missing)


def _symmetric(name: str, elements: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object] | str:
    """torch's all_reduce over symmetric memory, or why it cannot be had, the same on all ranks."""
    way: Callable[[], object] | None = None
    try:
        from torch.distributed import _symmetric_memory

        memory = _symmetric_memory.empty(elements, dtype=dtype, device=device)
        assert dist.group.WORLD is not None
        _symmetric_memory.rendezvous(memory, dist.group.WORLD)
        operator, group = getattr(torch.ops.symm_mem, name), dist.group.WORLD.group_name
        operator(memory, "sum", group)
        way, why = lambda: operator(memory, "sum", group), ""
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"
    failed = _sum_of_ranks(int(way is None), device)
    if way is None or failed:
        return why or "it failed on another rank"
    return way


def _slowest_seconds(act: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of one of `repeats` calls, one after another, on the slowest rank."""
    for _ in range(3):
        act()
    dist.barrier()
    begun = mark()
    for _ in range(repeats):
        act()
    done = mark()
    torch.cuda.synchronize()
    return slowest_rank([seconds_between(begun, done) / repeats], device)[0]


def _race_training(sheet: Sheet, device: torch.device) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    trainer, rank = Trainer.on(device, dry=False), dist.get_rank()
    theirs = DistributedDataParallel(trainer.model(), device_ids=[device.index], gradient_as_bucket_view=True)
    theirs.register_comm_hook(None, bf16_compress_hook)
    replicas = {"fusedring": trainer.wrap(trainer.model(), wire_dtype="bf16"), "torch": theirs}
    spans: dict[str, float] = {}
    exposed: dict[str, float] = {}
    batch = trainer.batch(0, rank)
    for name, replica in replicas.items():

        def step(synced: bool, replica: Any = replica) -> None:
            around: AbstractContextManager[None] = nullcontext() if synced else replica.no_sync()
            with around:
                loss_of(replica, batch).backward()  # type: ignore[no-untyped-call]
            replica.zero_grad()

        with_sync, without = (_slowest_seconds(lambda s=s: step(s), 10, device) for s in (True, False))  # type: ignore[misc]
        spans[name], exposed[name] = with_sync, max(0.0, with_sync - without)
    value = "; ".join(
        f"{name} {1e3 * spans[name]:.2f} ms, {1e3 * exposed[name]:.2f} of it exposed communication" for name in spans
    )
    sheet.row(
        "forward and backward of the GPT, wire bf16",
        value,
        "torch's with bf16_compress_hook",
        "ok" if spans["fusedring"] <= spans["torch"] else "missed",
        seconds=spans,
        exposed=exposed,
    )
