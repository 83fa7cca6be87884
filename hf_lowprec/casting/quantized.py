"""Weights in a quantizer's format: codes that are no numbers, and what belongs to them. Only the quantizer may change
either."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from hf_lowprec.casting.policy import Owners

# Not every floating dtype: 8-bit and 4-bit floats are a quantizer's storage.
CASTABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (Tensor, nn.Parameter, nn.UninitializedParameter, nn.UninitializedBuffer)
_COUNTS = (torch.int64, torch.bool)  # indices, counters and masks
_BIAS = "bias"  # added in the activations' format, after the codes were used


def is_quantized(tensor: Tensor) -> bool:
    """Whether `tensor` holds a quantizer's codes: a subclass of its own, or numbers that are narrower than indices and
    no 16-bit floats."""
    if type(tensor) not in _PLAIN or type(tensor.data) is not Tensor:
        return True
    if type(tensor) is Tensor and tensor.dim() < 2:
        return False  # an index; codes fill a matrix
    return tensor.dtype not in (*CASTABLE, *_COUNTS) and not tensor.dtype.is_complex


def presents_float32(tensor: Tensor) -> bool:
    """Whether `tensor` stores codes and takes part in operations as if it were FP32: so must their other inputs."""
    return type(tensor.data) is not Tensor and tensor.dtype == torch.float32


def holds_codes(module: nn.Module) -> bool:
    """Whether the weights of `module` are codes: its own parameters, or buffers of a childless module with floating
    ones (scales) beside them."""
    buffers = list(module.buffers(recurse=False))
    if any(map(is_quantized, module.parameters(recurse=False))):
        return True
    beside = any(buffer.is_floating_point() and not is_quantized(buffer) for buffer in buffers)
    plain = module._parameters.get("weight") is not None
    return beside and not plain and not module._modules and any(map(is_quantized, buffers))


def untouchable(owners: Owners) -> dict[int, str]:
    """What a cast must leave as it is: id of the tensor -> what it is.

    Tensors that are not plain floats of 16 to 64 bits, and those that lie beside codes in one module, biases aside:
    they scale and shift the codes, so rounding them would change every weight. A module with a plain `weight` has no
    codes for one.
    """
    found = {}
    owned = [owner for group in owners.values() for owner in group]
    plain = {path for path, name, t in owned if name.rpartition(".")[2] == "weight" and not is_quantized(t)}
    coded = {path for path, _, tensor in owned if is_quantized(tensor)} - plain
    for key, group in owners.items():
        _, name, tensor = group[0]
        if is_quantized(tensor) or tensor.dtype not in CASTABLE:
            kind = type(tensor if isinstance(tensor, nn.Parameter) else tensor.data)
            found[key] = f"{(Tensor if kind is nn.Parameter else kind).__name__} of {tensor.dtype}"
        elif name.rpartition(".")[2] != _BIAS and any(path in coded for path, *_ in group):
            found[key] = f"{tensor.dtype} beside quantized weights"
    return found
