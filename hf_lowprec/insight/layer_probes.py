"""Compare what a layer computes in 16 bits with FP64: libraries have kernels that are wrong for a few shapes.

oneDNN's BF16 convolutions on CPUs with AMX are an example: right for most shapes, off by 100% for some, in silence. A
probe runs forward and backward of one layer's computation on a small seeded input. Weights are random, in the shapes
of the layer's own; the layer itself, its hooks and torch's random state stay as they are.

A probe proves a fault, not its absence: a kernel is also chosen by the size of the input, which only the data knows.
"""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from hf_lowprec.optim.sharding import is_sharded
from hf_lowprec.rounding import LOW_PRECISION_DTYPES

TOLERANCE = 2.0**-5
"""The largest relative error of a correct layer.

Inputs, weights and output gradients are numbers of 16 bits, so their products are exact in FP32. A correct kernel sums
n of them with an error of at most n·2⁻²⁴ of their absolute sum, which is nothing next to u = 2⁻⁸, by which rounding the
result to BF16 changes an element at most. Some kernels round partial sums as well: one for each split of a long sum,
for each sample, for each tap of a convolution's kernel. After j of k equal parts a sum has √(j/k) of the result's norm,
so k independent roundings come to at most u·√((k+1)/2) of it: 8u covers 127. Measured on a CPU: up to 1.0u with
oneDNN's BF16 kernels, 4.1u without (instruction sets below AVX-512), where each of 128 taps is rounded.
"""

_ISA = "ONEDNN_MAX_CPU_ISA"
_SEED = 0x5EED
_BATCH = 2
_ROWS = 8  # of a matrix product's input, tokens of an embedding
_POSITIONS = {1: 24, 2: 5, 3: 3}
"""Most kernel positions per dimension, by number of dimensions."""
_PRODUCTS = 2**22
"""Most multiplications of a probed convolution; fewer positions above it."""
_PER_WEIGHT = 256
"""Multiplications that take the time of drawing a weight and comparing its gradient; measured on a CPU."""
MAX_WORK = 5 * 2**29
"""Most multiplications of all probes of a model, with `_PER_WEIGHT`: about 0.3 seconds of a CPU core."""


@dataclass(frozen=True)
class Computation:
    """What a layer computes.

    Attributes:
        compute: a function of the tensors by name, in any floating dtype and on any device.
        shapes: the tensors' names and shapes.
        scales: the standard deviation of a tensor's values, where it is not 1.
        channels_last: whether to run it a second time with `input`'s channels last in memory, as after a transpose:
            libraries have other kernels for that.
    """

    compute: Callable[..., Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    scales: dict[str, float] = field(default_factory=dict)
    channels_last: bool = False


@dataclass(frozen=True)
class Probe:
    """What a probe found.

    Attributes:
        layer: the layer's class and configuration.
        errors: relative error of the output and of the gradient of each input and parameter, by name.
        names: qualified names of the modules that compute so.
    """

    layer: str
    errors: dict[str, float]
    names: tuple[str, ...] = ()

    @property
    def broken(self) -> dict[str, float]:
        """Those of `errors` that rounding does not explain."""
        return {name: error for name, error in self.errors.items() if not error <= TOLERANCE}  # NaN is broken

    def __str__(self) -> str:
        wrong = ", ".join(f"{name} {_percent(error)}" for name, error in (self.broken or self.errors).items())
        return f"{self.layer}: {wrong}"


def relative_errors(
    computation: Computation, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """The error of a computation in `dtype` on `device`, relative to the same in FP64 on the CPU.

    Returns:
        `"output"` and `"grad_<name>"` for each tensor → the largest error among the slices of that tensor along each
        of its dimensions: root mean squares, relative to the slice's or the whole tensor's, whichever is larger. So
        one wrong channel, sample or position among many counts as much as if all were wrong.
    """
    generator = torch.Generator().manual_seed(_SEED)
    with torch.inference_mode(False), torch.enable_grad():
        tensors = {
            name: _normal(shape, computation.scales.get(name, 1.0), generator, dtype)
            for name, shape in computation.shapes.items()
        }
        exact = _results(computation, {name: tensor.double() for name, tensor in tensors.items()}, dtype)
        runs = [{name: tensor.to(device) for name, tensor in tensors.items()}]
        if computation.channels_last:
            runs.append(runs[0] | {"input": runs[0]["input"].movedim(1, -1).contiguous().movedim(-1, 1)})
        found = [_results(computation, run, dtype) for run in runs]
    return {name: _error([run[name] for run in found], exact[name]) for name in exact}


def _results(computation: Computation, tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The output and the gradient of every tensor, for an output gradient whose values `dtype` can hold."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    with torch.autocast(next(iter(tensors.values())).device.type, enabled=False):
        output = computation.compute(**leaves)
        upstream = _normal(output.shape, 1.0, torch.Generator().manual_seed(_SEED + 1), dtype).to(output)
        gradients = torch.autograd.grad(output, list(leaves.values()), upstream)
    return {"output": output, **{f"grad_{name}": grad for name, grad in zip(leaves, gradients, strict=True)}}


def _worst(errors: Iterable[float]) -> float:
    """The largest; NaN if there is one."""
    values = list(errors)
    return max(values) if not any(map(math.isnan, values)) else math.nan


def _normal(shape: tuple[int, ...], scale: float, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * scale).to(dtype)


def _error(found: Iterable[Tensor], exact: Tensor) -> float:
    """The largest error of any slice in any run; NaN if there is one."""
    exact = exact.detach().float()
    squares = exact.square()
    sizes = _slice_means(squares).clamp(min=squares.mean())
    errors = [_slice_means((run.detach().cpu().float() - exact).square()) / sizes for run in found]
    return math.sqrt(torch.stack(errors).max().item())


def _slice_means(values: Tensor) -> Tensor:
    """Means of the slices along each dimension, one after the other."""
    if values.dim() < 2:
        return values.reshape(-1)
    half = values.dim() // 2
    return torch.cat((_slice_means(values.flatten(half).mean(-1)), _slice_means(values.flatten(0, half - 1).mean(0))))


def computations(layer: nn.Module, input_shape: tuple[int, ...] | None = None) -> list[Computation]:
    """What a layer computes, on an input of a shape or, without one, on a small default input.

    Supported are convolutions, transposed ones as well, `Linear`, `Embedding`, and the norms of torch as `cast_model`
    leaves them, FP32 inside; for other modules the list is empty. Of the layer only its configuration is read, so that
    one on the meta device will do.
    """
    if isinstance(layer, nn.modules.conv._ConvNd):
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


def _convolutions(layer: nn.modules.conv._ConvNd, input_shape: tuple[int, ...] | None) -> list[Computation]:
    """A convolution of the input, or of inputs of two sizes."""
    dims = len(layer.kernel_size)
    options: dict[str, Any] = {"stride": layer.stride, "dilation": layer.dilation, "groups": layer.groups}
    options["padding"] = layer.padding if layer.padding_mode == "zeros" else 0  # else padded before
    function: Callable[..., Tensor]
    if layer.transposed:
        options["output_padding"] = layer.output_padding
        function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
        ends = layer.in_channels, layer.out_channels // layer.groups
    else:
        function = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
        ends = layer.out_channels, layer.in_channels // layer.groups
    weight = (*ends, *layer.kernel_size)
    shapes = {"weight": weight} | ({} if layer.bias is None else {"bias": (layer.out_channels,)})
    sizes = [input_shape] if input_shape else [(_BATCH, layer.in_channels, *size) for size in _sizes(layer)]
    return [
        Computation(
            lambda **tensors: function(**tensors, **options),
            {"input": size} | shapes,
            {"weight": math.prod(weight[1:]) ** -0.5},
            channels_last=True,
        )
        for size in sizes
    ]


def _sizes(layer: nn.modules.conv._ConvNd) -> Iterator[tuple[int, ...]]:
    """Extents of an input that holds several positions of the kernel; and of one patch, where it covers patches."""
    dims = len(layer.kernel_size)
    several = max(2, min(_POSITIONS[dims], int((_PRODUCTS / _weights(layer)) ** (1 / dims))))
    for positions in (several, 1) if tuple(layer.kernel_size) == tuple(layer.stride) else (several,):
        if layer.transposed:
            yield (positions,) * dims
        else:
            # Padding adds positions. The smallest extents leave it some, so that each weight meets the input.
            spans = zip(_spans(layer), _padding(layer), layer.stride, strict=True)
            yield tuple([max((positions - 1) * step + span - 2 * pad, span - pad, 1) for span, pad, step in spans])


def _weights(layer: nn.modules.conv._ConvNd) -> int:
    return layer.in_channels * layer.out_channels // layer.groups * math.prod(layer.kernel_size)


def _spans(layer: nn.modules.conv._ConvNd) -> list[int]:
    """Extents of the kernel with its dilation."""
    return [gap * (size - 1) + 1 for size, gap in zip(layer.kernel_size, layer.dilation, strict=True)]


def _padding(layer: nn.modules.conv._ConvNd) -> list[int]:
    """Zeros that the convolution itself adds on each side."""
    if layer.padding_mode != "zeros" or layer.padding == "valid":
        return [0] * len(layer.kernel_size)
    return [span // 2 for span in _spans(layer)] if isinstance(layer.padding, str) else list(layer.padding)


def _norms(layer: nn.Module, input_shape: tuple[int, ...] | None) -> list[Computation]:
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        function = F.layer_norm if isinstance(layer, nn.LayerNorm) else F.rms_norm
        shape = tuple(layer.normalized_shape)
        return [_norm(layer, function, (shape,), input_shape or (_ROWS, *shape), shape)]
    if isinstance(layer, nn.GroupNorm):
        size = input_shape or (_BATCH, layer.num_channels, _ROWS)
        return [_norm(layer, F.group_norm, (layer.num_groups,), size, (layer.num_channels,))]
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return [_norm(layer, _batch_norm, (), input_shape or (_ROWS, layer.num_features, _ROWS), (layer.num_features,))]
    return []


def _norm(
    layer: nn.Module,
    function: Callable[..., Tensor],
    settings: tuple[Any, ...],
    size: tuple[int, ...],
    shape: tuple[int, ...],
) -> Computation:
    """`function(input, *settings, weight=, bias=)` in FP32 or wider, as between the cast's hooks."""
    shapes = {name: shape for name in ("weight", "bias") if getattr(layer, name, None) is not None}

    def compute(input: Tensor, **weights: Tensor) -> Tensor:
        wide = torch.promote_types(input.dtype, torch.float32)
        parts = {name: weight.to(wide) for name, weight in weights.items()}
        return function(input.to(wide), *settings, **parts).to(input.dtype)

    return Computation(compute, {"input": size} | shapes)


def _batch_norm(input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return F.batch_norm(input, None, None, weight, bias, training=True)


def _percent(share: float) -> str:
    return "not finite" if not math.isfinite(share) else f"off by {share:.1%}" if share < 10 else "unrelated"


def probe_layer(
    layer: nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    input_shape: tuple[int, ...] | None = None,
) -> Probe | None:
    """Compare a layer's forward and backward in `dtype` on `device` with FP64; None if it is not supported.

    Args:
        layer: a module that `computations` supports, on any device.
        dtype: `torch.bfloat16` or `torch.float16`.
        device: where it computes.
        input_shape: shape of the input to probe with.

    Raises:
        RuntimeError: torch cannot run the layer in that dtype on that device.
    """
    found = [relative_errors(computation, dtype, device) for computation in computations(layer, input_shape)]
    return Probe(description(layer), {n: _worst(errors[n] for errors in found) for n in found[0]}) if found else None


def broken_convolutions(model: nn.Module) -> list[Probe]:
    """The convolutions of a model that are wrong where they are, in their own 16-bit format.

    Convolutions of equal configuration are probed once. Those that are sharded, uninitialized, on the meta device or in
    another format are left out, and so are those that torch cannot run: they will say so themselves.

    The probes of a model take at most `MAX_WORK` multiplications. Convolutions with more unusual traits come first
    (groups, a large kernel, a stride beyond the kernel, one dimension), then smaller ones. Those that do not fit are
    not probed, and nothing is said of them; `probe_layer` probes one of any size.
    """
    found: dict[tuple[str, torch.dtype, torch.device], list[str]] = {}
    layers: dict[tuple[str, torch.dtype, torch.device], nn.modules.conv._ConvNd] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.conv._ConvNd) and (weight := _probed_weight(layer)) is not None:
            key = (description(layer), weight.dtype, weight.device)
            found.setdefault(key, []).append(name)
            layers.setdefault(key, layer)
    chosen, work = set(), 0
    for key, layer in sorted(layers.items(), key=lambda item: (-_unusual_traits(item[1]), _work(item[1]))):
        if work + _work(layer) <= MAX_WORK:
            chosen.add(key)
            work += _work(layer)
    broken = []
    for key in filter(chosen.__contains__, layers):
        try:
            probe = probe_layer(layers[key], *key[1:])
        except RuntimeError:
            continue
        if probe is not None and probe.broken:
            broken.append(replace(probe, names=tuple(found[key])))
    return broken


def _probed_weight(layer: nn.Module) -> Tensor | None:
    """A parameter in whose format and on whose device to probe a layer, if it can be probed there."""
    weight = next(layer.parameters(), None)
    if weight is None or any(map(is_lazy, layer.parameters())) or is_sharded(weight) or weight.is_meta:
        return None
    return weight if weight.numel() and weight.dtype in LOW_PRECISION_DTYPES else None


def _unusual_traits(layer: nn.modules.conv._ConvNd) -> int:
    """How many traits a convolution has that few models use, so that libraries test its kernels least."""
    skips = any(step > size for step, size in zip(layer.stride, layer.kernel_size, strict=True))
    return sum((layer.groups > 1, max(layer.kernel_size) > 7, skips, len(layer.kernel_size) == 1))


def _work(layer: nn.modules.conv._ConvNd) -> int:
    """Multiplications of a convolution's probe, forward, with `_PER_WEIGHT`."""
    return sum(_weights(layer) * (_PER_WEIGHT + _columns(layer, size)) for size in _sizes(layer))


def _columns(layer: nn.modules.conv._ConvNd, size: tuple[int, ...]) -> int:
    """Multiplications by each weight."""
    if layer.transposed:
        return _BATCH * math.prod(size)
    places = zip(size, _spans(layer), _padding(layer), layer.stride, strict=True)
    return _BATCH * math.prod((extent + 2 * pad - span) // step + 1 for extent, span, pad, step in places)


def keep_fp32_patterns(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Entries of `keep_fp32` for the modules of these names and no others.

    Layer indices become `*` where no other module matches.
    """
    chosen, every = set(names), [name for name, _ in model.named_modules()]
    patterns: dict[str, None] = {}
    for name in filter(chosen.__contains__, every):
        parts = name.split(".")
        for place in [place for place, part in enumerate(parts) if part.isdigit()]:
            pattern = ".".join([*parts[:place], "*", *parts[place + 1 :]])
            if all(other in chosen for other in every if fnmatch.fnmatchcase(f".{other}", f"*.{pattern}")):
                parts = pattern.split(".")
        patterns[".".join(parts)] = None
    return list(patterns)


def workarounds(device: torch.device, patterns: Iterable[str] = ()) -> str:
    """Workarounds for layers that are wrong on a device."""
    named = "|".join(patterns)
    options = [f'optim_args="keep_fp32={named}"' if named else "keep such layers in FP32 (keep_fp32=)"]
    if device.type == "cpu" and _has_amx() and _ISA not in os.environ:
        options.append(f"{_ISA}=AVX512_CORE_BF16 in the environment, which leaves AMX out")
    return "; or ".join([*options, "another version of torch"])


def _has_amx() -> bool:
    """Whether this CPU multiplies BF16 matrices in AMX tiles, as far as this torch says."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # torch 2.11 has none
    return capabilities is None or bool(capabilities().get("amx_bf16"))


def description(layer: nn.Module) -> str:
    """The class of torch that a layer is or derives from, and its configuration."""
    classes = (c for c in type(layer).__mro__ if c.__module__.startswith("torch.nn.modules."))
    return f"{next(classes, type(layer)).__name__}({layer.extra_repr()})"
