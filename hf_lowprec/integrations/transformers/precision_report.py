"""The precision report that is printed before training: dtypes, their memory, and the rounding modes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.casting import CastReport
from hf_lowprec.casting.quantized import holds_quantized_weights
from hf_lowprec.monitor.byte_counts import (
    elements_kept_in_bf16,
    expected_gradients,
    expected_states,
    storage_tensors,
)
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.backends.selection import expected_backend
from hf_lowprec.optim.param_groups import params_of
from hf_lowprec.optim.sharding import full_shape
from hf_lowprec.optim.state.fp32_weights import initial_values
from hf_lowprec.optim.state.states import state_tensors
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, MODES, dtype_name
from hf_lowprec.rounding.modes import SCALE_SUFFIX


def precision_report(
    model: nn.Module, optimizer: torch.optim.Optimizer, cast: CastReport, notes: Iterable[str] = ()
) -> str:
    """Write the report.

    Args:
        model: the model about to be trained.
        optimizer: its optimizer; states that the first step will create are counted as well.
        cast: the report that `cast_model` returned.
        notes: further lines.

    Returns:
        The text, one line per item.
    """
    trainable = _by_dtype(p for p in model.parameters() if p.requires_grad)
    frozen = _by_dtype(_frozen(model))
    lines = [f"hf_lowprec: {dtype_name(cast.dtype)} training of {type(model).__name__}"]
    lines += [_row("trainable", trainable), _row("frozen", frozen)] if frozen else [_row("weights", trainable)]
    alive = _by_dtype(expected_gradients(model.parameters(), optimizer))
    lines.append(_row("gradients", alive, trainable if alive != trainable else None))
    if isinstance(optimizer, LowPrecisionOptimizer):
        lines += _state_rows(optimizer)
        lines.append(f"  {'rounding':<16}{_rounding_modes(optimizer)}")
        if initial := initial_values(optimizer):
            counts = ", ".join(f"{kind} {count:,}" for kind, count in initial.most_common())
            lines.append(f"  {_names_of_low_bits_states(optimizer):<16}starts with {counts}")
        how = ", gradients released during the backward pass" if optimizer.gradient_release else ""
        on_host = "states and gradients" if optimizer.offload_gradients else "states"
        how += f", {on_host} in host memory" if optimizer.offload_states else ""
        lines.append(f"  {'optimizer':<16}{type(optimizer).__name__}, backend {_backends(optimizer)}{how}")
        lines += _matrices(optimizer)
    else:
        lines.append(f"  {'optimizer':<16}{type(optimizer).__name__}, not from hf_lowprec; it rounds in its own way")
    if cast.kept:
        reasons = Counter(cast.kept.values())
        lines.append(f"  {'kept in fp32':<16}" + ", ".join(f"{n} × {why}" for why, n in reasons.items()))
    lines += [f"  {'note':<16}{note}" for note in (*notes, *cast.warnings)]
    return "\n".join(lines)


def _state_rows(optimizer: LowPrecisionOptimizer) -> Iterator[str]:
    """Format the lines about states. The scales of a state in 8 bits are a part of its line."""
    counts = expected_states(optimizer)
    states = (state for group in optimizer.param_groups for state in optimizer.states(group))
    means = {name for state in states for name in state.factored or ()}
    for name, count in counts.items():
        if name.removesuffix(SCALE_SUFFIX) not in counts.keys() - {name}:
            yield _row(name, count, None, counts.get(name + SCALE_SUFFIX, Counter()), name in means)
    for reason, elements in elements_kept_in_bf16(optimizer).items():
        yield f"  {'not in 8 bits':<16}{elements:,} elements in bfloat16: {reason}"


def _matrices(optimizer: LowPrecisionOptimizer) -> Iterator[str]:
    """Format the line about the parameters that are orthogonalized, if there are any."""
    groups = filter(optimizer.orthogonalizes, optimizer.param_groups)
    sizes = [full_shape(param).numel() for group in groups for param in group["params"] if param.requires_grad]
    if sizes:
        yield f"  orthogonalized  {len(sizes):,} parameters, {sum(sizes):,} elements; AdamW steps the others"


def _names_of_low_bits_states(optimizer: LowPrecisionOptimizer) -> str:
    """Return the names of the states that hold low bits: compensation, remainder or both."""
    modes = (MODES[group["rounding"]] for group in optimizer.param_groups)
    names = (state.name for mode in modes for state in mode.auxiliary if state.holds_low_bits)
    return ", ".join(dict.fromkeys(names))


def _frozen(model: nn.Module) -> Iterator[Tensor]:
    """Yield frozen parameters, and the buffers of modules whose weights are quantized into buffers."""
    for module in model.modules():
        yield from module.buffers(recurse=False) if holds_quantized_weights(module) else ()
    yield from (param for param in model.parameters() if not param.requires_grad)


def _rounding_modes(optimizer: LowPrecisionOptimizer) -> str:
    """Describe how weights are rounded, and 16- or 8-bit states that accumulate over steps, compensations included."""
    bits_by_rounding: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    for group in optimizer.param_groups:
        params = [param for param in group["params"] if param.requires_grad]
        if not any(param.dtype in LOW_PRECISION_DTYPES for param in params):
            continue
        tensors = [tensor for param in params for tensor in state_tensors(optimizer, group, param)]
        bits = {8 * tensor.dtype.itemsize for tensor in tensors if tensor.accumulates}
        rounding = group["rounding"] + " with error feedback" * optimizer.feeds_back(group)
        bits_by_rounding[rounding, group["state_rounding"], group["seed"]] |= bits - {32}
    modes = []
    for (rounding, state_rounding, seed), bits in sorted(bits_by_rounding.items()):
        sizes = " and ".join(f"{count}-bit" for count in sorted(bits, reverse=True))
        states = f"{sizes} states {state_rounding}, " if bits else ""
        modes.append(f"weights {rounding}, {states}seed {seed}")
    return "; ".join(modes) or "none, since the optimizer has no 16-bit weights"


def _backends(optimizer: LowPrecisionOptimizer) -> str:
    devices = set(map(optimizer.state_device, params_of(optimizer)))
    return ", ".join(sorted({expected_backend(optimizer.backend, device) for device in devices}))


def _by_dtype(tensors: Iterable[Tensor]) -> Counter[torch.dtype]:
    """Count stored elements by dtype."""
    count: Counter[torch.dtype] = Counter()
    for tensor in storage_tensors(tensors):
        count[tensor.dtype] += tensor.numel()
    return count


def _row(
    title: str,
    count: Counter[torch.dtype],
    of: Counter[torch.dtype] | None = None,
    scales: Counter[torch.dtype] | None = None,
    of_means: bool = False,
) -> str:
    """Format one line: size, bytes per parameter (if each element is one parameter), and element counts by dtype.

    Args:
        title: what the line is about.
        count: the elements that exist at once, by dtype.
        of: all elements, if they do not exist at once.
        scales: for a state with 8-bit elements, their scales by dtype.
        of_means: whether the line is about a state with one element per row or column.
    """
    total = sum((of or count).values())
    stored = [*count.items(), *(scales or Counter()).items()]
    size = sum(n * dtype.itemsize for dtype, n in stored)
    # An element of quantized data may hold several weights, or a part of one.
    floats = scales is not None or all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in count)
    each = f"{size / max(total, 1):>5.2f} bytes/parameter" if floats and not of_means else f"{'':21}"
    shares = ", ".join(f"{dtype_name(dtype)} {n:,}" for dtype, n in count.most_common())
    shares += f" at once, of {sum(of.values()):,}: freed during the backward pass" if of else ""
    shares += f", scales {sum(scales.values()):,}" if scales else ""
    return f"  {title:<16}{size / 2**20:>10,.1f} MiB {each}  ({shares})"
