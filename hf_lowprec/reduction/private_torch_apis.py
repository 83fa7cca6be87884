"""The private attributes of torch that reductions need, each behind one function.

torch has no public API for these. `tests/reduction/test_private_torch_apis.py` fails if a version of torch drops one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

_IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
_SYMMETRIC = "SymmMemReduceScatter"
"""The reduce-scatter of `FSDPModule.set_symm_mem_for_comm`, which torch 2.11 does not have."""


def names_ignored_by_ddp(module: nn.Module) -> Collection[str]:
    """Names of the parameters and buffers below `module` that DDP was told not to synchronize."""
    return getattr(module, _IGNORED_BY_DDP, ())


def forget_comm_hooks(model: DistributedDataParallel) -> None:
    """Empty the list in which `model` records its communication hooks, so that it accepts another one."""
    model._comm_hooks.clear()


def comm_hook_states(model: DistributedDataParallel) -> list[object]:
    """The states of the communication hooks of `model`."""
    return [state for _, state in model._comm_hooks]


def leave_gradients_to_hook(model: DistributedDataParallel) -> None:
    """Make `model` copy no averages from its buckets to `param.grad`: its communication hook does. Cannot be undone."""
    model.reducer._set_optimizer_in_backward()  # type: ignore[attr-defined]


def version_of(tensor: Tensor) -> int:
    """The number of times that `tensor`, or the storage that it is a view of, was changed in place."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd sees `tensor` as a view, which shares the version of its base."""
    return tensor._is_view()


def reduce_scatters_in_16_bits(module: FSDPModule) -> bool:
    """Return whether FSDP2 sums 16-bit gradients of a module that it has sharded by torch's own reduce-scatter.

    The modules inside that are sharded separately do not count.
    """
    return any(
        type(group._reduce_scatter_comm).__module__.startswith("torch.")
        and type(group._reduce_scatter_comm).__name__ != _SYMMETRIC
        and any(map(_sums_in_16_bits, group.fsdp_params))
        for group in _parameter_groups(module)
    )


def reduce_scatters(module: FSDPModule) -> Iterator[tuple[Any, dist.ProcessGroup, int]]:
    """The reduce-scatters of a module that FSDP2 has sharded: each with its ranks and the elements that it leaves."""
    for group in _parameter_groups(module):
        sizes = (param.padded_sharded_param_size for param in group.fsdp_params if param.sharded_param.requires_grad)
        yield group._reduce_scatter_comm, group._reduce_scatter_process_group, sum(map(math.prod, sizes))


def replicates_shards(module: FSDPModule) -> bool:
    """Return whether FSDP2 also averages the gradients of a module that it has sharded over replicas (HSDP).

    The mesh of a parameter does not tell: with tensor parallelism, it has two dimensions as well.
    """
    return any(group.mesh_info.replicate_mesh_dim is not None for group in _parameter_groups(module))


def _parameter_groups(module: FSDPModule) -> list[Any]:
    """FSDP2's groups of the parameters that it has sharded with `module`: one at most in torch 2.11 and before."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _sums_in_16_bits(fsdp_param: Any) -> bool:
    """Return whether FSDP2 has 16-bit gradients of a parameter to sum, and no policy to sum them in FP32."""
    param = fsdp_param.sharded_param
    trained = param.requires_grad and param.itemsize == 2 and param.device_mesh.size() > 1
    return trained and fsdp_param.mp_policy.reduce_dtype != torch.float32
