"""Gradients under FSDP2 are the means of the definition: `fully_shard` itself, uneven shards, norms in FP32."""

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from hf_lowprec.reduction import reduce_scatter_in_fp32, shard_fp32_parameters
from tests.support.chosen_cases import EVERY_CASE
from tests.support.processes.ranks import on_ranks
from tests.support.reduction.numpy_reference import (
    added,
    as_tensor,
    bf16_to_fp32,
    gradients,
    mean,
    round_to_bf16,
    same_bits,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDE = MixedPrecisionPolicy(reduce_dtype=FP32)


class Linear(nn.Module):
    """Linear in its parameters, so that their gradients are `factors` exactly."""

    def __init__(self, dtype: torch.dtype, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        for k, shape in enumerate(shapes):
            self.register_parameter(f"weight{k}", nn.Parameter(torch.ones(shape, dtype=dtype)))
        self.factors: list[torch.Tensor] = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for weight, factor in zip(self.parameters(recurse=False), self.factors, strict=True):
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


class InFunction(Block):
    """A layer that checkpoints itself, below FSDP2's hooks."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, value, use_reentrant=False)


def mean_of_replicas(versions: list[np.ndarray], replicas: int = 2) -> np.ndarray:
    """Replicas of shards over two ranks: an FP32 mean over each, the mean of those in FP32, one rounding."""
    with np.errstate(all="ignore"):
        wide = [bf16_to_fp32(v) if v.dtype == np.uint16 else v.astype(np.float32) for v in versions]
        if versions[0].dtype == np.float32:
            wide = [version.astype(np.float64) for version in versions]
        means = [((one + other) / 2).astype(np.float32) for one, other in zip(wide[::2], wide[1::2], strict=True)]
        total = (means[0] + means[1]) / np.float32(replicas)
        if versions[0].dtype == np.float32:
            return total
        return round_to_bf16(total) if versions[0].dtype == np.uint16 else total.astype(np.float16)


def draw(model: Layers, seed: int) -> list[list[np.ndarray]]:
    """New factors for every parameter; what all ranks have, in the order of parameters."""
    rank, ranks, every = dist.get_rank(), dist.get_world_size(), []
    for module in model.modules():
        if isinstance(module, Linear):
            params = enumerate(module.parameters(), len(every))
            drawn = [gradients(param.dtype, param.shape, ranks, 100 * seed + k) for k, param in params]
            module.factors = [as_tensor(one[rank]) for one in drawn]
            every += drawn
    return every


def backward(model: Layers, seed: int) -> list[list[np.ndarray]]:
    every = draw(model, seed)
    model(torch.zeros((), requires_grad=True)).backward()
    return every


def compare(model: Layers, expected: list[np.ndarray], where: str) -> None:
    for (name, param), wanted in zip(model.named_parameters(), expected, strict=True):
        assert same_bits(param.grad.full_tensor(), wanted), f"{where}: {name} on rank {dist.get_rank()}"


def fp32_names(model: Layers) -> list[str]:
    return [*(f"layers.{k}.{side}" for k in range(len(model.layers)) for side in ("before", "after")), "norm"]


def check_case(
    name: str, model: Layers, definition=mean, mesh=None, policy: MixedPrecisionPolicy | None = None
) -> None:
    """Steps of one backward; two micro-batches summed before, or after the reduction; one more step."""
    options = {"mesh": mesh or init_device_mesh("cpu", (dist.get_world_size(),))}
    options |= {"mp_policy": policy} if policy else {}
    grouped = shard_fp32_parameters(model, **options)
    dtypes = {param.dtype for param in model.parameters()}
    assert grouped == (fp32_names(model) if len(dtypes) == 2 else []), grouped
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
    one_dtype = len({param.dtype for param in model.parameters()}) == 1
    norms = [module for name, module in model.named_modules() if name in fp32_names(model)]
    groups = [*([layer] if one_dtype else [layer.main] for layer in model.layers), [model.head], norms]
    groups += [[model.norm, model.head]] if one_dtype else []
    largest: dict[torch.dtype, int] = {}
    for group in groups:
        params = [param for module in group for param in module.parameters()]
        size = sum(-(-param.shape[0] // ranks) * ranks * math.prod(param.shape[1:]) for param in params)
        dtype = params[0].dtype
        largest[dtype] = max(largest.get(dtype, 0), size * dtype.itemsize)
    return sum(largest.values())


def replicated() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))


def check_beside_tensor_parallelism() -> None:
    """Two ranks hold halves of each weight, and two pairs of ranks different gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, dtype=BF16), nn.Linear(8, 4, dtype=BF16))
    inputs = torch.randn(2, 5, 6).bfloat16()
    gradients = []
    for one in inputs:
        model(one).float().square().sum().backward()
        gradients.append([param.grad.float() for param in model.parameters()])
        model.zero_grad()
    # Each output of a layer is computed on one rank, so that tensor parallelism does not round again.
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(model, mesh=mesh["data"])
    reduce_scatter_in_fp32(model)
    model(inputs[mesh["data"].get_local_rank()]).float().square().sum().backward()
    for param, one, other in zip(model.parameters(), *gradients, strict=True):
        assert torch.equal(param.grad.full_tensor(), ((one + other) / 2).bfloat16()), param.placements


def check() -> None:
    dist.init_process_group("gloo")
    if EVERY_CASE:
        check_case("norms", Layers(BF16, FP32))
        check_case("norms, reduced in FP32", Layers(BF16, FP32), policy=WIDE)
        check_case("checkpointed layers", Layers(BF16, FP32, checkpointed=True))
    if EVERY_CASE or dist.get_world_size() < 4:
        check_case("BF16", Layers(BF16, BF16))
        model = Layers(BF16, FP32)
        for layer in model.layers:
            layer.__class__ = InFunction
        check_case("checkpointed inside layers", model)
        check_case("FP16", Layers(FP16, FP32), policy=WIDE)
    if dist.get_world_size() == 4:
        square = partial(check_case, definition=mean_of_replicas, mesh=replicated(), policy=WIDE)
        check_beside_tensor_parallelism()
        square("replicas, checkpointed", Layers(BF16, FP32, checkpointed=True))
        for replicas in [Layers(BF16, FP32), Layers(FP16, FP16)] if EVERY_CASE else []:
            square("replicas", replicas)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", (2, 3, 4) if EVERY_CASE else (3, 4))
def test_sharded_gradients_are_means_in_rank_order(ranks: int) -> None:
    """HSDP's is the mean over replicas of FP32 sums."""
    on_ranks(check, ranks)
