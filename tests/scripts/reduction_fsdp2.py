"""Gradients under FSDP2 are the means of the definition: `fully_shard` itself, uneven shards, norms in FP32.

reduction_fsdp2.py RANKS …
"""

import sys
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from hf_lowprec.reduction import reduce_scatter_in_fp32, shard_fp32_parameters
from tests.reduction.definition import agrees, as_tensor, gradients, mean, narrow, widen
from tests.scripts.reduction_refusals import check_refusals
from tests.scripts.reduction_worlds import run_worlds

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDE = MixedPrecisionPolicy(reduce_dtype=FP32)


class Linear(nn.Module):
    """Linear in its parameters, so that their gradients are `factors` exactly."""

    def __init__(self, dtype: torch.dtype, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(shape, dtype=dtype) for shape in shapes)
        self.factors: list[torch.Tensor] = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for weight, factor in zip(self.weights, self.factors, strict=True):
            value = value + (weight * factor).sum().float()
        return value


class Block(nn.Module):
    """A layer with its norms."""

    def __init__(self, dtype: torch.dtype, norm: torch.dtype, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.before, self.main, self.after = Linear(norm, (5,), (3,)), Linear(dtype, *shapes), Linear(norm, (1,))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.after(self.main(self.before(value)))


class Layers(nn.Module):
    """Two layers, a norm and a head."""

    def __init__(self, dtype: torch.dtype, norm: torch.dtype, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [Block(dtype, norm, (5, 3), (1,), (7,)), Block(dtype, norm, (101,), (3, 2, 2), (8, 4))]
        )
        self.norm, self.head = Linear(norm, (6,)), Linear(dtype, (9, 2))
        self.checkpointed = checkpointed

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = checkpoint(layer, value, use_reentrant=False) if self.checkpointed else layer(value)
        return self.head(self.norm(value))

    def names(self) -> list[str]:
        return [name for name, module in self.named_modules() if isinstance(module, Linear)]


class InFunction(Block):
    """A layer that checkpoints itself, below FSDP2's hooks."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, value, use_reentrant=False)


def added(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """A sum rounded to the dtype of both."""
    with np.errstate(all="ignore"):
        return narrow(widen(first) + widen(second)) if first.dtype == np.uint16 else first + second


def mean_of_replicas(versions: list[np.ndarray]) -> np.ndarray:
    """Two replicas of shards over two ranks: an FP32 sum over each, their FP32 sum, one division, one rounding."""
    with np.errstate(all="ignore"):
        if versions[0].dtype == np.float32:
            wide = [version.astype(np.float64) for version in versions]
            return ((wide[0] + wide[1]).astype(np.float32) + (wide[2] + wide[3]).astype(np.float32)) / np.float32(4)
        wide = [widen(v) if v.dtype == np.uint16 else v.astype(np.float32) for v in versions]
        total = ((wide[0] + wide[1]) + (wide[2] + wide[3])) / np.float32(4)
        return narrow(total) if versions[0].dtype == np.uint16 else total.astype(np.float16)


def draw(model: Layers, seed: int) -> list[list[np.ndarray]]:
    """New factors for every parameter; what all ranks have, in the order of parameters."""
    rank, ranks, every = dist.get_rank(), dist.get_world_size(), []
    for module in model.modules():
        if isinstance(module, Linear):
            drawn = [gradients(w.dtype, w.shape, ranks, 100 * seed + len(every) + k) for k, w in enumerate(module.weights)]
            module.factors = [as_tensor(one[rank]) for one in drawn]
            every += drawn
    return every


def backward(model: Layers, seed: int) -> list[list[np.ndarray]]:
    every = draw(model, seed)
    model(torch.zeros((), requires_grad=True)).backward()
    return every


def compare(model: Layers, expected: list[np.ndarray], where: str) -> None:
    for (name, param), wanted in zip(model.named_parameters(), expected, strict=True):
        assert agrees(param.grad.full_tensor(), wanted), f"{where}: {name} on rank {dist.get_rank()}"


def check_case(name: str, model: Layers, definition=mean, mesh=None, policy: MixedPrecisionPolicy | None = None) -> None:
    """Steps of one backward; two micro-batches summed before, or after the reduction; one more step."""
    options = {"mesh": mesh or init_device_mesh("cpu", (dist.get_world_size(),))}
    options |= {"mp_policy": policy} if policy else {}
    grouped = shard_fp32_parameters(model, **options)
    wanted = [f"{n}.weights" for n in model.names() if "before" in n or "after" in n or n == "norm"]
    dtypes = {param.dtype for param in model.parameters()}
    assert grouped == (wanted if len(dtypes) == 2 else []), grouped
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    scratch = reduce_scatter_in_fp32(model)
    where = f"{name} on {dist.get_world_size()} ranks"
    for step in range(3):
        compare(model, [definition(one) for one in backward(model, step)], f"{where}, step {step}")
        model.zero_grad()
    held = scratch.nbytes

    model.set_requires_gradient_sync(False)
    first = backward(model, 10)
    assert all(param.grad is None for param in model.parameters())
    model.set_requires_gradient_sync(True)
    second = backward(model, 11)
    sums = [[added(a, b) for a, b in zip(*both, strict=True)] for both in zip(first, second, strict=True)]
    compare(model, [definition(one) for one in sums], f"{where}, micro-batches summed before")

    third = backward(model, 12)
    both = [added(definition(a), definition(b)) for a, b in zip(sums, third, strict=True)]
    compare(model, both, f"{where}, micro-batches summed after")
    assert scratch.nbytes == held <= largest_groups(model, options["mesh"].size(-1)), where


def largest_groups(model: Layers, ranks: int) -> int:
    """Bytes of the largest group of modules of each dtype, with shards padded to one size."""
    kinds: dict[torch.dtype, list[int]] = {}
    groups = [layer.main for layer in model.layers] + [model.head]
    rest = [module for name, module in model.named_modules() if name in model.names() and module not in groups]
    mixed = len({param.dtype for param in model.parameters()}) == 2
    for group in [[one] for one in groups] + [rest] if mixed else [[model]]:
        params = [param for module in group for param in module.parameters()]
        size = sum(-(-p.shape[0] // ranks) * ranks * p[0].numel() if p.dim() else 0 for p in map(torch.empty_like, params))
        kinds.setdefault(params[0].dtype, []).append(size * params[0].dtype.itemsize)
    return sum(map(max, kinds.values()))


def check() -> None:
    check_case("BF16", Layers(BF16, BF16))
    check_case("norms", Layers(BF16, FP32))
    check_case("norms, reduced in FP32", Layers(BF16, FP32), policy=WIDE)
    check_case("checkpointed layers", Layers(BF16, FP32, checkpointed=True))
    model = Layers(BF16, FP32)
    for layer in model.layers:
        layer.__class__ = InFunction
    check_case("checkpointed inside layers", model)
    check_case("FP16", Layers(FP16, FP32), policy=WIDE)
    if dist.get_world_size() == 4:
        square = partial(check_case, definition=mean_of_replicas, mesh=init_device_mesh("cpu", (2, 2)), policy=WIDE)
        square("replicas", Layers(BF16, FP32))
        square("replicas in FP16", Layers(FP16, FP16))
        square("replicas, checkpointed", Layers(BF16, FP32, checkpointed=True))
        check_refusals()
    if dist.get_rank() == 0:
        print(f"FSDP2 agrees on {dist.get_world_size()} ranks", flush=True)


if __name__ == "__main__":
    run_worlds(check, map(int, sys.argv[1:]))
