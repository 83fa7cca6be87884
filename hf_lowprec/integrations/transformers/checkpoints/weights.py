"""Weights of checkpoints: they are loaded into the parameters that an optimizer holds, and their low bits are kept.

The weights of a model that transformers has sharded over a device mesh while loading it (`DistributedConfig`) go
through torch.distributed.checkpoint: each rank writes its shards into the folder that FSDP2 writes with sharded state
dicts. `optimizer_state.py` does the same with the states of the optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.constants import FSDP_MODEL_NAME
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils._pytree import tree_map

from hf_lowprec.integrations.checkpoint_files.stored_optimizer import read_optimizer
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.sharding import checkpointable, is_sharded
from hf_lowprec.optim.state.fp32_weights import keep_low_bits, low_bits_state, store_sums
from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.rounding.attached_low_bits import attach_rounded_off, note_loading

_SHARDED_WEIGHTS = f"{FSDP_MODEL_NAME}_0"

logger = logging.getLogger(__name__)


@contextmanager
def load_in_place(model: nn.Module, keeping_low_bits: bool = False) -> Iterator[None]:
    """If parameters of `model` are replaced inside, copy the new values into the old ones, and put these back.

    PEFT's `load_adapter` replaces 16-bit adapters by new FP32 parameters. An optimizer that was built earlier would
    continue with the old ones, which no longer belong to the model. A new parameter of another shape is kept.

    Args:
        model: the model.
        keeping_low_bits: keep what copying FP32 values to 16-bit parameters rounds off, for the optimizer.
    """
    before = [(owner, name, p) for owner in model.modules() for name, p in owner._parameters.items() if p is not None]
    for module in model.modules():
        note_loading(module)
    yield
    for owner, name, param in before:
        loaded = owner._parameters.get(name)
        if loaded is not None and loaded is not param and loaded.shape == param.shape:
            with torch.no_grad():
                param.copy_(loaded)
            if keeping_low_bits and param.dtype in LOW_PRECISION_DTYPES and loaded.dtype == torch.float32:
                attach_rounded_off(param, loaded.detach())
            owner._parameters[name] = param


@torch.no_grad()
def keep_low_bits_of_checkpoint(model: nn.Module, checkpoint: Path) -> int:
    """Keep the low bits of the 16-bit parameters of `model` that were loaded from FP32 tensors of `checkpoint`.

    Tensors are read one by one. Sharded parameters are left out: their low bits start at zero.

    Args:
        model: the model, with the weights of the checkpoint.
        checkpoint: a folder with `model*.safetensors`.

    Returns:
        The number of parameters that have low bits.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    count = 0
    for path in sorted(checkpoint.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys() & params.keys():
                param = params[name]
                if param.dtype not in LOW_PRECISION_DTYPES or is_sharded(param):
                    continue
                if file.get_slice(name).get_dtype() != "F32":
                    continue
                exact = file.get_tensor(name).to(param.device)
                if exact.shape == param.shape and torch.equal(exact.to(param.dtype), param):
                    count += attach_rounded_off(param, exact)
    return count


@torch.no_grad()
def load_low_bits_of_optimizer(optimizer: LowPrecisionOptimizer, path: Path) -> None:
    """Give the compensations and remainders of `optimizer` their values in a checkpoint whose weights were loaded.

    They are then kept with the parameters, as when training ends. Those of another rounding mode are converted, and
    missing ones become zero. If the file cannot be read, nothing is changed.

    Args:
        optimizer: the optimizer that has saved the checkpoint.
        path: the file of its state dict.
    """
    try:
        saved = read_optimizer(path)
    except Exception as error:  # training is over, and the weights are loaded
        logger.info("hf_lowprec: no compensations or remainders can be read from %s: %r", path, error)
        return
    groups = [group["params"] for group in optimizer.param_groups]
    if [*map(len, groups)] != [*map(len, saved.parameters)]:
        return
    for param, other in zip(chain(*groups), chain(*saved.parameters), strict=True):
        own = low_bits_state(optimizer.state.get(param, {}))
        if own is None:
            continue
        value = other.read(other.compensation).to(own.device) if other.compensation else torch.zeros_like(own)
        if value.dtype == own.dtype:
            own.copy_(value)
        else:
            store_sums(param, own, value)
    keep_low_bits(optimizer)


def save_sharded_weights(model: nn.Module, folder: Path) -> None:
    """Save the sharded weights of `model` to the checkpoint `folder`. Every rank must call it."""
    state_dict_saver.save({"model": _shards(model)}, checkpoint_id=folder / _SHARDED_WEIGHTS)


def load_sharded_weights(model: nn.Module, folder: Path) -> None:
    """Load the weights of a checkpoint into the sharded parameters of `model`. Every rank must call it."""
    state_dict_loader.load({"model": _shards(model)}, checkpoint_id=folder / _SHARDED_WEIGHTS)


def _shards(model: nn.Module) -> dict[str, Any]:
    return tree_map(checkpointable, get_model_state_dict(model))
