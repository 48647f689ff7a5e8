"""Random modules in random training: what FusedRingDDP averages against the mean of every rank's own gradients.

Hypothesis draws a `Case`: a module, options, and steps of training. Every rank trains the wrapped module on its own
inputs, and computes what it should have got: for each rank in turn a plain copy of the module, which starts with the
gradients that are there, runs that rank's inputs. A copy computes the same bits as that rank does, since it runs the
same operations on the same values, with one thread. So the only tolerance is for the averaging itself (`tolerance`).

Starting processes is slow. So the ranks stay, and are sent one case after another: see `Ranks`.

It is done on each engine that runs here, with the same expectations: the host engine, the triton engine, and the CUDA
engine on the double of a GPU from tests/engines/recording_gpu.py. Kernels run under Triton's interpreter, which takes
much longer; so they get fewer cases.

A failure prints its case; `run_ranks(world, run_alone, engine, case)` runs it again. `pytest --soak -m soak` draws 1000
cases for each world size and engine, or FUSEDRING_RANDOM_CASES, others on every run.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedring import FusedRingDDP
from fusedring.config import ALGORITHMS, accumulate_dtype
from fusedring.data_parallel import reduction
from fusedring.data_parallel import step as steps
from fusedring.data_parallel.buckets import Entry
from fusedring.data_parallel.flags import Flags
from fusedring.group.groups import communicator_of
from tests.ranks import Ranks, staying_ranks

MANY = int(os.environ.get("FUSEDRING_RANDOM_CASES", "1000"))
FEATURES = 5
WIDTHS = [3, 0, 1, 7, 40]
READ_IN_PLACE = [*WIDTHS, 2048 // FEATURES + 1]
"""On the engines that read large gradients where autograd left them."""
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Block:
    """Two linear maps, to `width` features and back, beside the identity.

    skipped_by: which ranks leave it out, a bit for each, moved on by one in every forward.
    tied: its first matrix is that of the block before, and so are its width and dtype.
    """

    width: int
    dtype: str
    frozen: bool
    tied: bool
    checkpointed: bool
    skipped_by: int


@dataclass(frozen=True)
class Step:
    """micro_batches: all but the last under no_sync, or, with one_backward, one backward for the sum of all losses.

    zero_grad: before, to None, to zero, or not at all. toggled: the block that is frozen or unfrozen before. evaluates:
    a forward without gradients comes before.
    """

    micro_batches: int
    one_backward: bool
    zero_grad: str
    toggled: int | None
    evaluates: bool


@dataclass(frozen=True)
class Case:
    """order: the blocks in the order in which they are used, some several times and some never."""

    seed: int
    blocks: tuple[Block, ...]
    order: tuple[int, ...]
    inputs_need_grad: bool
    head_skipped_by: int
    steps: tuple[Step, ...]
    find_unused: bool
    cap_mb: float | None
    as_view: bool
    wire: str | None
    algorithm: str


@st.composite
def cases(draw: st.DrawFn, world: int, widths: list[int]) -> Case:
    find_unused = draw(st.sampled_from([True, True, False]))
    masks = st.sampled_from([*range(1, 2**world), 0]) if find_unused else st.just(0)
    block = st.builds(
        Block,
        width=st.sampled_from(widths),
        dtype=st.sampled_from(list(DTYPES)),
        frozen=st.sampled_from([False, False, False, True]),
        tied=st.booleans(),
        checkpointed=st.booleans(),
        skipped_by=masks,
    )
    blocks = tuple(draw(st.lists(block, min_size=2, max_size=5)))
    indices = st.integers(0, len(blocks) - 1)
    if find_unused:
        order = draw(st.lists(indices, min_size=1, max_size=6))
    else:
        order = draw(st.permutations(range(len(blocks)))) + draw(st.lists(indices, max_size=2))
    inputs_need_grad = draw(st.booleans())
    step = st.builds(
        Step,
        micro_batches=st.integers(1, 3),
        one_backward=st.booleans(),
        zero_grad=st.sampled_from(["none", "none", "zero", "keep"]),
        toggled=st.one_of(st.none(), st.none(), indices),
        evaluates=st.booleans(),
    )
    return Case(
        seed=draw(st.integers(0, 99)),
        blocks=blocks,
        order=tuple(order),
        inputs_need_grad=inputs_need_grad,
        head_skipped_by=draw(masks) if inputs_need_grad else 0,
        steps=tuple(draw(st.lists(step, min_size=3, max_size=4))),
        find_unused=find_unused,
        cap_mb=draw(st.sampled_from([None, 1e-5, 5e-4])),
        as_view=draw(st.booleans()),
        wire=draw(st.sampled_from([None, "bf16"])),
        algorithm=draw(st.sampled_from(["auto", *ALGORITHMS])),
    )


class Pair(nn.Module):
    def __init__(self, block: Block, tied_to: Pair | None) -> None:
        super().__init__()
        width, dtype = (block.width, DTYPES[block.dtype]) if tied_to is None else (tied_to.up.size(0), tied_to.up.dtype)
        self.checkpointed = block.checkpointed

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter((torch.randn(shape) / 4).to(dtype), requires_grad=not block.frozen)

        self.up = parameter(width, FEATURES) if tied_to is None else tied_to.up
        self.down, self.bias, self.gain = parameter(FEATURES, width), parameter(FEATURES), parameter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.checkpointed else self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(nn.functional.linear(x.to(self.up.dtype), self.up))
        return x + (nn.functional.linear(hidden, self.down, self.bias) * self.gain).to(x.dtype)


class Model(nn.Module):
    def __init__(self, case: Case, world: int) -> None:
        super().__init__()
        torch.manual_seed(case.seed)
        self.case, self.world = case, world
        self.pairs = nn.ModuleList()
        for block in case.blocks:
            self.pairs.append(Pair(block, self.pairs[-1] if block.tied and len(self.pairs) > 0 else None))
        self.head = nn.Parameter(torch.randn(FEATURES))

    def forward(self, x: torch.Tensor, number: int, rank: int) -> torch.Tensor:
        """As `rank` does it in its forward of that number."""
        bit = 1 << (rank + number) % self.world
        x = x * 1  # an output that is the input itself would tell no wrapper of its backward
        for index in self.case.order:
            if not self.case.blocks[index].skipped_by & bit:
                x = self.pairs[index](x)
        return x if self.case.head_skipped_by & bit else x * self.head


def inputs(case: Case, number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * case.seed + 10 * number + rank)
    return torch.randn(4, FEATURES, generator=generator).requires_grad_(case.inputs_need_grad)


def tolerance(dtype: torch.dtype, wire: torch.dtype | None, world: int) -> float:
    """How far an average over W ranks may be from the mean, as a fraction of the mean of the absolute values.

    With the unit roundoff u, half of eps, a rounding multiplies by a factor of at most 1 + u. A contribution to the
    average is scaled (a rounding, and that of the factor 1/W itself) and takes part in at most W - 1 sums, all in the
    accumulate dtype: W + 1 roundings. On the ring it is narrowed to the wire in each of W - 1 partial sums and in the
    result; in the direct algorithms by itself and in the result, which is no more: W narrowings, each of which costs
    another rounding if float64 becomes bfloat16 by way of float32. The mean that is compared with, in float64, has W.
    So every contribution is off by a relative (1 + u_a)^(W+1) (1 + u_w)^W (1 + u_64)^W - 1 at most, and the average by
    as much of the sum of the contributions' absolute values.
    """
    accumulate, sent = accumulate_dtype(dtype), wire or dtype
    unit = {d: torch.finfo(d).eps / 2 for d in (torch.float64, torch.float32, torch.bfloat16)}
    narrowing = 0.0 if sent == accumulate else unit[sent]
    by_way_of = unit[torch.float32] if narrowing and dtype == torch.float64 else 0.0
    roundings = ((unit[accumulate], world + 1), (narrowing, world), (by_way_of, world), (unit[torch.float64], world))
    return math.expm1(sum(times * math.log1p(u) for u, times in roundings))


def run_case(rank: int, world: int, engine: str, case: Case) -> None:
    """Train as the case has it, on an engine that `take_engine` has set up.

    Raises AssertionError where gradients are wrong, but only after the last step.
    """
    module = Model(case, world)
    for parameter in module.parameters():
        parameter.data += rank / 8  # wrapping makes all ranks' equal
    model = FusedRingDDP(
        module,
        find_unused_parameters=case.find_unused,
        bucket_cap_mb=case.cap_mb,
        gradient_as_bucket_view=case.as_view,
        wire_dtype=case.wire,
        algorithm=case.algorithm,
        engine="auto" if engine == "gpu" else engine,
        timeout=20,
    )
    assert (communicator_of().engine_for("auto", model.device).gpu is not None) == (engine == "gpu")
    wire = DTYPES["bfloat16"] if case.wire else None
    faults, number = [], 0
    for index, step in enumerate(case.steps):
        if step.toggled is not None:
            for parameter in module.pairs[step.toggled].parameters():
                parameter.requires_grad_(not parameter.requires_grad)
        if step.zero_grad != "keep":
            model.zero_grad(set_to_none=step.zero_grad == "none")
        if step.evaluates:
            with torch.no_grad():
                model(inputs(case, number, rank), number, rank)
        numbers = range(number, number := number + step.micro_batches)
        everyone = [local_gradients(module, case, step, numbers, r) for r in range(world)]
        train(model, case, step, numbers, rank, model.no_sync)
        for name, parameter in module.named_parameters():
            fault = difference(parameter, [grads[name] for grads in everyone], wire)
            if fault:
                faults.append(f"step {index}, {name} {parameter.dtype} {list(parameter.shape)}: {fault}")
        faults += [f"step {index}, ranks differ in {name}" for name in differing(module, world)]
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
    assert not faults, "\n".join(faults)


def train(
    model: nn.Module, case: Case, step: Step, numbers: range, rank: int, no_sync: Callable[[], AbstractContextManager]
) -> None:
    """Forwards of these numbers, and backwards."""
    total = torch.zeros(())
    for number in numbers:
        with nullcontext() if step.one_backward or number == numbers[-1] else no_sync():
            loss = model(inputs(case, number, rank), number, rank).square().mean()
        if step.one_backward:
            total = total + loss
        else:
            loss.backward()
    if step.one_backward:
        total.backward()


def local_gradients(module: Model, case: Case, step: Step, numbers: range, rank: int) -> dict[str, torch.Tensor | None]:
    """Of a plain copy that runs the micro-batches of `rank`, and begins with the gradients that are there."""
    local = copy.deepcopy(module)
    for mine, theirs in zip(local.parameters(), module.parameters(), strict=True):
        mine.grad = None if theirs.grad is None else theirs.grad.clone()
    train(local, case, step, numbers, rank, nullcontext)
    return {name: parameter.grad for name, parameter in local.named_parameters()}


def difference(parameter: nn.Parameter, everyone: list[torch.Tensor | None], wire: torch.dtype | None) -> str:
    """In words; empty if the gradient is what it should be, given all ranks' local ones."""
    got = parameter.grad
    if got is None or all(grad is None for grad in everyone):
        return "" if got is None and everyone == [None] * len(everyone) else f"{got}, but local ones are {everyone}"
    if got.dtype != parameter.dtype or got.shape != parameter.shape:
        return f"the gradient is {got.dtype} {list(got.shape)}"
    if not parameter.requires_grad:  # nothing touches it
        return "" if torch.equal(got, everyone[0]) else f"frozen, but {everyone[0]} became {got}"
    terms = torch.stack([torch.zeros(got.shape).double() if g is None else g.double() for g in everyone])
    allowed = terms.abs().mean(0) * tolerance(got.dtype, wire, len(everyone))
    # Below the smallest normal number roundings are absolute, and smaller than it.
    allowed += 2 * len(everyone) * torch.finfo(torch.bfloat16).smallest_normal
    wrong = ~((got.double() - terms.mean(0)).abs() <= allowed)
    if not wrong.any():
        return ""
    return f"{got[wrong].tolist()} instead of {terms.mean(0)[wrong].tolist()}, allowed {allowed[wrong].tolist()}"


def differing(module: nn.Module, world: int) -> list[str]:
    """Names of the parameters whose gradients are not the same bits on all ranks (collective)."""
    mine = {name: None if p.grad is None else p.grad.double().tolist() for name, p in module.named_parameters()}
    everyone: list[dict[str, object]] = [{}] * world
    dist.all_gather_object(everyone, mine)
    return [name for name in mine if any(repr(other[name]) != repr(mine[name]) for other in everyone)]


# Engines


def take_engine(engine: str) -> None:
    """Have this rank run on 'host', 'triton', or 'gpu', the CUDA engine on a GPU that is pretended (collective).

    Before anything imports triton.
    """
    if engine != "host":
        os.environ["TRITON_INTERPRET"] = "1"
    if engine == "gpu":
        from tests.engines.recording_gpu import RecordingGpu, pretend

        pretend(communicator_of(), RecordingGpu())


def run_alone(rank: int, world: int, engine: str, case: Case) -> None:
    """One case on fresh ranks."""
    take_engine(engine)
    run_case(rank, world, engine, case)


def start(rank: int, world: int, engine: str, fault: str | None) -> None:
    """On a new rank. fault: the name of one that is planted."""
    take_engine(engine)
    if fault is not None:
        FAULTS[fault]()


def compare(
    ranks: Ranks, engine: str, examples: int, phases: tuple[Phase, ...] = tuple(Phase), *, same_always: bool = True
) -> None:
    @settings(
        max_examples=examples,
        phases=phases,
        derandomize=same_always,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(ranks.world, WIDTHS if engine == "host" else READ_IN_PLACE))
    def averages_are_the_mean(case: Case) -> None:
        ranks.run(run_case, engine, case)

    averages_are_the_mean()


@pytest.mark.parametrize(
    ("engine", "world", "examples"),
    [
        ("host", 2, 40),
        ("host", 3, 40),
        pytest.param("triton", 2, 12, marks=pytest.mark.slow),
        pytest.param("triton", 3, 6, marks=pytest.mark.slow),
        ("gpu", 2, 12),  # some seconds: kernels run under the interpreter
        pytest.param("gpu", 3, 6, marks=pytest.mark.slow),
    ],
)
def test_random_models(engine, world, examples):
    with staying_ranks(world, start, engine, None) as ranks:
        compare(ranks, engine, examples)


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("engine", ["host", "triton", "gpu"])
def test_many_random_models(engine, world):
    with staying_ranks(world, start, engine, None) as ranks:
        compare(ranks, engine, MANY, same_always=False)


# Planted faults


def factor_off_by_a_little() -> None:
    real = reduction.scale_factor
    reduction.scale_factor = lambda *args: real(*args) * (1 + 2**-20)


def missing_gradients_are_not_set_to_zero() -> None:
    real = steps.Step.take

    def take(self, index, bucket, shared, *, reads_in_place):
        entries = [entry for entry in bucket.entries if entry.parameter.grad is None]
        before = [entry.view.clone() for entry in entries]
        real(self, index, bucket, shared, reads_in_place=reads_in_place)
        for entry, stale in zip(entries, before, strict=True):
            entry.view.copy_(stale)

    steps.Step.take = take


def every_gradient_is_handed_out() -> None:
    real = Flags.read

    def read(self):
        told = real(self)
        return replace(told, empty=[0] * len(told.empty))

    Flags.read = read


def what_is_read_in_place_is_wrong() -> None:
    real = Entry.in_place

    def in_place(self, grad):
        memory = real(self, grad)
        return None if memory is None else 1.25 * memory

    Entry.in_place = in_place


FAULTS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        factor_off_by_a_little,
        missing_gradients_are_not_set_to_zero,
        every_gradient_is_handed_out,
        what_is_read_in_place_is_wrong,
    )
}


@pytest.mark.parametrize(
    ("fault", "engine"),
    [pytest.param(f, "gpu", marks=pytest.mark.slow) if "in_place" in f else (f, "host") for f in FAULTS],
)
def test_a_planted_fault_is_found(fault, engine):
    with (
        staying_ranks(2, start, engine, fault) as ranks,
        pytest.raises(AssertionError, match=r"instead of|but local ones are"),
    ):
        compare(ranks, engine, 40, (Phase.generate,))
