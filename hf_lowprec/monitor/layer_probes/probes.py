"""Compare a layer's computation in 16 bits with FP64, because some library kernels are wrong for a few shapes.

oneDNN's BF16 convolutions on CPUs with AMX are an example: right for most shapes, off by 100% for some, without an
error. A probe runs the forward and backward pass of one layer's computation on a small seeded input, with random
weights in the layer's shapes. The layer itself, its hooks and torch's random state are not touched.

A probe can prove a fault but not its absence, because the choice of kernel also depends on the size of the input, which
only the data determine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_lowprec.monitor.layer_probes.computations import Computation, layer_computations

TOLERANCE = 2.0**-5
"""The largest relative error of a correct layer.

Inputs, weights and output gradients are 16-bit numbers, so their products are exact in FP32. A correct kernel sums n of
them with an error of at most n·2⁻²⁴ of their absolute sum. That is nothing next to u = 2⁻⁸, the most by which rounding
the result to BF16 changes an element. Some kernels also round partial sums: one for each split of a long sum, for each
sample, for each tap of a convolution's kernel. After j of k equal parts a sum has √(j/k) of the result's norm, so k
independent roundings come to at most u·√((k+1)/2) of it: 8u covers 127. Measured on a CPU: up to 1.0u with oneDNN's
BF16 kernels, 4.1u without (instruction sets below AVX-512), where each of 128 taps is rounded.
"""

_SEED = 0x5EED


@dataclass(frozen=True)
class Probe:
    """The result of probing a layer.

    Attributes:
        layer: the layer's class and configuration.
        errors: relative error of the output and of the gradient of each input and parameter, by name.
        names: qualified names of a model's modules with this class and configuration.
    """

    layer: str
    errors: dict[str, float]
    names: tuple[str, ...] = ()

    @property
    def broken(self) -> dict[str, float]:
        """The entries of `errors` that rounding cannot explain."""
        return {name: error for name, error in self.errors.items() if not error <= TOLERANCE}  # NaN is broken

    def __str__(self) -> str:
        errors = ", ".join(f"{name} {_describe_error(error)}" for name, error in (self.broken or self.errors).items())
        return f"{self.layer}: {errors}"


def probe_layer(
    layer: nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    input_shape: tuple[int, ...] | None = None,
) -> Probe | None:
    """Compare a layer's forward and backward pass in `dtype` on `device` with FP64; None if it is not supported.

    Args:
        layer: a module that `layer_computations` supports, on any device.
        dtype: `torch.bfloat16` or `torch.float16`.
        device: the device to test.
        input_shape: shape of the input to probe with.

    Raises:
        RuntimeError: torch cannot run the layer in that dtype on that device.
    """
    runs = [relative_errors(computation, dtype, device) for computation in layer_computations(layer, input_shape)]
    if not runs:
        return None
    return Probe(describe_layer(layer), {name: _largest(errors[name] for errors in runs) for name in runs[0]})


def relative_errors(
    computation: Computation, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """The error of a computation in `dtype` on `device`, relative to FP64 on the CPU.

    Returns:
        `"output"` and `"grad_<name>"` for each tensor → the largest error among the slices of that tensor along each
        of its dimensions: root mean squares, relative to the slice's or the whole tensor's, whichever is larger. One
        wrong channel, sample or position among many therefore counts as much as if all were wrong.
    """
    generator = torch.Generator().manual_seed(_SEED)
    with torch.inference_mode(False), torch.enable_grad():
        tensors = {
            name: _normal(shape, computation.scales.get(name, 1.0), generator, dtype)
            for name, shape in computation.shapes.items()
        }
        exact = _forward_backward(computation, {name: tensor.double() for name, tensor in tensors.items()}, dtype)
        inputs = [{name: tensor.to(device) for name, tensor in tensors.items()}]
        if computation.channels_last:
            inputs.append(inputs[0] | {"input": inputs[0]["input"].movedim(1, -1).contiguous().movedim(-1, 1)})
        results = [_forward_backward(computation, tensors, dtype) for tensors in inputs]
    return {name: _largest_slice_error([result[name] for result in results], exact[name]) for name in exact}


def describe_layer(layer: nn.Module) -> str:
    """The torch class that a layer is or derives from, and its configuration."""
    classes = (c for c in type(layer).__mro__ if c.__module__.startswith("torch.nn.modules."))
    return f"{next(classes, type(layer)).__name__}({layer.extra_repr()})"


def _forward_backward(computation: Computation, tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Compute the output, and the gradient of every tensor for an output gradient whose values `dtype` can hold."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    with torch.autocast(next(iter(tensors.values())).device.type, enabled=False):
        output = computation.compute(**leaves)
        output_gradient = _normal(output.shape, 1.0, torch.Generator().manual_seed(_SEED + 1), dtype).to(output)
        gradients = torch.autograd.grad(output, list(leaves.values()), output_gradient)
    return {"output": output, **{f"grad_{name}": grad for name, grad in zip(leaves, gradients, strict=True)}}


def _normal(shape: tuple[int, ...], scale: float, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * scale).to(dtype)


def _largest_slice_error(results: Iterable[Tensor], exact: Tensor) -> float:
    """The largest relative error of any slice of any result; NaN if there is one."""
    exact = exact.detach().float()
    squares = exact.square()
    reference = _slice_means(squares).clamp(min=squares.mean())
    errors = [_slice_means((result.detach().cpu().float() - exact).square()) / reference for result in results]
    return math.sqrt(torch.stack(errors).max().item())


def _slice_means(values: Tensor) -> Tensor:
    """The means of the slices along each dimension, one dimension after the other."""
    if values.dim() < 2:
        return values.reshape(-1)
    middle = values.dim() // 2
    return torch.cat(
        (_slice_means(values.flatten(middle).mean(-1)), _slice_means(values.flatten(0, middle - 1).mean(0)))
    )


def _largest(errors: Iterable[float]) -> float:
    """The largest error; NaN if there is one."""
    values = list(errors)
    return max(values) if not any(map(math.isnan, values)) else math.nan


def _describe_error(error: float) -> str:
    return "not finite" if not math.isfinite(error) else f"off by {error:.1%}" if error < 10 else "unrelated"
