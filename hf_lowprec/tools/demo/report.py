"""Report the results of the demonstration as a table, a plot and a file of numbers."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.markup import escape
from rich.table import Table

from hf_lowprec.tools.demo.stages import Stage
from hf_lowprec.tools.demo.variants import VARIANTS, Variant

NUMBERS = "results.json"

# Okabe and Ito's palette. Widths, dashes and markers differ too, so that overlapping curves can be told apart.
_STYLES: dict[str, dict[str, Any]] = {
    "fp32": {"color": "#000000", "linewidth": 5, "alpha": 0.3},
    "nearest": {"color": "#D55E00", "linewidth": 1.8, "marker": "s", "markersize": 4},
    "split": {"color": "#0072B2", "linewidth": 1.8, "marker": "o", "markersize": 4},
    "sr": {"color": "#009E73", "linewidth": 1.8, "linestyle": "--", "marker": "^", "markersize": 5},
    "kahan": {"color": "#CC79A7", "linewidth": 1.8, "linestyle": ":", "marker": "v", "markersize": 4},
}


def table(stage: Stage) -> Table:
    """Format a stage as a table, with a row for each variant."""
    blocks, settings = stage.blocks, stage.settings
    tokens = settings.batch_size * blocks["length"]
    details = (
        f"{stage.parameters:,} parameters, {settings.steps:,} steps of {tokens:,} tokens, "
        f"{settings.schedule.partition('_')[0]} learning rate {settings.learning_rate:g}"
    )
    exact = stage.runs.get("fp32")
    lines = Table(
        title=f"[bold]{escape(stage.title)}[/bold]\n{details}",
        title_style="",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,  # fits 80 columns
    )
    lines.add_column("way", no_wrap=True)
    for heading in (
        *("validation\nloss", "compared\nwith FP32", "weights\nB/param", "grads\nB/param", "state\nB/param"),
        *("updates\nlost", "seconds"),
    ):
        lines.add_column(heading, justify="right", no_wrap=True)
    for name, run in stage.runs.items():
        bytes_each = (run.bytes_per_parameter.get(kind, math.nan) for kind in ("weights", "gradients", "state"))
        lines.add_row(
            VARIANTS[name].label,
            f"{run.final:.4f}",
            "" if exact is None or run is exact else f"{run.final - exact.final:+.4f}",
            *(f"{size:.2f}" for size in bytes_each),
            _percent(run.lost_updates),
            f"{run.seconds:.1f}",
        )
    return lines


def legend(stages: Sequence[Stage]) -> str:
    """Explain the rows and columns of the tables."""
    names = dict.fromkeys(name for stage in stages for name in stage.runs)
    lines = [f"{VARIANTS[name].label}: {VARIANTS[name].description}." for name in names]
    return "\n".join(
        [
            *lines,
            "Loss: nats per token (for the byte-level model, per byte), each model evaluated in its own dtypes. Bytes: "
            "counted on the tensors after a step. Updates lost: share of AdamW's FP32 weight changes that was lost in "
            "rounding (stochastic rounding scatters around 0). Seconds: time in training steps; CPU times say nothing "
            "about a GPU.",
        ]
    )


def _percent(share: float) -> str:
    """Format a share as a percentage, without a minus before zero."""
    return f"{round(100 * share, 1) + 0.0:.1f}%"


def numbers(stages: Sequence[Stage], seed: int, model: str, seconds: float) -> dict[str, Any]:
    """Collect the measured numbers and everything needed to reproduce them, for `json_text`."""
    packages = ("hf-lowprec", "torch", "transformers", "datasets")
    return {
        "model": model,
        "seed": seed,
        "seconds": seconds,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"cpu, {torch.get_num_threads()} threads",
        "ways": variant_descriptions(),
        "stages": [_stage_numbers(stage) for stage in stages],
    }


def variant_descriptions(variants: Iterable[Variant] = VARIANTS.values()) -> dict[str, dict[str, str]]:
    """Label and description of each variant, as recorded with the numbers."""
    return {variant.name: {"label": variant.label, "what": variant.description} for variant in variants}


def _stage_numbers(stage: Stage) -> dict[str, Any]:
    runs = {name: {"start": run.start, "final": run.final, **asdict(run)} for name, run in stage.runs.items()}
    return {**asdict(stage), "runs": runs}


def json_text(value: Any) -> str:
    """Format `value` as JSON; NaN and infinities, which JSON does not have, become null."""
    return json.dumps(_replace_nonfinite(value), indent=2, allow_nan=False) + "\n"


def _replace_nonfinite(value: Any) -> Any:
    """Copy `value`, replacing NaN and infinities by None at any depth."""
    if isinstance(value, dict):
        return {key: _replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(stages: Sequence[Stage], output_dir: Path, seed: int, model: str, seconds: float) -> list[Path]:
    """Write a plot of each stage and the numbers to `output_dir` and return their paths, the last stage first."""
    plots = [output_dir / f"{stage.name}.png" for stage in stages]
    for stage, path in zip(stages, plots, strict=True):
        plot(stage, path)
    (output_dir / NUMBERS).write_text(json_text(numbers(stages, seed, model, seconds)), encoding="utf-8")
    return [*reversed(plots), output_dir / NUMBERS]


def plot(stage: Stage, path: Path) -> None:
    """Plot validation loss against steps as a PNG that can be read on a phone."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot: it would choose a backend for the whole process.
    with matplotlib.rc_context({"font.size": 11}):
        figure = Figure(figsize=(5.5, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for name, run in stage.runs.items():
            steps, losses = zip(*run.validation, strict=True)
            axes.plot(steps, losses, label=VARIANTS[name].label, **_STYLES[name])
        if stage.name == "pretraining":
            # The loss falls so far in the first tenth of the steps that nothing else would be visible.
            losses_after = [
                loss for run in stage.runs.values() for _, loss in run.validation[1:] if math.isfinite(loss)
            ]
            if losses_after and max(losses_after) > min(losses_after):
                margin = 0.05 * (max(losses_after) - min(losses_after))
                axes.set_ylim(min(losses_after) - margin, max(losses_after) + margin)
        axes.set_title(stage.title, fontsize=10, wrap=True, parse_math=False)
        axes.set_xlabel("optimizer steps")
        axes.set_ylabel("validation loss (nats per token)")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=180)
