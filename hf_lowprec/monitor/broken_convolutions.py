"""Find the convolutions of a model that this machine computes wrongly, and suggest workarounds.

The Trainer callback runs this before training; `probes.py` does the comparison.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hf_lowprec.monitor.layer_probes import (
    Convolution,
    Probe,
    default_sizes,
    describe_layer,
    multiplications_per_weight,
    probe_layer,
    weight_count,
)
from hf_lowprec.optim.sharding import is_sharded
from hf_lowprec.rounding import LOW_PRECISION_DTYPES

MAX_COST = 5 * 2**29
"""Upper limit on the cost of a model's probes, in multiplications: about 0.3 seconds of a CPU core."""
_COST_PER_WEIGHT = 256
"""Multiplications that take the time of drawing a weight and comparing its gradient; measured on a CPU."""
_ONEDNN_ISA = "ONEDNN_MAX_CPU_ISA"


@dataclass
class _Candidate:
    """Convolutions of a model that share configuration, dtype and device, so that one probe covers them all."""

    layer: Convolution
    dtype: torch.dtype
    device: torch.device
    names: list[str] = field(default_factory=list)


def find_broken_convolutions(model: nn.Module) -> list[Probe]:
    """Probe a model's convolutions on their own device, in their own 16-bit dtype.

    Convolutions with equal configurations are probed once. Those that are sharded, uninitialized, on the meta device or
    in another dtype are skipped, and so are those that torch cannot run, since they raise their own error.

    The probes of a model cost at most `MAX_COST`. Convolutions with more unusual traits (groups, a large kernel, a
    stride larger than the kernel, one dimension) come first, then cheaper ones. Those that exceed the limit are neither
    probed nor reported; `probe_layer` probes a layer of any size.

    Returns:
        The failed probes, with the names of the modules.
    """
    candidates: dict[tuple[str, torch.dtype, torch.device], _Candidate] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Convolution) and (weight := _probed_weight(layer)) is not None:
            key = (describe_layer(layer), weight.dtype, weight.device)
            candidates.setdefault(key, _Candidate(layer, weight.dtype, weight.device)).names.append(name)
    broken = []
    for candidate in _within_cost(list(candidates.values())):
        try:
            probe = probe_layer(candidate.layer, candidate.dtype, candidate.device)
        except RuntimeError:
            continue
        if probe is not None and probe.broken:
            broken.append(replace(probe, names=tuple(candidate.names)))
    return broken


def _within_cost(candidates: list[_Candidate]) -> list[_Candidate]:
    """Choose the candidates to probe within `MAX_COST`; they keep their order."""
    chosen, cost = set(), 0
    by_priority = sorted(candidates, key=lambda c: (-_unusual_traits(c.layer), _probe_cost(c.layer)))
    for candidate in by_priority:
        if cost + _probe_cost(candidate.layer) <= MAX_COST:
            chosen.add(id(candidate))
            cost += _probe_cost(candidate.layer)
    return [candidate for candidate in candidates if id(candidate) in chosen]


def _probed_weight(layer: nn.Module) -> Tensor | None:
    """The parameter whose dtype and device a layer is probed with; None if the layer cannot be probed."""
    weight = next(layer.parameters(), None)
    if weight is None or any(map(is_lazy, layer.parameters())) or is_sharded(weight) or weight.is_meta:
        return None
    return weight if weight.numel() and weight.dtype in LOW_PRECISION_DTYPES else None


def _unusual_traits(layer: Convolution) -> int:
    """The number of a convolution's traits that few models use, and whose kernels libraries therefore test least."""
    skips = any(step > size for step, size in zip(layer.stride, layer.kernel_size, strict=True))
    return sum((layer.groups > 1, max(layer.kernel_size) > 7, skips, len(layer.kernel_size) == 1))


def _probe_cost(layer: Convolution) -> int:
    """Multiplications of a convolution's probe, forward, with `_COST_PER_WEIGHT` for each weight of each run."""
    return sum(
        weight_count(layer) * (_COST_PER_WEIGHT + multiplications_per_weight(layer, size))
        for size in default_sizes(layer)
    )


def keep_fp32_patterns(model: nn.Module, names: Iterable[str]) -> list[str]:
    """`keep_fp32` patterns that match the modules with these names and no others.

    Layer indices become `*` where no other module matches.
    """
    chosen, all_names = set(names), [name for name, _ in model.named_modules()]
    patterns: dict[str, None] = {}
    for name in filter(chosen.__contains__, all_names):
        parts = name.split(".")
        for index in [index for index, part in enumerate(parts) if part.isdigit()]:
            pattern = ".".join([*parts[:index], "*", *parts[index + 1 :]])
            if all(other in chosen for other in all_names if fnmatch.fnmatchcase(f".{other}", f"*.{pattern}")):
                parts = pattern.split(".")
        patterns[".".join(parts)] = None
    return list(patterns)


def workarounds(device: torch.device, patterns: Iterable[str] = ()) -> str:
    """Workarounds for layers that a device computes wrongly, as text.

    Args:
        device: the device that computes wrongly.
        patterns: entries of `keep_fp32` for them.
    """
    joined = "|".join(patterns)
    options = [f'optim_args="keep_fp32={joined}"' if joined else "keep such layers in FP32 (keep_fp32=)"]
    if device.type == "cpu" and _has_amx() and _ONEDNN_ISA not in os.environ:
        options.append(f"{_ONEDNN_ISA}=AVX512_CORE_BF16 in the environment, which disables AMX")
    return "; or ".join([*options, "another version of torch"])


def _has_amx() -> bool:
    """Return whether this CPU multiplies BF16 matrices in AMX tiles; True if this torch cannot tell."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # torch 2.11 has none
    return capabilities is None or bool(capabilities().get("amx_bf16"))
