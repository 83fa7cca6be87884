"""Keeps the low bits of a checkpoint's FP32 weights, which loading them into a cast model rounds off."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from hf_lowprec.optim.sharding import is_sharded
from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.rounding.low_bits import keep_low_bits


@torch.no_grad()
def keep_low_bits_of_checkpoint(model: nn.Module, checkpoint: Path) -> int:
    """Keep the low bits of the 16-bit parameters of `model` that were loaded from FP32 tensors of `checkpoint`.

    Tensors are read one by one. Sharded parameters are left out: they start with a dither.

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
                    count += keep_low_bits(param, exact)
    return count
