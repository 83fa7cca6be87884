"""The report of a cast: what it found and did, as data and as text."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from hf_lowprec.casting.module_tree import ModelTensor

_NOT_ROUNDED = "labels and targets, numbers, weights and positions"


class DtypeTotal(NamedTuple):
    """Elements and bytes held in one dtype; a tied tensor counts once."""

    parameters: int
    buffers: int
    bytes: int


def dtype_totals(tensors: Iterable[ModelTensor]) -> dict[torch.dtype, DtypeTotal]:
    """Count the tensors of a model by dtype."""
    totals: dict[torch.dtype, DtypeTotal] = {}
    for found in tensors:
        tensor, count = found.tensor, found.tensor.numel()
        total = totals.get(tensor.dtype, DtypeTotal(0, 0, 0))
        parameters, buffers = (count, 0) if isinstance(tensor, nn.Parameter) else (0, count)
        size = count * tensor.element_size()
        totals[tensor.dtype] = DtypeTotal(total.parameters + parameters, total.buffers + buffers, total.bytes + size)
    return totals


@dataclass(frozen=True)
class CastReport:
    """What one call of `cast_model` found and did; `str()` of it is for people. Names are qualified."""

    dtype: torch.dtype
    cast: tuple[str, ...]  # tensors this call converted to `dtype`
    kept: dict[str, str]  # FP32 module (the outermost one) or single tensor -> why
    boundaries: tuple[str, ...]  # FP32 modules whose inputs are upcast and, except for `heads`, outputs downcast
    inputs: tuple[str, ...]  # modules that round wider activations among their arguments to `dtype`
    heads: tuple[str, ...]  # FP32 modules that end the model, whose output stays in FP32
    losses: tuple[str, ...]  # loss modules and models with a loss function: they compute it in FP32
    results: dict[str, str]  # 16-bit modules that return FP32, which is rounded for the next module -> why
    predictions: dict[str, str]  # 16-bit modules that return FP32 copies, for what is computed outside of them -> why
    upcast: dict[str, torch.dtype]  # kept tensor -> the dtype it came in; its lost bits stay lost
    restored: tuple[str, ...]  # rotary buffers that had been rounded and were recomputed
    untouched: dict[str, str]  # tensor that is not a plain 16 to 64-bit float -> what it is
    warnings: tuple[str, ...]
    before: dict[torch.dtype, DtypeTotal]
    after: dict[torch.dtype, DtypeTotal]
    already_cast: bool  # an earlier call had cast this model or a part of it
    changed: bool  # this call changed a tensor or a hook

    def __str__(self) -> str:
        lines = [f"{'already ' * self.already_cast}cast to {self.dtype}: "]
        lines[0] += f"{len(self.cast)} tensors converted" if self.changed else "nothing changed"
        for total, when in ((self.before, "before"), (self.after, "after")):
            for dtype, n in sorted(total.items(), key=str):
                counts = f"{n.parameters:,} parameters, {n.buffers:,} buffer elements, {n.bytes:,} bytes"
                lines.append(f"  {when:<6} {dtype!s:<14} {counts}")
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
