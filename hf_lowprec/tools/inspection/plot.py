"""Draws the weights by magnitude: how many there are, which updates they can follow, and which of them moved."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.rounding.nearest import EXPONENTS, spacings_by_exponent
from hf_lowprec.tensor_names import PARAMETER_KINDS
from hf_lowprec.tools.inspection.checkpoint import Checkpoint
from hf_lowprec.tools.inspection.comparison import Comparison

_SMALLEST, _LARGEST = 127 - 20, 127 + 4
"""Exponent fields of the magnitudes that are drawn: 2^-20 to 2^4."""
_FEWEST = 50
"""Weights of a magnitude, below which the share that moved is not drawn."""


def plot(path: Path, checkpoint: Checkpoint, comparison: Comparison | None) -> None:
    """Write a picture.

    Args:
        path: the file; its suffix is the format, as in `out.png`.
        checkpoint: the checkpoint, or the later of two.
        comparison: the comparison of two.

    Raises:
        ValueError: matplotlib does not know the format.
    """
    figure = Figure(figsize=(8, 8 if comparison else 4), layout="constrained")
    FigureCanvasAgg(figure)
    first, *others = figure.subplots(2 if comparison else 1, 1, squeeze=False)[:, 0]
    _draw_magnitudes(first, checkpoint)
    _title(first, checkpoint.name)
    if comparison:
        _draw_moved(others[0], comparison)
        _title(others[0], f"moved since {comparison.earlier.name}")
    figure.savefig(path, dpi=150)


def _draw_magnitudes(axes: Axes, checkpoint: Checkpoint) -> None:
    """The weights of each part by magnitude, and from where on rounding to nearest loses updates."""
    counts: dict[str, Tensor] = defaultdict(lambda: torch.zeros(EXPONENTS, dtype=torch.int64))
    for name, tensor in checkpoint.tensors.items():
        if tensor.is_floating:
            counts[checkpoint.kinds[name]] += tensor.exponents
    for kind, of_kind in _in_order(counts):
        _line(axes, of_kind / of_kind.sum().clamp(min=1), kind)
    for dtype in {tensor.dtype for tensor in checkpoint.tensors.values()} & {*LOW_PRECISION_DTYPES}:
        coarse = (spacings_by_exponent(dtype) / 2 > checkpoint.update).nonzero()
        if len(coarse):
            axes.axvspan(2.0 ** (int(coarse[0]) - 127), 2.0 ** (_LARGEST - 127), color="0.9", zorder=0)
    _finish(
        axes,
        "share of a part's weights",
        f" (gray: in 16 bits, rounding to nearest loses updates of {checkpoint.update:.2g})",
    )


def _draw_moved(axes: Axes, comparison: Comparison) -> None:
    """The share of weights of each magnitude that moved, by part."""
    counts: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2, EXPONENTS, dtype=torch.int64))
    for name, change in comparison.changes.items():
        if change.dtype.is_floating_point:
            counts[comparison.later.kinds[name]] += torch.stack([change.exponents, change.moved_exponents])
    for kind, (of_kind, moved) in _in_order(counts):
        _line(axes, torch.where(of_kind >= _FEWEST, moved / of_kind.clamp(min=1), torch.nan), kind, marker="o")
    axes.set_ylim(-0.03, 1.03)
    _finish(axes, "share of these that moved")


def _in_order(counts: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [(kind, counts[kind]) for kind in PARAMETER_KINDS if kind in counts]


def _line(axes: Axes, values: Tensor, label: str, marker: str | None = None) -> None:
    magnitudes = 2.0 ** (torch.arange(_SMALLEST, _LARGEST) - 126.5)
    axes.plot(magnitudes, values[_SMALLEST:_LARGEST], label=label, markersize=3, marker=marker)


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize="medium", loc="left", wrap=True, parse_math=False)


def _finish(axes: Axes, quantity: str, note: str = "") -> None:
    axes.set(xscale="log", xlim=(2.0 ** (_SMALLEST - 127), 2.0 ** (_LARGEST - 127)), ylabel=quantity)
    axes.set_xlabel(f"magnitude of a weight{note}")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
