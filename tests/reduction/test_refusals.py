"""What FP32 sums under FSDP2 refuse and what they leave alone, on four ranks."""

import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from hf_lowprec.reduction import fsdp2, reduce_scatter_in_fp32, shard_fp32_parameters
from hf_lowprec.reduction.collectives import ScratchBuffers
from hf_lowprec.reduction.fsdp2 import FP32ReduceScatter
from tests.reduction.test_fsdp2 import BF16, FP16, FP32, WIDE, Block, Linear, mean_of_replicas, replicated
from tests.support.processes.ranks import on_ranks
from tests.support.reduction.numpy_reference import as_tensor, gradients, mean, same_bits

SHAPES = [(333, 3), (7,)]


def refusal(kind: type[Exception], act, *parts: str) -> None:
    """`act` raises it, with all of `parts` in the message, in this order."""
    with pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, parts))):
        act()


def sharded(dtype: torch.dtype, **options) -> Linear:
    model = Linear(dtype, *SHAPES)
    fully_shard(model, **options)
    reduce_scatter_in_fp32(model)
    return model


def backward(model: Linear, seed: int = 1) -> list[list[np.ndarray]]:
    """This rank's gradients through the model; those of all ranks are returned."""
    dtype = next(model.parameters()).dtype
    every = [gradients(dtype, shape, dist.get_world_size(), seed + k) for k, shape in enumerate(SHAPES)]
    model.factors = [as_tensor(one[dist.get_rank()]) for one in every]
    model.zero_grad()
    model(torch.zeros((), requires_grad=True)).backward()
    return every


def check_rounding_twice_is_refused() -> None:
    advice = "fully_shard(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))"
    refusal(RuntimeError, lambda: backward(sharded(BF16, mesh=replicated())), "HSDP", advice)
    refusal(RuntimeError, lambda: backward(sharded(FP16)), "FP16", advice)
    refusal(RuntimeError, lambda: backward(sharded(FP16, mesh=replicated())), advice)
    backward(sharded(BF16, mesh=replicated(), mp_policy=WIDE))


def check_divisors() -> None:
    """`set_gradient_divide_factor`: the number of ranks that share a gradient; others mean factors before the sum."""
    model = sharded(BF16)
    model.set_gradient_divide_factor(4.0)
    for param, every in zip(model.parameters(), backward(model), strict=True):
        assert same_bits(param.grad.full_tensor(), mean(every))
    model.set_gradient_divide_factor(2.5)
    refusal(RuntimeError, lambda: backward(model), "set_gradient_divide_factor", "not supported", "SUM or AVG")

    model = sharded(BF16, mesh=replicated(), mp_policy=WIDE)
    model.set_gradient_divide_factor(2.0)
    for param, every in zip(model.parameters(), backward(model), strict=True):
        assert same_bits(param.grad.full_tensor(), mean_of_replicas(every, replicas=1))
    model.set_gradient_divide_factor(1.0)
    refusal(RuntimeError, lambda: backward(model), "set_gradient_divide_factor", "not supported", "SUM or AVG")


class Mixed(nn.Module):
    """A module that holds parameters of both kinds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.matrix = nn.Parameter(torch.ones(4, 4, dtype=BF16))


def check_both_dtypes_in_a_module_are_refused() -> None:
    model = nn.ModuleDict({"layer": Mixed(), "norm": Linear(FP32, (4,))})
    refusal(
        ValueError, lambda: shard_fp32_parameters(model), "layer", "gain in float32", "matrix in bfloat16", "use DDP"
    )
    refusal(ValueError, lambda: shard_fp32_parameters(Mixed()), "Mixed has gain in float32")
    assert not any(isinstance(module, FSDPModule) for module in model.modules()), "sharded in part"


def check_frozen_parameters() -> None:
    """They have no gradient, so their dtype does not matter; the rest is reduced as ever."""
    model = Block(BF16, FP32, *SHAPES)
    for name, param in model.named_parameters():
        param.requires_grad_("main" in name)
    assert shard_fp32_parameters(model) == []
    fully_shard(model)
    reduce_scatter_in_fp32(model)
    every = [gradients(BF16, shape, 4, k) for k, shape in enumerate(SHAPES)]
    model.main.factors = [as_tensor(one[dist.get_rank()]) for one in every]
    for norm in (model.before, model.after):
        norm.factors = [torch.zeros(param.shape) for param in norm.parameters()]
    model(torch.zeros((), requires_grad=True)).backward()
    for param, wanted in zip(model.main.parameters(), every, strict=True):
        assert same_bits(param.grad.full_tensor(), mean(wanted))
    assert all(param.grad is None for param in (*model.before.parameters(), *model.after.parameters()))


class Gated(Linear):
    """An FP32 parameter of its own above a layer in BF16, as a mixer with an FP32 decay has."""

    def __init__(self) -> None:
        super().__init__(FP32, (6,))
        self.inner = Linear(BF16, *SHAPES)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(self.inner(value))


def check_an_fp32_parameter_above_a_16_bit_layer() -> None:
    """Both are reduced by their definition, or the module is refused as one of both kinds is."""
    model = nn.Sequential(Gated(), Linear(BF16, (3,)))
    try:
        shard_fp32_parameters(model)
    except ValueError as error:
        assert "0" in str(error), error
        return
    fully_shard(model)
    reduce_scatter_in_fp32(model)
    every = []
    for number, module in enumerate((model[0], model[0].inner, model[1])):
        params = list(module.parameters(recurse=False))
        drawn = [gradients(p.dtype, tuple(p.shape), 4, 10 * number + k) for k, p in enumerate(params)]
        module.factors = [as_tensor(one[dist.get_rank()]) for one in drawn]
        every += zip(params, drawn, strict=True)
    model(torch.zeros((), requires_grad=True)).backward()
    for param, wanted in every:
        assert same_bits(param.grad.full_tensor(), mean(wanted))


def check_norms_stay_gathered() -> None:
    """From forward to backward, whatever is asked for the other modules; afterwards all are shards again."""
    model = Block(BF16, FP32, *SHAPES)
    options = {"reshard_after_forward": True}
    assert shard_fp32_parameters(model, **options) == ["before", "after"]
    fully_shard(model.main, **options)
    fully_shard(model, **options)
    reduce_scatter_in_fp32(model)
    for module in (model.before, model.main, model.after):
        module.factors = [torch.ones(param.shape, dtype=param.dtype) for param in module.parameters()]
    loss = model(torch.zeros((), requires_grad=True))
    gathered = {name: not isinstance(param, DTensor) for name, param in model.named_parameters()}
    assert all(held == ("main" not in name) for name, held in gathered.items()), gathered
    loss.backward()
    assert all(isinstance(param, DTensor) for param in model.parameters())


def check_large_equal_gradients_of_replicas() -> None:
    """The mean of equal ones is exact, also where the sum over all four would overflow FP32."""
    model = sharded(BF16, mesh=replicated(), mp_policy=WIDE)
    model.factors = [torch.full(shape, 1.5e38, dtype=BF16) for shape in SHAPES]
    model(torch.zeros((), requires_grad=True)).backward()
    for param, factor in zip(model.parameters(), model.factors, strict=True):
        assert torch.equal(param.grad.full_tensor(), factor)


def mean_of_rounded_sum(versions: list[np.ndarray]) -> np.ndarray:
    """The sum is rounded before FSDP2 divides it, which matters for subnormal results and where the sum overflows."""
    return mean([mean(versions, 1)], len(versions))


class OfSums(FP32ReduceScatter):
    """Computes no means, as NCCL's kernels do not."""

    def __init__(self) -> None:
        super().__init__(BF16, ScratchBuffers(), fp32_output=False)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False) -> None:
        assert op == dist.ReduceOp.SUM, op
        self.wire_dtype = input_tensor.dtype
        super().__call__(output_tensor, input_tensor, group, op)


def check_sums_by_nccl() -> None:
    """gloo stands for NCCL: it sums in BF16, which is noticed, and then in FP32, as NCCL does over NVLink."""
    fsdp2.check_nccl = lambda device_type: None
    FSDPModule.set_symm_mem_for_comm = lambda module: None

    def by_nccl(model: Linear, **options) -> Linear:
        fully_shard(model, **options)
        reduce_scatter_in_fp32(model, "nccl")
        return model

    refusal(ValueError, lambda: by_nccl(Linear(BF16, *SHAPES)), "reduction='nccl'", "1,016 BF16 numbers over 4 ranks")
    by_nccl(Linear(FP32, *SHAPES))  # it sums FP32 numbers in FP32
    FSDPModule.set_symm_mem_for_comm = lambda module: module.set_custom_reduce_scatter(OfSums())
    model = Linear(BF16, *SHAPES)
    with torch.device("meta"):  # the default device does not matter
        by_nccl(model)
    for param, every in zip(model.parameters(), backward(model), strict=True):
        assert same_bits(param.grad.full_tensor(), mean_of_rounded_sum(every))
    for refused in ({"mesh": replicated(), "mp_policy": WIDE}, {"mesh": replicated()}):
        refusal(ValueError, lambda options=refused: by_nccl(Linear(BF16, *SHAPES), **options), "HSDP", "rank_order")
    refusal(ValueError, lambda: by_nccl(Linear(FP16, *SHAPES)), "FP16", "rank_order")


def check() -> None:
    dist.init_process_group("gloo")
    for name, each in list(globals().items()):
        if name.startswith("check_"):
            each()


@pytest.mark.slow
@pytest.mark.distributed
def test_what_would_round_twice_is_refused() -> None:
    on_ranks(check, 4)
