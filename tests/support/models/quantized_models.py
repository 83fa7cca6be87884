"""Stand-ins for the three kinds of quantized weights, which need no quantizer's package.

- Data and scales in buffers of a module of their own (GPTQ, AWQ, EETQ, FP8).
- Data in a `Parameter` subclass (bitsandbytes).
- A tensor subclass that takes part in operations as if it were floating (torchao, quanto).

All hold one signed byte per weight and one scale per row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`(codes, scale)`: int8 of `weight`'s shape, and FP32 of shape `[rows, 1]`."""
    scale = weight.detach().float().abs().amax(dim=1, keepdim=True) / 127
    return (weight.detach().float() / scale).round().to(torch.int8), scale


class Int8Linear(nn.Linear):
    """Codes and scales as buffers; computes in the format of its input. A linear, so that PEFT takes it for one."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, scale = quantize(linear.weight)
        self.register_buffer("qweight", codes)
        self.register_buffer("scales", scale)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        return self.qweight.float() * self.scales

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, self.weight.to(inputs.dtype), self.bias)


class Codes(nn.Parameter):
    """Bytes that are typed as floats, as bitsandbytes' `quant_storage` has it."""


class StoredLinear(Int8Linear):
    """Codes in a `Parameter` subclass, four to an FP32 element."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        packed = torch.Tensor._make_subclass(Codes, self._buffers.pop("qweight").view(torch.float32), False)
        self.register_parameter("qweight", packed)

    @property
    def weight(self) -> Tensor:
        return self.qweight.data.view(torch.int8).float() * self.scales


class Int8Weight(Tensor):
    """A wrapper subclass: looks like a tensor of `dtype`, stores bytes."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Int8Weight:
        wrapper = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)
        wrapper.codes, wrapper.scale = codes, scale
        return wrapper

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.dtype

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].dtype)
        values = [(a.codes.float() * a.scale).to(a.dtype) if isinstance(a, cls) else a for a in args]
        return func(*values, **(kwargs or {}))


def subclassed(linear: nn.Linear, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """`linear` with an `Int8Weight` that presents itself as `dtype`."""
    linear.weight = nn.Parameter(Int8Weight(*quantize(linear.weight), dtype), requires_grad=False)
    return linear


def quantize_linears(model: nn.Module, how: Any = Int8Linear, skip: str = "lm_head") -> nn.Module:
    """Replace every linear of `model` but `skip` in place, and freeze all the rest."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and not name.endswith(skip):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], how(module))
    return model.requires_grad_(False)
