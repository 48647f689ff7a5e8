"""Ranks of the compiled launch as threads of one process: they share memory anyway, and ctypes lets go of the GIL."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import llvmlite.binding as llvm
import torch

from fusedring.config import ALGORITHMS, KINDS, accumulate_dtype, dtype_name
from fusedring.kernels import host_layout as layout
from tests.kernels.object_code import object_code

ARENA = 7
"""The number of the only arena, in which workspace tensors lie."""


@dataclass(frozen=True)
class Compiled:
    """launch, and the addresses of the verbs; engines keep the code."""

    launch: object
    verbs: tuple[int, ...]
    engines: tuple[object, ...]


def load(file: Path):
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(reloc="pic", codemodel="jitdefault", jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_path(str(file)))
    engine.finalize_object()
    return engine


def compile_launch(folder: Path, dtype: torch.dtype, wire: torch.dtype) -> Compiled:
    """Everything for one dtype and wire; what is in `folder` already is not compiled again."""
    engines = []
    for what in ("launch", f"{dtype_name(dtype)}-{dtype_name(wire)}"):
        file = folder / f"{what}.o"
        engines.append(load(file if file.exists() else object_code(what, folder)))
    launch = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(engines[0].get_function_address("launch"))
    return Compiled(launch, tuple(engines[1].get_function_address(v) for v in layout.VERBS), tuple(engines))


class Ranks:
    """`world` ranks with control blocks, staging slots and workspace memory of `nbytes` each."""

    def __init__(self, world: int, nbytes: int, *, channels: int = 1) -> None:
        self.world, self.channels, self.epoch = world, channels, 0
        self.control = torch.zeros(world * layout.BLOCK_BYTES // 8, dtype=torch.int64)
        self.slots = torch.zeros(world, 2 * layout.SLOT_BYTES, dtype=torch.uint8)
        self.workspace = torch.zeros(world, nbytes, dtype=torch.uint8)
        self.arenas = torch.tensor([ARENA, self.workspace.data_ptr(), nbytes])

    def tensor(self, rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the workspace memory of a rank."""
        return self.workspace[rank, : elements * dtype.itemsize].view(dtype)

    def run(
        self,
        compiled: Compiled,
        kind: str,
        algorithm: str,
        factor: float,
        tensors: Sequence[torch.Tensor],
        wire: torch.dtype,
        runs: Sequence[Sequence[tuple[int, torch.Tensor]]] | None = None,
        headers: Sequence[int] | None = None,
        spins: int = 0,
    ) -> list[int]:
        """Launch on all ranks, and why each channel of each came back. runs: what each reads elsewhere. headers: a
        number for each rank that all have to agree on."""
        self.epoch += 1
        dtype, answers, keep, threads = tensors[0].dtype, {}, [], []
        for rank, tensor in enumerate(tensors):
            rows = [
                (start, start + source.numel(), source.data_ptr()) for start, source in (runs[rank] if runs else [])
            ]
            table = torch.tensor(rows or [(0, 0, 0)], dtype=torch.int64)
            offset = tensor.data_ptr() - self.workspace[rank].data_ptr()
            inside = 0 <= offset < self.workspace.shape[1] and tensor.numel() > 0
            at = (rank * layout.BLOCK_BYTES + layout.HEADERS + self.epoch % 2 * layout.HEADER_BYTES) // 8
            header = torch.zeros(layout.HEADER_BYTES // 8, dtype=torch.int64)
            header[0] = headers[rank] if headers else 1
            header[layout.ARENA], header[layout.OFFSET] = (ARENA, offset) if inside else (-1, 0)
            header[layout.RAW] = inside and not rows
            header[layout.MORE] = rank == self.world - 1
            self.control[at : at + len(header)] = header
            for channel in range(self.channels):
                job = torch.zeros(layout.job_words(self.world), dtype=torch.int64)
                scratch = torch.zeros(layout.SCRATCH_BYTES, dtype=torch.uint8)
                words = {
                    layout.CONTROL: self.control.data_ptr(),
                    layout.RANK: rank,
                    layout.WORLD: self.world,
                    layout.EPOCH: self.epoch,
                    layout.CHANNEL: channel,
                    layout.CHANNELS: self.channels,
                    layout.KIND: KINDS.index(kind),
                    layout.ALGORITHM: ALGORITHMS.index(algorithm),
                    layout.ELEMENTS: tensor.numel(),
                    layout.FACTOR: torch.tensor(factor, dtype=torch.float64).view(torch.int64).item(),
                    layout.TENSOR: tensor.data_ptr(),
                    layout.RUNS: table.data_ptr(),
                    layout.RUN_COUNT: len(rows),
                    layout.ARENAS: self.arenas.data_ptr(),
                    layout.ARENA_COUNT: 1,
                    layout.SLOTS: self.slots.data_ptr(),
                    layout.SLOT_STRIDE: 2 * layout.SLOT_BYTES,
                    layout.SCRATCH: scratch.data_ptr(),
                    layout.ELEMENT_BYTES: dtype.itemsize,
                    layout.WIRE_BYTES: wire.itemsize,
                    layout.TOTAL_BYTES: accumulate_dtype(dtype).itemsize,
                    layout.LOSSLESS: wire == dtype,
                    layout.SPINS: spins,
                    layout.SLICE: 0,
                    layout.SLICE + 1: 1_000_000,  # often, so that going on where it was is tried
                    layout.POSITION: layout.NOT_BEGUN,
                }
                for number, address in enumerate(compiled.verbs):
                    words[layout.FIRST_VERB + number] = address
                for word, value in words.items():
                    job[word] = value
                keep.append((job, table, scratch))

                def serve(rank: int = rank, channel: int = channel, job: torch.Tensor = job) -> None:
                    for _ in range(20_000):  # of a millisecond
                        reason = compiled.launch(job.data_ptr())
                        if reason != layout.WAITING:
                            break
                    answers[rank, channel] = reason

                threads.append(threading.Thread(target=serve, daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert not any(thread.is_alive() for thread in threads), "a launch hangs"
        self.epoch = max(int(job[layout.EPOCH]) for job, _, _ in keep)
        self.more = [bool(job[layout.SOMEBODY_HAS_MORE]) for job, _, _ in keep]
        return [answers[rank, channel] for rank in range(self.world) for channel in range(self.channels)]
