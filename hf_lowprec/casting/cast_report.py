"""The report of a cast: what it found and did, as data and as text."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from hf_lowprec.casting.module_tree import ModelTensor, shape_of

_NOT_ROUNDED = "labels and targets, numbers, weights and positions"


class DtypeTotal(NamedTuple):
    """Elements and bytes held in one dtype; a tied tensor counts once."""

    parameters: int
    buffers: int
    bytes: int


def dtype_totals(tensors: Iterable[ModelTensor]) -> dict[torch.dtype, DtypeTotal]:
    """Return the elements and bytes of a model's tensors, by dtype."""
    totals: dict[torch.dtype, DtypeTotal] = {}
    for target in tensors:
        tensor, count = target.tensor, shape_of(target.tensor).numel()
        total = totals.get(tensor.dtype, DtypeTotal(0, 0, 0))
        parameters, buffers = (count, 0) if isinstance(tensor, nn.Parameter) else (0, count)
        size = count * tensor.element_size()
        totals[tensor.dtype] = DtypeTotal(total.parameters + parameters, total.buffers + buffers, total.bytes + size)
    return totals


@dataclass(frozen=True)
class CastReport:
    """Result of one call of `cast_model`; `print` it. Modules and tensors are listed by their qualified names.

    Attributes:
        dtype: the dtype of the cast.
        cast: tensors that this call converted to `dtype`.
        kept: modules (the topmost of each kept subtree) and single tensors in FP32, and why.
        boundaries: FP32 modules whose inputs are upcast and, except for `heads`, whose outputs are downcast.
        inputs: modules whose activation arguments are rounded to `dtype`.
        heads: FP32 modules that end the model and return FP32.
        losses: loss modules, models with a loss function, and your own models that compute a loss of torch, in FP32.
        results: 16-bit modules whose code returns FP32, which is downcast for the next module, and why.
        predictions: 16-bit modules that return FP32 copies, for a loss or distribution computed from them, and why.
        upcast: kept tensors that were in 16 bits before the cast, and their dtype; they stay rounded.
        restored: rotary buffers that had been rounded and were recomputed.
        low_bits: parameters whose low bits, rounded off by this call, are kept for the optimizer.
        untouched: tensors left alone because they are not plain 16- to 64-bit floating-point tensors, and their kind.
        warnings: messages about likely mistakes.
        before: parameters, buffer elements and bytes by dtype, before the call.
        after: the same, after the call.
        already_cast: whether an earlier call had cast this model or a part of it.
        changed: whether this call changed anything.
    """

    dtype: torch.dtype
    cast: tuple[str, ...]
    kept: dict[str, str]
    boundaries: tuple[str, ...]
    inputs: tuple[str, ...]
    heads: tuple[str, ...]
    losses: tuple[str, ...]
    results: dict[str, str]
    predictions: dict[str, str]
    upcast: dict[str, torch.dtype]
    restored: tuple[str, ...]
    low_bits: tuple[str, ...]
    untouched: dict[str, str]
    warnings: tuple[str, ...]
    before: dict[torch.dtype, DtypeTotal]
    after: dict[torch.dtype, DtypeTotal]
    already_cast: bool
    changed: bool

    def __str__(self) -> str:
        lines = [f"{'already ' * self.already_cast}cast to {self.dtype}: "]
        lines[0] += f"{len(self.cast)} tensors converted" if self.changed else "nothing changed"
        for total, when in ((self.before, "before"), (self.after, "after")):
            for dtype, n in sorted(total.items(), key=str):
                counts = f"{n.parameters:,} parameters, {n.buffers:,} buffer elements, {n.bytes:,} bytes"
                lines.append(f"  {when:<6} {dtype!s:<14} {counts}")
        if self.low_bits:
            lines.append(f"  low bits of {len(self.low_bits)} tensors kept for the optimizer")
        for title, entries in (
            ("kept in float32", self.kept),
            ("upcast to float32", {name: f"was {dtype}" for name, dtype in self.upcast.items()}),
            ("recomputed from the config", dict.fromkeys(self.restored, "had been rounded")),
            ("untouched", self.untouched),
            ("inputs rounded", dict.fromkeys(self.inputs, f"to {self.dtype}, except {_NOT_ROUNDED}")),
            ("loss in float32", dict.fromkeys(self.losses, "on exact copies of the predictions")),
            ("outputs rounded", self.results),
            ("predictions in float32", self.predictions),
            ("output left in float32", dict.fromkeys(self.heads, "ends the model")),
        ):
            # One line for the same module of all layers.
            stars = ((re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), why) for name, why in entries.items())
            groups = Counter(stars)
            lines += [f"  {title}:"] * bool(groups)
            lines += [f"    {n or '(model)'}{f' (x{k})' * (k > 1)}: {why}" for (n, why), k in groups.items()]
        return "\n".join(lines + [f"  warning: {text}" for text in self.warnings])
