"""The kernels, run by several processes under Triton's interpreter: the same bits as the host engine."""

from __future__ import annotations

import gc
import itertools
import os
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import fusedring
from fusedring import FusedRingDDP
from fusedring.config import ALGORITHMS
from tests.ranks import run_ranks, start_ranks

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WIRES = (None, torch.float16, torch.bfloat16)
SIZES = {1: (0, 1, 17, 2047, 9001), 2: (0, 1, 17, 2047, 9001), 3: (1, 4611), 4: (4611,)}
"""Elements for each world size: the interpreter is slow, and more so with more processes."""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN equals NaN, whatever its payload."""
    if not torch.equal(a.isnan(), b.isnan()):
        return False
    a, b = a.masked_fill(a.isnan(), 0.5), b.masked_fill(b.isnan(), 0.5)
    return a.numel() == 0 or torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def check_bits(rank: int, world: int, dtype: torch.dtype) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    special = torch.tensor([-0.0, 0.0, float("inf"), float("nan"), 65519.0, 1e-8, -1e-40])
    for elements in SIZES[world]:
        generator = torch.Generator().manual_seed(100 * elements + rank)
        x = torch.randn(elements, generator=generator, dtype=torch.float64).to(dtype)
        if elements > 100:
            x[11 : 11 + len(special)] = special.roll(rank if elements == 9001 else 0).to(dtype)
        for wire, algorithm in itertools.product(WIRES, ALGORITHMS):
            how = {"wire_dtype": wire, "algorithm": algorithm}
            results = []
            for engine in ("host", "triton"):
                y = x.clone()
                fusedring.all_reduce(y, engine=engine, **how)
                results.append(y)
            assert same_bits(*results), (dtype, elements, how)
            if wire is not None and (world > 2 or elements < 9001):
                continue  # the halves cost as much again: every wire with one size, every size with one wire
            y = x.clone()
            part = fusedring.reduce_scatter(y, engine="triton", **how)
            z = x.clone()
            assert same_bits(part, fusedring.reduce_scatter(z, engine="host", **how)), ("scatter", dtype, elements, how)
            fusedring.all_gather(y, engine="triton", **how)
            assert same_bits(y, results[0]), ("gather", dtype, elements, how)


@pytest.mark.parametrize(
    ("world", "dtype"),
    [
        # The interpreter takes some seconds for each. Once for each world size and for each dtype, and then the rest.
        pytest.param(world, dtype, marks=() if DTYPES[world - 1] == dtype else pytest.mark.slow)
        for world, dtype in itertools.product(SIZES, DTYPES)
    ],
)
def test_all_engines_give_the_same_bits(world, dtype):
    run_ranks(world, check_bits, dtype, deadline=300)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 50), nn.LayerNorm(50), nn.Linear(50, 3, bias=False)
    )


def train_on(rank: int, world: int, engine: str, algorithm: str, wire: str | None, as_view: bool) -> list[torch.Tensor]:
    options = {"engine": engine, "algorithm": algorithm, "wire_dtype": wire, "gradient_as_bucket_view": as_view}
    model = FusedRingDDP(make_model(), bucket_cap_mb=0.02, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x, y = torch.randn(8, 64, generator=generator), torch.randn(8, 3, generator=generator)
        if step == 1:
            with model.no_sync():
                nn.functional.mse_loss(model(x.flip(0)), y).backward()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
    return [p.detach().clone() for p in model.parameters()]


def check_training(rank: int, world: int) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    for algorithm, wire in itertools.product(("ring", "two_shot", "one_shot"), (None, "fp16", "bf16")):
        kernels = train_on(rank, world, "triton", algorithm, wire, wire is None)
        host = train_on(rank, world, "host", algorithm, wire, True)
        assert all(map(torch.equal, kernels, host)), (algorithm, wire)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_training_with_the_kernels_equals_the_host_engine(world):
    run_ranks(world, check_training, deadline=240)


def check_odd_gradients(rank: int, world: int) -> None:
    os.environ["TRITON_INTERPRET"] = "1"

    class Odd(nn.Module):
        """1,000 tensors of 1 to 7 elements, and some whose gradients are views of others, or lie in another order."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.tiny = nn.ParameterList(torch.randn(1 + i % 7) for i in range(1000))
            self.token, self.position = nn.Parameter(torch.randn(1, 70, 40)), nn.Parameter(torch.randn(70, 40))
            self.turned = nn.Parameter(torch.randn(60, 50).t())
            self.empty = nn.Parameter(torch.empty(0))

        def forward(self, scale):
            small = sum((p * p).sum() for p in self.tiny)
            shared = self.token + self.position.unsqueeze(0)
            return scale * (small + shared.square().sum() + self.turned.square().sum() + self.empty.sum())

    grads = []
    for engine in ("host", "triton"):
        model = FusedRingDDP(Odd(), engine=engine, algorithm="ring", bucket_cap_mb=0.05)
        model(float(rank + 1)).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *grads))
    whole = torch.randn(5001, generator=torch.Generator().manual_seed(rank))
    for first in (1, 3, 8):  # addresses that are not multiples of 16 bytes
        a, b = whole.clone(), whole.clone()
        fusedring.all_reduce(a[first:], engine="host", algorithm="ring")
        fusedring.all_reduce(b[first:], engine="triton", algorithm="ring")
        assert torch.equal(a, b)


def test_tiny_shared_transposed_and_unaligned_gradients():
    run_ranks(2, check_odd_gradients, deadline=240)


def check_windows(rank: int, world: int, algorithm: str) -> None:
    """Tensors larger than the slots go in several launches."""
    os.environ["TRITON_INTERPRET"] = "1"
    from fusedring.engines import interpreter

    interpreter.PARITY_BYTES = 32 << 10
    x = torch.randn(20_011, generator=torch.Generator().manual_seed(rank))
    a, b = x.clone(), x.clone()
    fusedring.all_reduce(a, engine="host", algorithm=algorithm)
    fusedring.all_reduce(b, engine="triton", algorithm=algorithm)
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    "algorithm", ["ring", *(pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS if name != "ring")]
)
def test_tensors_larger_than_the_slots(algorithm):
    run_ranks(3, check_windows, algorithm, deadline=240)


def check_stopped_rank(rank: int, world: int, algorithm: str) -> str:
    """One rank announces the launch and then never runs its kernel."""
    os.environ["TRITON_INTERPRET"] = "1"
    from fusedring.kernels.prepared import Prepared

    x = torch.full((5000,), float(rank))
    fusedring.all_reduce(x, engine="triton", algorithm=algorithm, op="sum")
    if rank == 1:

        def stop(self, output, patience):
            time.sleep(6)
            raise ZeroDivisionError

        real, Prepared.launch = Prepared.launch, stop
        with pytest.raises(ZeroDivisionError):
            fusedring.all_reduce(x, engine="triton", algorithm=algorithm, timeout=1)
        Prepared.launch = real
        text = ""
    else:
        with pytest.raises(fusedring.FusedRingError) as raised:
            fusedring.all_reduce(x, engine="triton", algorithm=algorithm, timeout=1)
        text = str(raised.value)
        assert x.isnan().all()
    with pytest.raises(fusedring.FusedRingError):
        fusedring.all_reduce(x, engine="triton", algorithm=algorithm, timeout=1)
    torch.distributed.barrier()
    fusedring.close()
    x = torch.full((5000,), float(rank))
    fusedring.all_reduce(x, engine="triton", algorithm=algorithm, op="sum")
    assert (x == world * (world - 1) / 2).all()
    return text


@pytest.mark.parametrize("algorithm", ["ring", pytest.param("two_shot", marks=pytest.mark.slow)])
def test_a_rank_that_stops_half_way_is_named_with_the_step(algorithm):
    texts = run_ranks(3, check_stopped_rank, algorithm)
    for text in (texts[0], texts[2]):
        assert "for rank 1 at step 1" in text
        assert "rank 1 has said nothing" in text
        assert "NaN" in text


def check_killed_in_kernel(rank: int, world: int) -> str:
    os.environ["TRITON_INTERPRET"] = "1"
    from fusedring.kernels.prepared import Prepared

    x = torch.full((5000,), float(rank))
    fusedring.all_reduce(x, engine="triton", algorithm="ring")
    torch.distributed.barrier()
    if rank == 1:
        Prepared.launch = lambda self, output, patience: os.kill(os.getpid(), 9)
    started = time.monotonic()
    with pytest.raises(fusedring.PeerLostError) as raised:
        fusedring.all_reduce(x, engine="triton", algorithm="ring", timeout=60)
    assert time.monotonic() - started < 30
    assert x.isnan().all()
    return str(raised.value)


def test_a_rank_that_dies_while_others_wait_in_a_kernel():
    outcomes = start_ranks(3, check_killed_in_kernel)
    assert outcomes[1] == ("died", -9)
    assert all(state == "returned" and "rank 1 has ended" in text for state, text in (outcomes[0], outcomes[2])), (
        outcomes
    )


def check_lazy_gradients(rank: int, world: int) -> None:
    """Gradients whose values do not lie in their memory as they are."""
    os.environ["TRITON_INTERPRET"] = "1"

    class Lazy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, how):
            ctx.how = how
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            if ctx.how == "zero":
                return torch._efficientzerotensor((5000,)), None
            return torch._neg_view(torch.ones(5000)), None

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = nn.Parameter(torch.zeros(5000))

        def forward(self, how):
            return Lazy.apply(self.values, how)

    for how, want in (("zero", 0.0), ("negative", -1.0)):
        model = FusedRingDDP(Holder(), engine="triton")
        model(how).backward()
        assert (model.module.values.grad == want).all()


def test_gradients_that_are_not_what_lies_in_memory():
    run_ranks(2, check_lazy_gradients)


def check_engines_differ(rank: int, world: int) -> str:
    os.environ["TRITON_INTERPRET"] = "1"
    with pytest.raises(fusedring.MismatchError) as raised:
        fusedring.all_reduce(torch.ones(5), engine="triton" if rank else "host")
    return str(raised.value)


def test_ranks_with_different_engines_are_told():
    texts = run_ranks(2, check_engines_differ)
    assert texts[0] == texts[1]
    assert "engine host" in texts[0]
    assert "engine triton" in texts[0]


def check_totals(rank: int, world: int) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from fusedring.group.groups import communicator_of
    from fusedring.plan.launch import Launch

    communicator = communicator_of()
    engine = communicator.engine_for("triton", torch.device("cpu"))
    for algorithm in ALGORITHMS:
        for poison in (None, float("inf")):
            x = torch.arange(5000.0) % 7 + rank
            if poison and rank == 1:
                x[4000] = poison
            launch = Launch("all_reduce", algorithm, 5000, "float32", "float32", 1.0, "triton")
            work = communicator.submit(engine, launch, x, result=x, timeout=20)
            work.wait()
            sums = torch.tensor([work.outcome.squares, float(work.outcome.unbounded)], dtype=torch.float64)
            torch.distributed.all_reduce(sums)
            if poison:
                assert sums[1] >= 1
            else:  # small whole numbers, so that the sum is exact
                assert sums.tolist() == [float(x.double().square().sum()), 0.0], algorithm


def test_sum_of_squares_and_found_inf_come_with_the_reduction():
    run_ranks(2, check_totals)


class Far:
    """A tensor of which only the address matters."""

    device = torch.device("cpu")

    def __init__(self, address: int, elements: int) -> None:
        self.address, self.elements = address, elements

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return self.elements

    def element_size(self) -> int:
        return 4


def check_shared_memory(rank: int, world: int) -> None:
    """Autograd gives two parameters one gradient: on rank 0 both must be read before either is written."""
    os.environ["TRITON_INTERPRET"] = "1"

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.position = nn.Parameter(torch.zeros(70, 40)), nn.Parameter(torch.zeros(70, 40))

        def forward(self):
            if rank == 0:
                return (torch.ones(70, 40) * (self.token.unsqueeze(0) + self.position.unsqueeze(0))).sum()
            return self.token.sum() + (3 * self.position).sum()

    for engine, as_view in itertools.product(("host", "triton"), (True, False)):
        model = FusedRingDDP(Two(), engine=engine, gradient_as_bucket_view=as_view)
        for _ in range(2):
            model().backward()
            assert (model.module.token.grad == 1).all()
            assert (model.module.position.grad == 2).all()
            model.zero_grad()
    local = Two()
    local().backward()
    assert (local.token.grad.data_ptr() == local.position.grad.data_ptr()) == (rank == 0), "the case is none any more"


def test_gradients_that_share_one_memory():
    run_ranks(2, check_shared_memory)


def check_wrap(rank: int, world: int) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from fusedring.group.groups import communicator_of
    from fusedring.kernels.layout import EPOCHS, slots_byte

    def reduce(algorithm: str) -> None:
        x = torch.full((5000,), float(rank))
        fusedring.all_reduce(x, op="sum", engine="triton", algorithm=algorithm)
        assert (x == 1).all()

    reduce("ring")
    words = communicator_of().engine_for("triton", torch.device("cpu"))._opened._regions[rank].view(torch.int32)
    torch.distributed.barrier()
    words[EPOCHS : slots_byte(world) // 4] = 2**31 - 3
    torch.distributed.barrier()
    for algorithm in ("ring", "two_shot", "one_shot") * 3:
        reduce(algorithm)
    assert words[EPOCHS] == -(2**31) + 6


def test_epochs_survive_the_wrap():
    run_ranks(2, check_wrap)


def check_two_groups(rank: int, world: int) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from fusedring.engines import interpreter

    fusedring.all_reduce(torch.ones(5), engine="triton")
    x, started = torch.ones(5), time.monotonic()
    if rank == 0:
        busy = pytest.raises(fusedring.FusedRingError, match="runs a kernel of another group")
        with interpreter._interpreting, busy:  # as if another group's kernel were running
            fusedring.all_reduce(x, engine="triton")
    else:
        with pytest.raises(fusedring.FusedRingError):
            fusedring.all_reduce(x, engine="triton")
    assert time.monotonic() - started < 30, "the other rank was left waiting in its kernel"
    torch.distributed.barrier()
    fusedring.close()
    fusedring.all_reduce(torch.ones(5), engine="triton")


def test_two_kernels_in_one_process_are_refused():
    run_ranks(2, check_two_groups)


def check_memory(rank: int, world: int) -> None:
    """Neither gradients nor regions are kept longer than they are needed."""
    os.environ["TRITON_INTERPRET"] = "1"
    model = FusedRingDDP(nn.Linear(64, 64, bias=False), engine="triton", gradient_as_bucket_view=False)
    seen = []
    model.module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(weakref.ref(p.grad)))
    model(torch.ones(2, 64)).sum().backward()
    assert seen[0]() is None, "the gradient that autograd made is still alive"

    def mapped() -> int:
        """Bytes of shared memory in this process."""
        spans = [
            line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line
        ]
        return sum(int(stop, 16) - int(start, 16) for start, stop in spans)

    before = mapped()
    fusedring.close()
    gc.collect()
    assert before - mapped() > 2 * 8 << 20


def test_memory_is_let_go():
    run_ranks(2, check_memory)


def check_far_indices(rank: int, world: int) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import triton.language as tl

    from fusedring.kernels.tables import Run, Table
    from fusedring.kernels.tiles import read_tile, slot

    globals().update(tl=tl, read_tile=read_tile, slot=slot)  # where a kernel looks for names
    start = (1 << 33) + 16
    whole = Far(1 << 40, 1 << 34)
    table = Table([(start, start + 5000)], [Run(0, whole)], whole, [16], chunk_elements=8192, block=2048)
    rows = [(whole.address + 4 * at, at, n, n) for at, n in ((start, 2048), (start + 2048, 2048), (start + 4096, 904))]
    assert [tuple(row) for row in table.tiles.tolist()] == rows

    @triton.jit
    def places(tiles, origins, out):
        for number in range(3):
            _, first, _, _ = read_tile(tiles, number)
            pointer = slot(tl.load(out + 3), first - tl.load(origins), tl.float32)
            tl.store(out + number, pointer.to(tl.int64))

    out = torch.tensor([0, 0, 0, 1 << 41])
    places[(1,)](table.tiles, table.origins, out)
    assert out[:3].tolist() == [(1 << 41) + 4 * (at - 16) for at in (start, start + 2048, start + 4096)]


def test_indices_beyond_32_bits():
    run_ranks(1, check_far_indices)
