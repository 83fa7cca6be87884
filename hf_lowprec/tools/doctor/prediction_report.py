"""A prediction as a table, as JSON and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_lowprec.tools.doctor.advice import find_problems, recommend
from hf_lowprec.tools.doctor.prediction import VANISHING, ModePrediction, Prediction
from hf_lowprec.tools.doctor.update_sizes import ALL

if TYPE_CHECKING:
    from rich.table import Table

_FP32 = "FP32"


def prediction_table(prediction: Prediction) -> Table:
    """One row for each part of the model: what nearest and split weights lose, and what noise the other modes add.

    It fits 80 columns, unless updates vanish in several stretches of steps.
    """
    from rich import box
    from rich.table import Table

    run = prediction.run
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    for heading, justify in (
        ("part", "left"), ("parameters", "right"), ("nearest\n\nlost", "right"), ("\nvanishing\nin steps", "left"),
        ("stochastic\n\nnoise", "right"), ("\nblurred\nin steps", "left"), ("kahan\n\nnoise", "right"),
        ("split\n\nlost", "right"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for kind, parameters in prediction.parameters.items():
        cells = [kind, f"{parameters:,}"]
        # The optimizers of other libraries round the norms as well, which ours leave in FP32.
        if nearest := prediction.by_mode["nearest"].get(kind):
            cells += [_two_digits(nearest.lost_in_run), _ranges(nearest.vanishing)]
        else:
            cells += [_FP32, ""]
        if stochastic := prediction.by_mode["stochastic"].get(kind):
            blurred = [(stochastic.blurs_from, run.steps)] if stochastic.blurs_from else []
            kahan, split = prediction.by_mode["kahan"][kind], prediction.by_mode["split"][kind]
            cells += [_two_digits(stochastic.noise), _ranges(blurred)]
            cells += [_two_digits(kahan.noise), _two_digits(split.lost_in_run)]
        else:
            cells += [_FP32, "", _FP32, _FP32]
        table.add_row(*cells)
    return table


def _two_digits(number: float) -> str:
    return f"{round(number, 2) + 0.0:.2f}"  # + 0.0 makes 0 of -0


def _ranges(stretches: list[tuple[int, int]]) -> str:
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in stretches) or "none"


def prediction_numbers(prediction: Prediction, model: str, optim_args: str | None) -> dict[str, Any]:
    """All that is predicted, as an object for JSON."""
    run, advice = prediction.run, recommend(prediction, optim_args)
    kinds: dict[str, Any] = {}
    for kind, parameters in prediction.parameters.items():
        modes = {mode: parts[kind] for mode, parts in prediction.by_mode.items() if kind in parts}
        if kind in prediction.requested:
            modes["requested"] = prediction.requested[kind]
        kinds[kind] = {"parameters": parameters, **{mode: _numbers(part) for mode, part in modes.items()}}
    return {
        "model": model,
        "optim": run.optim,
        "steps": run.steps,
        "learning_rates": {"highest": max(run.learning_rates), "lowest": min(run.learning_rates)},
        "sizes_of_updates": "checkpoint" if prediction.measured else "noise",
        "kinds": kinds,
        "findings": [finding._asdict() for finding in find_problems(prediction)],
        "advice": {"optim": advice.optim, "optim_args": advice.optim_args, "text": str(advice)},
    }


def _numbers(part: ModePrediction) -> dict[str, Any]:
    return {
        "lost_updates": part.lost_in_run,
        "first_vanishing_step": part.vanishing[0][0] if part.vanishing else None,
        "vanishing_steps": part.vanishing,
        "vanishing_share": part.vanishing_share,
        "noise": part.noise,
        "blurs_from": part.blurs_from,
    }


def plot_prediction(prediction: Prediction, path: Path) -> None:
    """Plot the share of updates that rounding to nearest loses in each step, for each part of the model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")  # not pyplot, which chooses a backend for the whole process
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for kind, part in prediction.by_mode["nearest"].items():
        color = "black" if kind == ALL else None
        axes.plot(part.steps, part.lost, label=kind, color=color, linewidth=2.5 if kind == ALL else 1.5)
    axes.axhline(VANISHING, color="gray", linestyle=":", linewidth=1)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("updates lost in rounding to nearest")
    axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.3)
    rates = axes.twinx()
    rates.plot(
        range(1, prediction.run.steps + 1), prediction.run.learning_rates, color="gray", linestyle="--", linewidth=1
    )
    rates.set_ylabel("learning rate (dashed)")
    rates.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=150)
