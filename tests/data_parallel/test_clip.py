"""fusedring.clip_grad_norm_ against torch.nn.utils.clip_grad_norm_."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedring
from fusedring import FusedRingDDP
from tests.ranks import run_ranks

SMALL = torch.finfo(torch.float32).eps


class Assorted(nn.Module):
    """Parameters of several dtypes, most of them not a multiple of 16 long; two names for one of them.

    Gradients are small whole numbers that depend on the position.
    """

    def __init__(self, *dtypes: torch.dtype, empty: bool = True) -> None:
        super().__init__()
        shapes = ((5, 7), (16,), (3,), *(((0, 2),) if empty else ()))
        self.parts = nn.ParameterList(
            nn.Parameter(torch.zeros(shape, dtype=dtype)) for dtype in dtypes for shape in shapes
        )
        self.tied = self.parts[0]
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, indices: Iterable[int] | None = None, factor: float = 1.0) -> torch.Tensor:
        chosen = range(len(self.parts)) if indices is None else indices
        return sum(self.term(self.parts[i], i, factor) for i in chosen)

    @staticmethod
    def term(parameter: torch.Tensor, index: int, factor: float) -> torch.Tensor:
        weights = (torch.arange(parameter.numel()) + index) % 7 - 3.0
        real = (parameter.real + 2 * parameter.imag) if parameter.is_complex() else parameter
        return (real.double().flatten() * weights * factor).sum()


def stand_ins(model: nn.Module) -> list[nn.Parameter]:
    """Parameters with the same gradients, each once."""
    copies = []
    for parameter in model.parameters():
        copies.append(nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad))
        copies[-1].grad = None if parameter.grad is None else parameter.grad.clone()
    return copies


def compare(model: nn.Module, max_norm: float, norm_type: float = 2.0, **how: bool) -> torch.Tensor:
    """Clip as torch does, and allow for what rounding may do."""
    theirs = stand_ins(model)
    wanted = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type, **how)
    got = fusedring.clip_grad_norm_(model, max_norm, norm_type, **how)
    assert (got.dtype, got.device, got.shape) == (wanted.dtype, wanted.device, wanted.shape)
    dtypes = {p.dtype for p in theirs if p.grad is not None}
    elements = sum(p.numel() for p in theirs)
    # Summing n terms of one sign in float32, n roundings each way; sixteen-bit norms are rounded for each tensor and
    # again as a whole, on both sides: 4 halves of eps. Another 4 for the factor and the product.
    exact = norm_type in (1.0, math.inf) and dtypes == {torch.float32}
    tolerance = 0.0 if exact else elements * SMALL + 4 * max((torch.finfo(d).eps for d in dtypes), default=0.0)
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=0.0, equal_nan=True)
    for parameter, other in zip(model.parameters(), theirs, strict=True):
        assert (parameter.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(parameter.grad, other.grad, rtol=tolerance, atol=0.0, equal_nan=True)
    return got


@pytest.fixture
def tensors_in_norm(monkeypatch):
    """How many tensors each total norm was taken of."""
    counts: list[int] = []
    real = torch.nn.utils.get_total_norm

    def counting(tensors, *rest):
        counts.append(len(tensors))
        return real(tensors, *rest)

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", counting)
    yield counts
    fusedring.close()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, math.inf])
@pytest.mark.parametrize(
    ("dtypes", "buckets"),
    [
        ((torch.float32,), 1),
        ((torch.float64, torch.bfloat16, torch.float32), 3),
        ((torch.float16,), 1),
    ],
)
def test_norms_and_gradients_are_those_of_torch(dtypes, buckets, norm_type, tensors_in_norm):
    # torch's infinity norm takes no empty gradient.
    model = FusedRingDDP(Assorted(*dtypes, empty=not math.isinf(norm_type)))
    for max_norm in (1e4, 4.0, 0.5):  # the first one changes nothing
        model.zero_grad()
        model().backward()
        compare(model, max_norm, norm_type)
    assert tensors_in_norm == [buckets] * 3


@pytest.mark.parametrize("norm_type", [0.0, -1.0, -math.inf])
def test_norms_in_which_zeros_or_tensors_count(norm_type, tensors_in_norm):
    model = FusedRingDDP(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)))
    model(torch.arange(1.0, 4.0)).sum().backward()
    compare(model, 0.5, norm_type)
    assert tensors_in_norm == [4]


def test_gradients_elsewhere_are_taken_one_by_one(tensors_in_norm):
    for model in (
        FusedRingDDP(Assorted(torch.float32), gradient_as_bucket_view=False),
        FusedRingDDP(Assorted(torch.complex64)),
        Assorted(torch.float32, torch.complex128),
    ):
        model().backward()
        compare(model, 3.0)
    assert tensors_in_norm == [4, 4, 8]


def test_a_bucket_counts_as_a_whole_or_not_at_all(tensors_in_norm):
    outer = nn.ModuleDict({"plain": nn.Linear(2, 2), "wrapped": FusedRingDDP(Assorted(torch.float32, torch.float64))})
    outer["plain"](torch.ones(2)).sum().backward()
    outer["wrapped"]().backward()
    compare(outer, 3.0)  # two buckets, and two outside
    parts = outer["wrapped"].module.parts
    parts[1].grad = parts[1].grad.clone()
    compare(outer, 2.0)
    parts[1].grad = None
    compare(outer, 1.0)
    outer.zero_grad()
    outer["wrapped"]().backward()
    parts[1] = nn.Parameter(torch.ones(16))  # the old one has its gradient in the bucket, and is no part of the model
    compare(outer, 0.5)
    assert tensors_in_norm == [4, 1 + 4 + 2, 1 + 3 + 2, 1 + 3]


def test_parameters_instead_of_a_module(tensors_in_norm):
    model = FusedRingDDP(Assorted(torch.float32))
    one = model.module.parts[0]
    for given, names in ((model.parameters(), None), ([*model.parameters(), one], None), (one, {"module.tied"})):
        model.zero_grad()
        model().backward()
        theirs = {name: p for (name, _), p in zip(model.named_parameters(), stand_ins(model), strict=True)}
        clipped = [p for name, p in theirs.items() if names is None or name in names]
        # The same operations in the same order, so the same bits.
        assert torch.equal(fusedring.clip_grad_norm_(given, 2.0), torch.nn.utils.clip_grad_norm_(clipped, 2.0))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert torch.equal(parameter.grad, theirs[name].grad)
    model.zero_grad()
    assert fusedring.clip_grad_norm_(model, 1.0) == 0
    assert fusedring.clip_grad_norm_([], 1.0) == 0


def test_the_flags_are_no_gradients(tensors_in_norm):
    model = FusedRingDDP(Assorted(torch.float32), find_unused_parameters=True)
    model().backward()
    model([1, 2]).backward()  # the others keep the gradients of before, and the flags say so
    flags = model._scheduler._flags.vector
    before = flags.clone()
    assert before.count_nonzero() == 2
    compare(model, 1.0)
    assert torch.equal(flags, before)
    assert tensors_in_norm == [1]


def test_nan_does_not_stay_in_the_padding(tensors_in_norm):
    model = FusedRingDDP(Assorted(torch.float32, torch.bfloat16))
    buckets = model._scheduler.buckets if model._scheduler else []
    for value in (math.nan, math.inf):
        model().backward()
        model.module.parts[2].grad[1] = value
        for foreach in (None, False):
            before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            with pytest.raises(RuntimeError, match="non-finite"):
                fusedring.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
            after = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(torch.equal(a.nan_to_num(99), b.nan_to_num(99)) for a, b in zip(after, before, strict=True))
            assert not compare(model, 1.0, foreach=foreach).isfinite()
        for bucket in buckets:
            in_gradients = sum(int(entry.view.count_nonzero()) for entry in bucket.entries)
            assert bucket.flat.count_nonzero() == in_gradients
        model.zero_grad()
        model().backward()
        assert compare(model, 1.0).isfinite()
        model.zero_grad()
    assert set(tensors_in_norm) == {2}


def test_a_copy_and_new_buckets_are_noticed(tensors_in_norm):
    model = FusedRingDDP(Assorted(torch.float32))
    for wrapper in (model, copy.deepcopy(model)):
        for trainable in (True, False):
            wrapper.module.parts[1].requires_grad_(trainable)
            wrapper.zero_grad()
            wrapper().backward()
            compare(wrapper, 1.0)
    assert tensors_in_norm == [1, 1, 1, 1]


def check_same_bits(rank: int, world: int) -> None:
    model = FusedRingDDP(Assorted(torch.float32, torch.bfloat16), wire_dtype="bf16")
    for step in range(2):
        model(factor=0.37 * (rank + step + 1)).backward()
        norm = compare(model, 1.0)
        everyone = [torch.empty_like(norm) for _ in range(world)]
        dist.all_gather(everyone, norm)
        assert all(torch.equal(one, norm) for one in everyone)
        for parameter in model.module.parts:
            others = [torch.empty_like(parameter) for _ in range(world)]
            dist.all_gather(others, parameter.grad)
            assert all(torch.equal(other, parameter.grad) for other in others)
        model.zero_grad()


def test_ranks_clip_alike():
    run_ranks(2, check_same_bits)
