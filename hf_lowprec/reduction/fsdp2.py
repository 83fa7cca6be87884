"""FSDP2 (`fully_shard`): reduce-scatter that sums in FP32, and groups of one dtype each.

FSDP2 lays out a group's gradients so that part `r` belongs to rank `r`; an all-to-all brings every rank all versions of
its part. With `MixedPrecisionPolicy(reduce_dtype=torch.float32)` FSDP2 hands over and takes FP32 values: it uses that
for sums over micro-batches, and here also for replicas of shards (HSDP), whose all-reduce is FSDP2's own. They are
rounded to the parameters' dtype before the wire, and nowhere else until the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from hf_lowprec.reduction.lost_ranks import exchanging
from hf_lowprec.reduction.mean import mean_in_rank_order
from hf_lowprec.reduction.scratch import Scratch
from hf_lowprec.rounding import dtype_name


class FP32ReduceScatter:
    """What `FSDPModule.set_custom_reduce_scatter` takes.

    Args:
        wire: dtype in which gradients travel: that of the parameters.
        scratch: memory to receive in; modules share it.
        native_follows: FSDP2 goes on computing with the result, so it must be FP32.
    """

    def __init__(self, wire: torch.dtype, scratch: Scratch, native_follows: bool) -> None:
        self.wire = wire
        self.scratch = scratch
        self.native_follows = native_follows

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what FSDP2 sends and receives."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """`output_tensor = Σ_ranks fp32(part of input_tensor)`, divided by their number if `op` is `AVG`.

        Raises:
            RuntimeError: FSDP2 would round again what it gets, or asks for another operation.
        """
        ranks = group.size()
        if self.native_follows and input_tensor.dtype != torch.float32:
            raise RuntimeError(
                "FP16 gradients and shards with replicas (HSDP) need "
                "fully_shard(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))"
            )
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise RuntimeError(
                f"the reduce operation {op} (of set_gradient_divide_factor) is not supported: use SUM or AVG"
            )
        sent = input_tensor.to(self.wire)
        received = self.scratch("received", sent.numel(), sent)
        with exchanging(group):
            dist.all_to_all_single(received, sent, group=group)
        mean_in_rank_order(received.view(ranks, -1), ranks if op == dist.ReduceOp.AVG else 1, output_tensor)


def reduce_scatter_in_fp32(model: nn.Module) -> Scratch:
    """Let every FSDP2 module in `model` sum its gradients in FP32; call it after the last `fully_shard`.

    Args:
        model: a model to which `fully_shard` was applied. HSDP and FP16 parameters need
            `mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)` there.

    Returns:
        The scratch memory, as large as the largest group of modules.
    """
    scratch = Scratch()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Those that are no DTensors were named in `ignored_params`.
            own = [param for param in _own_parameters(module) if param.requires_grad and isinstance(param, DTensor)]
            if not own:
                continue
            replicated = own[0].device_mesh.ndim > 1
            wire = own[0].dtype
            comm = FP32ReduceScatter(wire, scratch, replicated or wire == torch.float16)
            module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]
    return scratch


def shard_fp32_parameters(model: nn.Module, **options: Any) -> list[str]:
    """Shard the FP32 modules of a 16-bit model as one group; call it before the first `fully_shard`.

    Args:
        model: a model without sharded modules.
        options: the keyword arguments of your `fully_shard` calls, such as `mesh`.

    Returns:
        The names of the modules; empty if all trainable parameters have one dtype.

    Raises:
        ValueError: a module itself holds trainable FP32 parameters, and others in 16 bits, itself or below.
    """
    found = fp32_modules(model)
    shard_together(found.values(), **options)
    return list(found)


def fp32_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with FP32 parameters that FSDP2 must shard apart from the others, by name.

    FSDP2 wants one dtype per group of modules, and a layer with its norms would be a group of two. What is sharded
    already has a group, and is left out.

    Returns:
        The modules, some of them below others; empty if all trainable parameters have one dtype.

    Raises:
        ValueError: a module holds trainable FP32 parameters itself and others in 16 bits, itself or below.
    """
    found: dict[str, nn.Module] = {}
    dtypes: set[torch.dtype] = set()
    sharded = {below for module in model.modules() if isinstance(module, FSDPModule) for below in module.modules()}
    for name, module in model.named_modules():
        if module in sharded:
            continue
        direct = {param.dtype for param in module.parameters(recurse=False) if param.requires_grad}
        dtypes |= direct
        if torch.float32 not in direct:
            continue
        params = {param: param.dtype for param in _own_parameters(module) if param.requires_grad}
        if set(params.values()) != {torch.float32}:
            names = {param: n for n, param in module.named_parameters()}
            raise ValueError(
                f"FSDP2 needs one dtype per module, and {name or type(model).__name__} has "
                + ", ".join(f"{names[p]} in {dtype_name(dtype)}" for p, dtype in params.items())
                + "; use DDP for this model"
            )
        found[name] = module
    return found if len(dtypes) > 1 else {}


def shard_together(modules: Iterable[nn.Module], **options: Any) -> None:
    """Shard `modules` as one group that stays gathered between forward and backward: they are small.

    Args:
        modules: those of `fp32_modules`.
        options: what `fully_shard` takes.
    """
    group = list(modules)
    if group:
        fully_shard(group, **{**options, "reshard_after_forward": False})


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters below `module` that no FSDP2 module below it has."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)
