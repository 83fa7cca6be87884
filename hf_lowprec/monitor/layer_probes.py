"""Compare a layer's computation in 16 bits with FP64, because some library kernels are wrong for a few shapes.

oneDNN's BF16 convolutions on CPUs with AMX are an example: right for most shapes, off by 100% for some, without an
error. A probe runs the forward and backward pass of one layer's computation on a small seeded input, with random
weights in the layer's shapes. The layer itself, its hooks and torch's random state are not touched.

A probe can prove a fault but not its absence, because the choice of kernel also depends on the size of the input, which
only the data determine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Convolution: TypeAlias = (
    nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
)
BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm

_BATCH = 2
_ROWS = 8
"""Rows of a matrix product's input; tokens of an embedding."""
_MAX_POSITIONS = {1: 24, 2: 5, 3: 3}
"""Maximum number of kernel positions per dimension in a default input, by number of dimensions."""
_MAX_MULTIPLICATIONS = 2**22
"""Maximum number of multiplications for a convolution's default input; larger inputs get fewer kernel positions."""


@dataclass(frozen=True)
class Computation:
    """A layer's computation.

    Attributes:
        compute: a function of the tensors by name, in any floating dtype and on any device.
        shapes: the tensors' names and shapes.
        scales: the standard deviation of a tensor's values, where it is not 1.
        channels_last: whether to run it a second time with `input`'s channels last in memory, as after a transpose,
            since libraries have separate kernels for that layout.
    """

    compute: Callable[..., Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    scales: dict[str, float] = field(default_factory=dict)
    channels_last: bool = False


def layer_computations(layer: nn.Module, input_shape: tuple[int, ...] | None = None) -> list[Computation]:
    """The computations of a layer on an input of the given shape; by default, on one or two small inputs.

    Supports convolutions and transposed convolutions, `Linear`, `Embedding`, and torch's norms as `cast_model` leaves
    them (FP32 inside). For other modules, the list is empty.

    Args:
        layer: a module on any device, the meta device included.
        input_shape: shape of the input.
    """
    if isinstance(layer, Convolution):
        return _convolutions(layer, input_shape)
    if isinstance(layer, nn.Linear):
        shapes = {"input": input_shape or (_ROWS, layer.in_features), "weight": (layer.out_features, layer.in_features)}
        shapes |= {} if layer.bias is None else {"bias": (layer.out_features,)}
        return [Computation(F.linear, shapes, {"weight": layer.in_features**-0.5})]
    if isinstance(layer, nn.Embedding):
        count = layer.num_embeddings

        def embed(weight: Tensor) -> Tensor:
            tokens = torch.arange(_ROWS, device=weight.device).remainder(min(count, _ROWS - 2))  # two of them twice
            return F.embedding(tokens, weight)

        return [Computation(embed, {"weight": (count, layer.embedding_dim)})]
    return _norms(layer, input_shape)


def default_sizes(layer: Convolution) -> Iterator[tuple[int, ...]]:
    """Yield the spatial sizes of a convolution's default inputs.

    The first holds several positions of the kernel. A convolution that cuts its input into patches also gets one patch.
    """
    dims = len(layer.kernel_size)
    several = max(2, min(_MAX_POSITIONS[dims], int((_MAX_MULTIPLICATIONS / weight_count(layer)) ** (1 / dims))))
    for positions in (several, 1) if tuple(layer.kernel_size) == tuple(layer.stride) else (several,):
        if layer.transposed:
            yield (positions,) * dims
        else:
            # Padding adds positions. Even the smallest sizes are chosen so that every weight meets the input.
            spans = zip(_kernel_spans(layer), _zero_padding(layer), layer.stride, strict=True)
            yield tuple([max((positions - 1) * step + span - 2 * pad, span - pad, 1) for span, pad, step in spans])


def weight_count(layer: Convolution) -> int:
    """Elements of a convolution's weight, from its configuration."""
    return layer.in_channels * layer.out_channels // layer.groups * math.prod(layer.kernel_size)


def multiplications_per_weight(layer: Convolution, size: tuple[int, ...]) -> int:
    """The number of times that a convolution multiplies by each weight, for a batch of the given spatial size."""
    if layer.transposed:
        return _BATCH * math.prod(size)
    dims = zip(size, _kernel_spans(layer), _zero_padding(layer), layer.stride, strict=True)
    return _BATCH * math.prod((extent + 2 * pad - span) // step + 1 for extent, span, pad, step in dims)


def _convolutions(layer: Convolution, input_shape: tuple[int, ...] | None) -> list[Computation]:
    """The convolution of an input of the shape, or of the default inputs."""
    dims = len(layer.kernel_size)
    options: dict[str, Any] = {"stride": layer.stride, "dilation": layer.dilation, "groups": layer.groups}
    options["padding"] = layer.padding if layer.padding_mode == "zeros" else 0  # other modes pad before they convolve
    function: Callable[..., Tensor]
    if layer.transposed:
        options["output_padding"] = layer.output_padding
        function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
        channels = layer.in_channels, layer.out_channels // layer.groups
    else:
        function = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
        channels = layer.out_channels, layer.in_channels // layer.groups
    weight = (*channels, *layer.kernel_size)
    shapes = {"weight": weight} | ({} if layer.bias is None else {"bias": (layer.out_channels,)})
    inputs = [input_shape] if input_shape else [(_BATCH, layer.in_channels, *size) for size in default_sizes(layer)]
    return [
        Computation(
            lambda **tensors: function(**tensors, **options),
            {"input": shape} | shapes,
            {"weight": math.prod(weight[1:]) ** -0.5},
            channels_last=True,
        )
        for shape in inputs
    ]


def _kernel_spans(layer: Convolution) -> list[int]:
    """Extents of the kernel with its dilation."""
    return [gap * (size - 1) + 1 for size, gap in zip(layer.kernel_size, layer.dilation, strict=True)]


def _zero_padding(layer: Convolution) -> list[int]:
    """The number of zeros that the convolution itself adds on each side."""
    if layer.padding_mode != "zeros" or layer.padding == "valid":
        return [0] * len(layer.kernel_size)
    return [span // 2 for span in _kernel_spans(layer)] if isinstance(layer.padding, str) else list(layer.padding)


def _norms(layer: nn.Module, input_shape: tuple[int, ...] | None) -> list[Computation]:
    """The computation of one of torch's norms; empty for any other module."""
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        function = F.layer_norm if isinstance(layer, nn.LayerNorm) else F.rms_norm
        shape = tuple(layer.normalized_shape)
        return [_norm(layer, function, (shape,), input_shape or (_ROWS, *shape), shape)]
    if isinstance(layer, nn.GroupNorm):
        size = input_shape or (_BATCH, layer.num_channels, _ROWS)
        return [_norm(layer, F.group_norm, (layer.num_groups,), size, (layer.num_channels,))]
    if isinstance(layer, BatchNorm):
        return [_norm(layer, _batch_norm, (), input_shape or (_ROWS, layer.num_features, _ROWS), (layer.num_features,))]
    return []


def _norm(
    layer: nn.Module,
    function: Callable[..., Tensor],
    settings: tuple[Any, ...],
    input_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
) -> Computation:
    """The computation `function(input, *settings, weight=, bias=)` in FP32 or wider, as between the cast's hooks."""
    shapes = {name: weight_shape for name in ("weight", "bias") if getattr(layer, name, None) is not None}

    def compute(input: Tensor, **weights: Tensor) -> Tensor:
        dtype = torch.promote_types(input.dtype, torch.float32)
        upcast = {name: weight.to(dtype) for name, weight in weights.items()}
        return function(input.to(dtype), *settings, **upcast).to(input.dtype)

    return Computation(compute, {"input": input_shape} | shapes)


def _batch_norm(input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return F.batch_norm(input, None, None, weight, bias, training=True)


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
