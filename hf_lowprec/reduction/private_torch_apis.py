"""The private attributes of torch that reductions need, each behind one function.

torch has no public API for them. `tests/reduction/test_private_torch_apis.py` fails if a version of torch removes one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

_IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"


def names_ignored_by_ddp(module: nn.Module) -> Collection[str]:
    """Return the names of the parameters and buffers below `module` that DDP was told not to synchronize."""
    return getattr(module, _IGNORED_BY_DDP, ())


def joins_ranks(model: DistributedDataParallel) -> bool:
    """Return whether `model` is in a `torch.distributed.algorithms.Join`, where ranks may run out of inputs."""
    return bool(model._join_config.enable)


def forget_comm_hooks(model: DistributedDataParallel) -> None:
    """Empty the list in which `model` records its communication hooks, so that it accepts another one."""
    model._comm_hooks.clear()


def comm_hook_states(model: DistributedDataParallel) -> list[object]:
    """Return the states of the communication hooks of `model`."""
    return [state for _, state in model._comm_hooks]


def leave_gradients_to_hook(model: DistributedDataParallel) -> None:
    """Stop `model` from copying averages to `param.grad`: its communication hook does. This cannot be undone."""
    model.reducer._set_optimizer_in_backward()  # type: ignore[attr-defined]


def reduce_scatters(module: FSDPModule) -> Iterator[tuple[Any, dist.ProcessGroup, int]]:
    """Yield the reduce-scatters of a module that FSDP2 has sharded, each with its ranks and the size of a shard."""
    for group in parameter_groups(module):
        sizes = (param.padded_sharded_param_size for param in group.fsdp_params if param.sharded_param.requires_grad)
        yield group._reduce_scatter_comm, group._reduce_scatter_process_group, sum(map(math.prod, sizes))


def replicates_shards(group: Any) -> bool:
    """Return whether FSDP2 also averages the gradients of one of its groups over replicas (HSDP).

    The mesh of a parameter does not show this: with tensor parallelism, it has two dimensions as well.
    """
    return group.mesh_info.replicate_mesh_dim is not None


def trained_parameters(group: Any) -> list[Any]:
    """Return the shards of the trainable parameters of one of FSDP2's groups."""
    return [param.sharded_param for param in group.fsdp_params if param.sharded_param.requires_grad]


def group_fp32_parameters(model: nn.Module) -> None:
    """Move FP32 parameters out of FSDP2's groups that also have trainable 16-bit ones, into groups of their own.

    FSDP2 requires one dtype per group, and looks at dtypes in the first forward pass. There is one new group for each
    set of ranks that shards parameters. It belongs to the outermost module that is sharded, so it is gathered when a
    forward pass begins, and reduced when the backward pass ends.

    Args:
        model: a model sharded by FSDP2. If it has run since, its groups have one dtype each.

    Raises:
        ValueError: this version of torch has one group per module at most.
    """
    mixed: dict[Any, list[Any]] = {}
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        for group in parameter_groups(module):
            for param in group.fsdp_params if group.is_sharded else ():
                param.reset_sharded_param()  # loading weights replaces parameters, which FSDP2 notices later
            if len({param.dtype for param in trained_parameters(group)}) > 1:
                mesh_info = group.mesh_info
                ranks = (mesh_info.shard_process_group, getattr(mesh_info, "replicate_process_group", None))
                of_ranks = mixed.setdefault((*ranks, group.gradient_divide_factor), [])
                of_ranks += [group] if group not in of_ranks else []
    root: Any = sharded[0]._get_fsdp_state() if mixed else None  # type: ignore[no-untyped-call]
    if mixed and not hasattr(root, "_fsdp_param_groups"):
        raise ValueError(
            f"torch {torch.__version__} cannot give FP32 parameters a group of their own once a model is sharded; "
            "upgrade torch to 2.12, or name their modules in DistributedConfig(fsdp_plan={…: 'free_full_weight'})"
        )
    for groups in mixed.values():
        new = copy.copy(groups[0])
        new.fsdp_params = []
        for group in groups:
            new.fsdp_params += [param for param in group.fsdp_params if param.sharded_param.dtype == torch.float32]
            group.fsdp_params = [param for param in group.fsdp_params if param not in new.fsdp_params]
        new.modules, new.post_forward_mesh_info, new._post_forward_indices = root._modules, None, []
        new._module_to_pre_save_state_dict_hook_handle, new._module_to_pre_load_state_dict_hook_handle = {}, {}
        root._fsdp_param_groups.append(new)


def set_policy(model: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Replace the policy of all FSDP2 modules in `model`."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()  # type: ignore[no-untyped-call]
            groups = parameter_groups(module)
            for owner in (group_or_param for group in groups for group_or_param in (group, *group.fsdp_params)):
                owner.mp_policy = policy
            state._mp_policy = policy
            for group in groups if state._is_root is not None else ():  # it has run, and read the former policy
                group._init_mp_dtypes()


def take_divisor(group: Any) -> float | None:
    """Take the number by which an FSDP2 group divides sums, if one was set; the group then uses the default.

    With a single rank, there is no sum, so the group continues to divide by the number.
    """
    divisor: float | None = group.gradient_divide_factor
    if divisor is None or group.mesh_info.shard_process_group.size() == 1:
        return None
    group.gradient_divide_factor, group.force_sum_reduction_for_comms = None, False
    return divisor


def reduce_scatter_of(group: Any) -> Any:
    """Return what sums the gradients of one of FSDP2's groups."""
    return group._reduce_scatter_comm


def set_reduce_scatter(group: Any, reduce_scatter: Any) -> None:
    """Set what sums the gradients of one of FSDP2's groups; torch's own function refuses modules with several."""
    group._reduce_scatter_comm = reduce_scatter


def meshes_beside(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the groups of ranks along the dimensions that a sliced `mesh` lacks; empty for an unsliced mesh.

    A tensor that is placed on a slice is replicated along them.
    """
    root = mesh._get_root_mesh()
    names, of_root = mesh.mesh_dim_names or (), root.mesh_dim_names or ()
    return [root.get_group(name) for name in of_root if name not in names] if {*names} <= {*of_root} else []


def parameter_groups(module: FSDPModule) -> list[Any]:
    """Return FSDP2's groups of the parameters that it has sharded with `module`: at most one before torch 2.12."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
