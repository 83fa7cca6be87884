"""FSDP2 (`fully_shard`): a reduce-scatter that sums in FP32, and FP32 parameters in a sharding group of their own.

FSDP2 orders a group's gradients so that shard `r` belongs to rank `r`; an all-to-all brings every rank all versions of
its shard. With `MixedPrecisionPolicy(reduce_dtype=torch.float32)` FSDP2 passes FP32 gradients in and expects FP32 out:
it uses that to sum micro-batches, and here it also serves replicas of shards (HSDP), whose all-reduce is FSDP2's own.
Such gradients are rounded to the parameters' dtype before they are sent, and nowhere else until the end.

NCCL has kernels that sum BF16 numbers in FP32, for memory that all ranks have registered ("symmetric memory"). Where
they are unavailable, it silently sums in BF16. So numbers with a known sum are reduced first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from hf_lowprec.reduction.collectives import ScratchBuffers, explain_lost_rank
from hf_lowprec.reduction.private_torch_apis import (
    group_fp32_parameters,
    parameter_groups,
    reduce_scatter_of,
    reduce_scatters,
    replicates_shards,
    set_reduce_scatter,
    take_divisor,
    trained_parameters,
)
from hf_lowprec.reduction.rank_mean import mean_in_rank_order
from hf_lowprec.rounding import dtype_name

Reduction = Literal["rank_order", "nccl"]
"""Values of the option `reduction`: how the gradients of the ranks are summed."""
_PERIOD = 4093
"""After this many elements, the numbers that `_sums_in_fp32` sends repeat. A prime, so that shards begin anywhere."""


@dataclass(eq=False)
class FP32ReduceScatter:
    """The reduce-scatter that `FSDPModule.set_custom_reduce_scatter` takes: it sums in FP32.

    Args:
        wire_dtype: dtype in which gradients are sent: the parameters' dtype.
        scratch: memory to receive in; modules share it.
        fp32_output: whether FSDP2 continues to compute with the result, which must then be FP32.
        divisor: divides sums for `ReduceOp.AVG`; None stands for the number of ranks.
    """

    wire_dtype: torch.dtype
    scratch: ScratchBuffers
    fp32_output: bool
    divisor: float | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the memory from which FSDP2 sends, and into which it receives."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write the FP32 sum over ranks of this rank's shard into `output_tensor`, divided for `AVG`.

        Args:
            output_tensor: this rank's shard of the result.
            input_tensor: this rank's gradients, the shards of all ranks one after the other.
            group: the ranks to sum over.
            op: `ReduceOp.SUM` or `ReduceOp.AVG`.
            async_op: accepted for FSDP2, which passes False.

        Raises:
            RuntimeError: FSDP2 would round the result again, or requests another operation.
        """
        ranks = group.size()
        if self.fp32_output and input_tensor.dtype != torch.float32:
            raise RuntimeError(
                "FP16 gradients and shards with replicas (HSDP) need "
                "fully_shard(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))"
            )
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise RuntimeError(
                f"the reduce operation {op} (of set_gradient_divide_factor) is not supported: use SUM or AVG"
            )
        sent = input_tensor.to(self.wire_dtype)
        received = self.scratch.get("received", sent.numel(), sent)
        with explain_lost_rank(group):
            dist.all_to_all_single(received, sent, group=group)
        divisor = self.divisor or ranks if op == dist.ReduceOp.AVG else 1
        mean_in_rank_order(received.view(ranks, -1), divisor, output_tensor)


def check_reduction(reduction: str) -> Reduction:
    """Return `reduction` if it is a `Reduction`.

    Raises:
        ValueError: it is not.
    """
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction={reduction!r} is unknown; valid are {', '.join(map(repr, get_args(Reduction)))}")
    return cast(Reduction, reduction)


def check_nccl(device_type: str) -> None:
    """Check that `reduction="nccl"` is possible for gradients on a device of this type.

    Raises:
        ValueError: it is not; the message says why.
    """
    if not hasattr(FSDPModule, "set_symm_mem_for_comm"):
        raise _not_by_nccl(f"FSDP2 of torch {torch.__version__} cannot use symmetric memory; torch 2.13 can")
    if device_type != "cuda":
        raise _not_by_nccl(f"gradients are on {device_type!r}, not on GPUs of NVIDIA")
    if dist.is_initialized() and "nccl" not in dist.get_backend_config():
        raise _not_by_nccl(f"the process group has the backend {dist.get_backend_config()}")


def _not_by_nccl(reason: str) -> ValueError:
    return ValueError(f"reduction='nccl' is impossible: {reason}; use reduction='rank_order'")


def reduce_scatter_in_fp32(model: nn.Module, reduction: Reduction = "rank_order") -> ScratchBuffers:
    """Make every FSDP2 module in `model` sum its gradients in FP32. Call it after the last `fully_shard`.

    If the model was cast after it was sharded, a group may hold FP32 and 16-bit parameters. The FP32 parameters then
    get their own group, which FSDP2 requires.

    Args:
        model: a model to which `fully_shard` was applied. HSDP and FP16 parameters need
            `mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)` in these calls.
        reduction: `"rank_order"`, or `"nccl"` for NCCL's own FP32 sums of BF16 gradients, in an order that NCCL
            chooses. The latter needs GPUs connected by NVLink and a process group with the NCCL backend. To check that
            NCCL sums in FP32, numbers with a known sum are reduced immediately.

    Returns:
        The scratch memory, as large as the largest group of modules; none for `"nccl"`.

    Raises:
        ValueError: `reduction` is unknown, or `"nccl"` is impossible. Raised on every rank.
    """
    by_nccl = check_reduction(reduction) == "nccl"
    scratch = ScratchBuffers()
    group_fp32_parameters(model)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module, group in [(owner, group) for owner in sharded for group in parameter_groups(owner)]:
        params = trained_parameters(group)
        if not params:
            continue
        dtype = params[0].dtype
        fp32_output = replicates_shards(group) or dtype == torch.float16
        if by_nccl:
            device_type = params[0].device_mesh.device_type
            check_nccl(device_type)
            if fp32_output:
                raise _not_by_nccl("FP16 gradients and shards with replicas (HSDP) would be sent in FP32")
            _let_nccl_sum(module, device_type, dtype)
            continue
        # FSDP2 divides by a number that was set (for experts) after the sum, which would round again. An earlier
        # call of this function has taken the number already.
        taken = getattr(reduce_scatter_of(group), "divisor", None)
        divisor = None if fp32_output else take_divisor(group) or taken
        set_reduce_scatter(group, FP32ReduceScatter(dtype, scratch, fp32_output, divisor))
    return scratch


def reshard_after_evaluation(model: nn.Module) -> None:
    """Let FSDP2 free all gathered parameters of `model` after each forward pass without gradients.

    By itself, it leaves some gathered for a backward pass, instead of those that optimizers and checkpoints refer to.
    """

    def reshard(model: nn.Module, *_: Any) -> None:
        if not torch.is_grad_enabled():
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    model.register_forward_hook(reshard)


def _let_nccl_sum(module: FSDPModule, device_type: str, dtype: torch.dtype) -> None:
    """Let FSDP2 communicate in symmetric memory, for which NCCL has FP32 sums.

    Raises:
        ValueError: NCCL still sums in 16 bits. Raised on every rank.
    """
    module.set_force_sum_reduction_for_comms(True)  # NCCL has no such kernel for means, and torch does not ask for one
    module.set_symm_mem_for_comm()
    for reduce_scatter, group, count in reduce_scatters(module):
        if dtype == torch.bfloat16 and not _sums_in_fp32(reduce_scatter, group, count, torch.device(device_type)):
            raise _not_by_nccl(
                f"NCCL sums {count * group.size():,} BF16 numbers over {group.size()} ranks in BF16, as it does for "
                "GPUs without NVLink between them and without GPU memory that all ranks can map"
            )


def _sums_in_fp32(reduce_scatter: Any, group: dist.ProcessGroup, count: int, device: torch.device) -> bool:
    """Return whether a reduce-scatter rounds sums of BF16 numbers only once; the answer is the same on all ranks.

    Args:
        reduce_scatter: an object as `FSDPModule.set_custom_reduce_scatter` takes it.
        group: the ranks to sum over.
        count: the elements of a shard. NCCL chooses its kernel by the size.
        device: where the gradients are.
    """
    ranks, rank = group.size(), group.rank()
    # Integers below 257 are BF16 numbers; FP32 sums of them are exact in any order.
    addends = torch.randint(257, (ranks, _PERIOD), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    repeats = -(-ranks * count // _PERIOD)
    sent = reduce_scatter.allocate((ranks * count,), dtype=torch.bfloat16, device=device)
    sent.copy_(addends[rank].bfloat16().to(device).repeat(repeats)[: ranks * count])
    received = reduce_scatter.allocate((count,), dtype=torch.bfloat16, device=device)
    reduce_scatter(output_tensor=received, input_tensor=sent, group=group, op=dist.ReduceOp.SUM)
    sums = addends.sum(0).float().bfloat16().to(device).repeat(repeats)[rank * count : (rank + 1) * count]
    agrees = (received == sums).all().int()
    dist.all_reduce(agrees, dist.ReduceOp.MIN, group=group)
    return bool(agrees)


def shard_fp32_parameters(model: nn.Module, **options: Any) -> list[str]:
    """Shard the FP32 modules of a 16-bit model as one group. Call it before the first `fully_shard`.

    Args:
        model: a model without sharded modules.
        options: the keyword arguments of your `fully_shard` calls, such as `mesh`.

    Returns:
        The names of the modules; empty if all trainable parameters have one dtype.

    Raises:
        ValueError: a module directly owns trainable FP32 parameters, and it or a submodule owns 16-bit ones.
    """
    modules = fp32_modules(model)
    shard_together(modules.values(), **options)
    return list(modules)


def fp32_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Find the modules with FP32 parameters that FSDP2 must shard separately.

    FSDP2 requires one dtype per group of modules, and a layer with its norms would be a group of two dtypes. Modules
    that are already sharded have a group and are left out.

    Returns:
        Name → module, possibly nested; empty if all trainable parameters have one dtype.

    Raises:
        ValueError: a module directly owns trainable FP32 parameters, and it or a submodule owns 16-bit ones.
    """
    modules: dict[str, nn.Module] = {}
    dtypes: set[torch.dtype] = set()
    sharded = {below for module in model.modules() if isinstance(module, FSDPModule) for below in module.modules()}
    for name, module in model.named_modules():
        if module in sharded:
            continue
        module_dtypes = {param.dtype for param in module.parameters(recurse=False) if param.requires_grad}
        dtypes |= module_dtypes
        if torch.float32 not in module_dtypes:
            continue
        params = {param: param.dtype for param in _parameters_of_group(module) if param.requires_grad}
        if set(params.values()) != {torch.float32}:
            names = {param: n for n, param in module.named_parameters()}
            raise ValueError(
                f"FSDP2 needs one dtype per module, but {name or type(model).__name__} has "
                + ", ".join(f"{names[p]} in {dtype_name(dtype)}" for p, dtype in params.items())
                + "; use DDP for this model"
            )
        modules[name] = module
    return modules if len(dtypes) > 1 else {}


def shard_together(modules: Iterable[nn.Module], **options: Any) -> None:
    """Shard `modules` as one group that, being small, stays gathered between forward and backward.

    Args:
        modules: the values of `fp32_modules`.
        options: the options of `fully_shard`.
    """
    group = list(modules)
    if group:
        fully_shard(group, **{**options, "reshard_after_forward": False})


def _parameters_of_group(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that `module` shards: all in its subtree, except those of FSDP2 modules inside it."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _parameters_of_group(child)
