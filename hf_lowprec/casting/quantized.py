"""Quantized data and its scales, which only the quantizer may change: a cast leaves them as they are."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hf_lowprec.casting.module_tree import ModelTensor

# Not every floating dtype: 8-bit and 4-bit floats are a quantizer's storage.
CASTABLE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PLAIN_CLASSES = (Tensor, nn.Parameter, nn.UninitializedParameter, nn.UninitializedBuffer)
_INDEX_DTYPES = (torch.int64, torch.bool)  # indices, counters and masks
_BIAS = "bias"  # added in the activations' dtype, after the quantized weight was used


def is_quantized(tensor: Tensor) -> bool:
    """Return whether `tensor` holds quantized data, by its class (a quantizer's) or dtype (no floats or indices).

    For a DTensor, the class of its shard counts.
    """
    tensor = _shard(tensor)
    if type(tensor) not in _PLAIN_CLASSES or type(tensor.data) is not Tensor:
        return True
    if type(tensor) is Tensor and tensor.dim() < 2:
        return False  # an index: quantized data fills a matrix
    return tensor.dtype not in (*CASTABLE_DTYPES, *_INDEX_DTYPES) and not tensor.dtype.is_complex


def acts_as_fp32(tensor: Tensor) -> bool:
    """Return whether `tensor` is quantized and acts as FP32 in operations, whose other inputs must then be FP32."""
    return type(_shard(tensor).data) is not Tensor and tensor.dtype == torch.float32


def _shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, and other tensors as they are."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[attr-defined, no-any-return]


def holds_quantized_weights(module: nn.Module) -> bool:
    """Return whether the weights of `module` itself are quantized.

    They are parameters with quantized data; or, in a module without children and without a plain `weight`, buffers
    with quantized data alongside floating ones (scales).
    """
    if any(map(is_quantized, module.parameters(recurse=False))):
        return True
    buffers = list(module.buffers(recurse=False))
    has_scales = any(buffer.is_floating_point() and not is_quantized(buffer) for buffer in buffers)
    has_plain_weight = module._parameters.get("weight") is not None
    return has_scales and not has_plain_weight and not module._modules and any(map(is_quantized, buffers))


def frozen_tensors(tensors: Iterable[ModelTensor]) -> dict[str, str]:
    """Return the tensors that a cast must leave as they are, by name, and what each one is.

    These are all tensors that are not plain floats of 16 to 64 bits, and everything but biases in modules with
    quantized data: rounding scales and offsets would change every weight. A module with a plain `weight` counts as not
    quantized.
    """
    tensors = list(tensors)
    plain, quantized = set[str](), set[str]()
    for target in tensors:
        if is_quantized(target.tensor):
            quantized.update(target.owners)
        else:
            plain.update(name.rpartition(".")[0] for name in target.names if name.rpartition(".")[2] == "weight")
    frozen = {}
    for target in tensors:
        tensor = target.tensor
        if is_quantized(tensor) or tensor.dtype not in CASTABLE_DTYPES:
            kind = type(tensor if isinstance(tensor, nn.Parameter) else tensor.data)
            frozen[target.name] = f"{(Tensor if kind is nn.Parameter else kind).__name__} of {tensor.dtype}"
        elif target.name.rpartition(".")[2] != _BIAS and not quantized.difference(plain).isdisjoint(target.owners):
            frozen[target.name] = f"{tensor.dtype} alongside quantized weights"
    return frozen
