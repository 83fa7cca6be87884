"""Gradients under DistributedDataParallel are the means of the definition, on every rank, whatever DDP's options."""

import copy
import pickle
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_lowprec.reduction import BucketAverager, reduce_in_fp32
from tests.reduction.test_buckets import check_scratch
from tests.support.chosen_cases import EVERY_CASE
from tests.support.processes.ranks import on_ranks
from tests.support.reduction.numpy_reference import (
    added,
    as_tensor,
    gradients,
    mean,
    same_bits,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(5, 3), (1,), (1001,), (2, 2, 9), (64, 4), (7,), (), (33, 3)]
TINY, SMALL = 2e-5, 5e-4  # in MiB: 20 and 524 bytes
CASES = {
    "default": ([BF16], {}),
    "many buckets": ([BF16], {"bucket_cap_mb": TINY}),
    "some buckets, views": ([BF16], {"bucket_cap_mb": SMALL, "gradient_as_bucket_view": True}),
    "both dtypes": ([BF16, FP32], {"bucket_cap_mb": SMALL}),
    "both dtypes, many buckets, views": (
        [BF16, BF16, FP32],
        {"bucket_cap_mb": TINY, "gradient_as_bucket_view": True},
    ),
    "FP16": ([FP16], {"bucket_cap_mb": SMALL}),
    "static graph": ([BF16], {"bucket_cap_mb": SMALL, "static_graph": True}),
    "static graph, both dtypes": ([BF16, FP32], {"bucket_cap_mb": SMALL, "static_graph": True}),
    "static graph, unused": ([BF16], {"bucket_cap_mb": TINY, "static_graph": True, "unused": "everywhere"}),
    "unused": ([BF16, FP32], {"bucket_cap_mb": SMALL, "find_unused_parameters": True, "unused": "everywhere"}),
    "unused on one rank": ([BF16], {"bucket_cap_mb": SMALL, "find_unused_parameters": True, "unused": "on rank 0"}),
}
seen: list[tuple[int, torch.dtype]] = []
"""Size and dtype of the buckets since it was cleared."""
ends: list[tuple[bool, bool]] = []
"""Which of them were said to be the first, and the last."""


class Linear(nn.Module):
    """A function linear in its parameters, so that their gradients are the tensors it is given, exactly."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__()
        kinds = [dtypes[k % len(dtypes)] for k in range(len(SHAPES))]
        self.weights = nn.ParameterList(torch.ones(s, dtype=t) for s, t in zip(SHAPES, kinds, strict=True))

    def forward(self, factors: list[torch.Tensor | None]) -> torch.Tensor:
        used = [(w, factor) for w, factor in zip(self.weights, factors, strict=True) if factor is not None]
        return torch.stack([(weight * factor).sum().float() for weight, factor in used]).sum()


def record_buckets() -> None:
    """Note what the hook is given."""
    original = BucketAverager.__call__

    def call(self, gradient, is_first, is_last, on_mean=None):
        seen.append((gradient.numel(), gradient.dtype))
        ends.append((is_first, is_last))
        return original(self, gradient, is_first, is_last, on_mean)

    BucketAverager.__call__ = call


def check_case(name: str, dtypes: list[torch.dtype], unused: str = "", **options) -> int:
    """Three steps, the last one over two micro-batches; returns how many buckets there were in the last backward."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = Linear(dtypes)
    ddp = DistributedDataParallel(model, **options)
    state = reduce_in_fp32(ddp)
    largest, held = [], []
    for step in range(4):
        micro_batches = 2 if step == 3 and not options.get("static_graph") else 1
        totals: list = [None] * len(SHAPES)
        for micro_batch in range(micro_batches):
            drawn = [
                gradients(weight.dtype, shape, ranks, 1000 * step + 100 * micro_batch + k)
                for k, (shape, weight) in enumerate(zip(SHAPES, model.weights, strict=True))
            ]
            if unused == "on rank 0":
                drawn[2][0] = np.zeros_like(drawn[2][0])
            totals = [
                new if old is None else [added(a, b) for a, b in zip(old, new, strict=True)]
                for old, new in zip(totals, drawn, strict=True)
            ]
            factors = [as_tensor(every[rank]) for every in drawn]
            if unused == "everywhere" or (unused and rank == 0):
                factors[2] = None
            seen.clear()
            ends.clear()
            with ddp.no_sync() if micro_batch < micro_batches - 1 else nullcontext():
                ddp(factors).backward()
            largest += seen
            if not (options.get("static_graph") and step == 0):  # DDP calls each the first there
                assert ends == [(k == 0, k == len(seen) - 1) for k in range(len(seen))], (name, ends)
            assert bool(seen) == (micro_batch == micro_batches - 1)
        held.append(state.scratch.nbytes)
        for k, (weight, every) in enumerate(zip(model.weights, totals, strict=True)):
            if factors[k] is None and (unused == "everywhere" or ranks == 1):
                assert weight.grad is None or not weight.grad.any(), (name, step)
                continue
            where = f"{name}: rank {rank} of {ranks}, step {step}, parameter {k}"
            assert same_bits(weight.grad, mean(every)), where
        ddp.zero_grad(set_to_none=step != 1)
    # DDP forms its buckets anew after the first backward, or the second if the graph is static.
    assert len(set(held[2:])) == 1, f"{name}: scratch memory grows, {held}"
    check_scratch(state, largest)
    return len(seen)


def check_hook_is_refused_twice() -> None:
    ddp = DistributedDataParallel(Linear([BF16]))
    reduce_in_fp32(ddp)
    with pytest.raises(RuntimeError, match="hook"):
        reduce_in_fp32(ddp)


class Interruption(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(_, value):
        return value.clone()

    @staticmethod
    def backward(_, gradient):
        raise ValueError("interrupted")


class Chain(nn.Module):
    """A function whose backward reaches `late` before `early`, and may be interrupted between them."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = (nn.Parameter(torch.ones(101, dtype=BF16)) for _ in range(2))

    def forward(self, factor: torch.Tensor, interrupted: bool) -> torch.Tensor:
        below = (self.early * factor).sum()
        return (Interruption.apply(below) if interrupted else below) + (self.late * factor).sum()


def check_interrupted() -> None:
    """The first bucket came and the last never did: DDP refuses to go on, and the model wrapped anew goes on well."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = Chain()
    for turn in range(3):
        every = gradients(BF16, (101,), ranks, seed=40 + turn)
        ddp = DistributedDataParallel(model, bucket_cap_mb=TINY)
        reduce_in_fp32(ddp)
        for _ in range(2):
            model.zero_grad()
            ddp(as_tensor(every[rank]), False).backward()
            for weight in model.parameters():
                assert same_bits(weight.grad, mean(every)), (rank, turn)
        seen.clear()
        with pytest.raises(ValueError, match="interrupted"):
            ddp(as_tensor(every[rank]), True).backward()
        assert len(seen) == 1, seen


def check_copies() -> None:
    """A copy of a model averages as the model does, from its first backward; torch builds it a reducer of its own."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for options in ({}, {"static_graph": True}):
        ddp = DistributedDataParallel(Linear([BF16, FP32]), **options)
        reduce_in_fp32(ddp)
        copies = [copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp)), copy.deepcopy(copy.deepcopy(ddp)), ddp]
        for number, model in enumerate(copies):
            assert len(model._comm_hooks) == 1, "torch's compiled reduction runs each of them"
            for step in range(2):
                model.zero_grad()
                weights = model.module.weights
                drawn = [
                    gradients(w.dtype, tuple(w.shape), ranks, 50 + 20 * number + 10 * step + k)
                    for k, w in enumerate(weights)
                ]
                seen.clear()
                model([as_tensor(every[rank]) for every in drawn]).backward()
                assert seen, (options, number)
                for weight, every in zip(weights, drawn, strict=True):
                    assert same_bits(weight.grad, mean(every)), (options, number, step)


def check() -> None:
    dist.init_process_group("gloo")
    record_buckets()
    buckets = {name: check_case(name, dtypes, **options) for name, (dtypes, options) in CASES.items()}
    assert buckets["default"] == 1, buckets
    assert all(buckets[name] >= 5 for name in buckets if "many" in name), buckets
    assert all(buckets[name] >= 2 for name in buckets if name != "default"), buckets
    check_hook_is_refused_twice()
    check_interrupted()
    check_copies()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", (1, 2, 3, 8) if EVERY_CASE else (3,))
def test_gradients_are_means_in_rank_order(ranks: int) -> None:
    on_ranks(check, ranks)
