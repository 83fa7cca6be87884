"""The only module that uses private names of accelerate, or replaces names in the libraries that it calls.

Each has a test in `tests/integrations/test_private_apis.py` that fails when a new version of the library removes it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed.fsdp
from accelerate.utils.fsdp_utils import get_parameters_from_modules
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_lowprec.optim.param_groups import unwrap_optimizer
from hf_lowprec.wrapped_method import temporarily_wrapped

_PREPARED = "_is_accelerate_prepared"
"""The attribute by which accelerate marks a model that it has prepared."""
_AVERAGED = "_replicated_grad_hook_registered"
"""The attribute by which Trainer marks a replicated parameter that has a hook for its gradient."""


@contextmanager
def before_fully_shard(first: Callable[[dict[str, Any]], Collection[nn.Module]]) -> Iterator[None]:
    """Call `first` just before the first `fully_shard` inside, with the options of that call.

    Accelerate chooses the options and the time, and may have moved the model to the meta device by then. It looks up
    `fully_shard` in `torch.distributed.fsdp` when it shards a model, so the function is replaced there.

    Args:
        first: a function that shards some modules itself and returns them. They are left out of accelerate's calls,
            which were planned earlier and would shard them again.

    Raises:
        RuntimeError: no `fully_shard` ran inside.
    """
    sharded: Collection[nn.Module] | None = None

    def fully_shard(original: Callable, module: Any, **options: Any) -> Any:
        nonlocal sharded
        if sharded is None:
            sharded = first(options)
        if isinstance(module, nn.Module):
            return module if module in sharded else original(module, **options)
        unsharded = [one for one in module if one not in sharded]
        if unsharded:
            original(unsharded, **options)
        return module

    with temporarily_wrapped(torch.distributed.fsdp, "fully_shard", fully_shard):
        yield
    if sharded is None:
        raise RuntimeError("this version of accelerate shards a model without torch.distributed.fsdp.fully_shard")


def is_sharded_model(model: nn.Module) -> bool:
    """Return whether FSDP2 has sharded `model` as a whole. Accelerate returns such a model unchanged."""
    return isinstance(getattr(model, "_orig_mod", model), FSDPModule) or isinstance(model, FSDPModule)


def is_sharded_at_load(model: Any) -> bool:
    """Return whether transformers has sharded `model` while loading it (`from_pretrained(distributed_config=…)`)."""
    return bool(getattr(model, "is_distributed_loading_by_transformers", False))


def trains_on_several_ranks(num_processes: int, models: list[Any]) -> bool:
    """Return whether `models` are trained on several ranks.

    Args:
        num_processes: the number of processes that accelerate knows. On a CPU, it may know only one of the processes
            over which transformers has sharded a model.
        models: the models.
    """
    return num_processes > 1 or (any(map(is_sharded_at_load, models)) and torch.distributed.get_world_size() > 1)


def replicated_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters that every rank holds in full, of a model sharded at load.

    Trainer averages their gradients by a hook, in their own dtype, unless they are marked. This function marks them.
    """
    params = [param for param in model.parameters() if param.requires_grad and not isinstance(param, DTensor)]
    unmarked = [param for param in params if not hasattr(param, _AVERAGED)]
    for param in unmarked:
        setattr(param, _AVERAGED, True)
    return unmarked


def partial_gradients(model: nn.Module) -> Iterator[tuple[nn.Module, Any, Callable]]:
    """Yield the modules whose gradients transformers sums over the ranks of tensor parallelism, by hooks of `forward`.

    The hooks sum what micro-batches have accumulated so far, so earlier micro-batches are summed again.

    Yields:
        The module, the ranks, and its `forward` without these hooks.
    """
    for module in model.modules():
        forward: Any = vars(module).get("forward")
        if getattr(forward, "__qualname__", "").startswith("ReplicatedWithGradAllReduce."):
            captured = inspect.getclosurevars(forward).nonlocals
            mesh = inspect.getclosurevars(captured["_all_reduce_grad"]).nonlocals["mesh"]
            yield module, mesh.get_group(), captured["original_forward"]


def switch_autocast_off(accelerator: Any) -> bool:
    """Set the mixed precision of `accelerator` to "no", and return whether this changed it.

    From then on, it has its own state and FSDP plugin, which all accelerators share otherwise.
    """
    was_on = accelerator.mixed_precision != "no"
    accelerator.state = copy.copy(accelerator.state)
    accelerator.state._mixed_precision = "no"
    accelerator.native_amp = False
    if (plugin := getattr(accelerator.state, "fsdp_plugin", None)) is not None:
        accelerator.state.fsdp_plugin = copy.copy(plugin)
        accelerator.state.fsdp_plugin.mixed_precision_policy = None
    return was_on


def prepared_models(accelerator: Any) -> list[Any]:
    """Return accelerate's own, growing list of the models that it has prepared, even those only for evaluation.

    A model wrapped by DDP is listed without its wrapper. FSDP2 shards in place.
    """
    return accelerator._models


def prepared_optimizers(accelerator: Any) -> list[Any]:
    """Return the optimizers that `accelerator` has prepared, without accelerate's wrappers."""
    return [unwrap_optimizer(optimizer) for optimizer in accelerator._optimizers]


def ignored_by_fsdp2(accelerator: Any, model: nn.Module) -> Collection[nn.Parameter]:
    """Return the parameters of `model` that FSDP2 will not shard, by the `ignored_modules` of accelerate's plugin."""
    return get_parameters_from_modules(accelerator.state.fsdp_plugin.ignored_modules, model, accelerator.device)


@contextmanager
def without_prepared_mark(model: Any) -> Iterator[None]:
    """Allow `model` to be prepared for training after it was prepared inside for evaluation.

    Accelerate marks every model that it prepares, even one for evaluation only, and returns marked models unchanged.
    After `Trainer.evaluate()`, `Trainer.train()` would get a model without DDP, and every process would train alone.
    """
    marked_before = getattr(model, _PREPARED, False)
    try:
        yield
    finally:
        if not marked_before:
            vars(model).pop(_PREPARED, None)
