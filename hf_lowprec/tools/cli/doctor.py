"""`hf-lowprec doctor`: check that training works on this machine, or predict what rounding will do in a planned run."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from hf_lowprec.tools.cli.plot_option import require_matplotlib

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_lowprec.tools.doctor.checks import CheckResult

_RUN = "Planned run"
WIDTH = 120
"""Terminal width that fits any table."""


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model or checkpoint to train: a folder, or a name on the Hub that is in the cache. Without it, "
            "check this machine."
        ),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="The peak learning rate.", rich_help_panel=_RUN)] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="The number of steps.", rich_help_panel=_RUN)] = None,
    scheduler: Annotated[str, typer.Option(help="lr_scheduler_type.", rich_help_panel=_RUN)] = "linear",
    scheduler_kwargs: Annotated[
        str | None, typer.Option(help="lr_scheduler_kwargs as JSON.", rich_help_panel=_RUN)
    ] = None,
    warmup_steps: Annotated[
        float, typer.Option(min=0, help="Number of steps; below 1, a share of all steps.", rich_help_panel=_RUN)
    ] = 0.0,
    weight_decay: Annotated[float, typer.Option(min=0, help="As in TrainingArguments.", rich_help_panel=_RUN)] = 0.0,
    beta1: Annotated[float | None, typer.Option(help="adam_beta1.", rich_help_panel=_RUN)] = None,
    beta2: Annotated[float | None, typer.Option(help="adam_beta2.", rich_help_panel=_RUN)] = None,
    optim: Annotated[
        str | None,
        typer.Option(
            help="As in TrainingArguments. Default: the checkpoint's, with its rounding, state dtypes and betas; "
            "without a checkpoint adamw_torch, with norms in BF16 too.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    optim_args: Annotated[str | None, typer.Option(help="As in TrainingArguments.", rich_help_panel=_RUN)] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the prediction as JSON.", rich_help_panel=_RUN)
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Write a PNG: lost updates over the steps.", callback=require_matplotlib, rich_help_panel=_RUN
        ),
    ] = None,
) -> None:
    """Check this machine, or with MODEL, predict what rounding will do in a planned run.

    The check runs each part of training on a small scale: packages, names,
    backends, reduction, a short training run. It exits with 1 if something is
    broken. Missing parts that have a slower substitute are reported but are
    not errors. To check the reduction between processes, launch it like a
    training script: accelerate launch -m hf_lowprec doctor

    The prediction reads the model's weights and builds the learning rates of
    the run. For each part of the model, it shows in which steps rounding to
    nearest loses updates, how much noise stochastic rounding and Kahan
    summation add, and what split weights lose. Then it recommends an
    optimizer. It exits with 1 if --optim will lose updates or blur weights.
    """
    if model is None:
        given = {"--lr": lr, "--steps": steps, "--optim-args": optim_args, "--json": as_json or None, "--plot": plot}
        for option, value in given.items():
            if value is not None:
                raise typer.BadParameter("it is for predictions, which need a MODEL", param_hint=option)
        _check_machine()
    if lr is None or steps is None:
        raise typer.BadParameter(f"with MODEL, {'--lr' if lr is None else '--steps'} must be given", param_hint="MODEL")
    settings = {
        "optim": optim,
        "optim_args": optim_args,
        "learning_rate": lr,
        "scheduler": scheduler,
        "scheduler_kwargs": scheduler_kwargs,
        "warmup_steps": warmup_steps,
        "steps": steps,
        "weight_decay": weight_decay,
        "betas": (beta1, beta2),
    }
    _predict(model, settings, as_json, plot)


def _check_machine() -> NoReturn:
    """Run all checks, print their results, and exit."""
    from hf_lowprec.reduction.object_gather import gather_objects
    from hf_lowprec.tools.doctor import checks

    broken = False
    with checks.joined_ranks():
        for name, check in checks.CHECKS.items():
            result = checks.run_check(check)
            if result.unexpected and checks.rank_count() > 1:
                typer.echo(f"{result.status:<8}{name:<11}{result.text} (rank {checks.rank()})", err=True)
                checks.abort()
            results = gather_objects(result, "checking this machine")
            broken |= any(result.status == checks.FAILED for result in results)
            if checks.rank() == 0:
                for line in lines(name, results):
                    typer.echo(line)
    raise typer.Exit(int(broken))


def _predict(model: str, settings: dict[str, Any], as_json: bool, plot: Path | None) -> NoReturn:
    """Print what rounding will do when `model` is trained with these arguments of `plan_run`, and exit."""
    from rich.console import Console

    from hf_lowprec.integrations.checkpoint_files.input_errors import InputError, explain_input_errors
    from hf_lowprec.integrations.checkpoint_files.stored_weights import open_weights
    from hf_lowprec.tools.doctor import prediction_report
    from hf_lowprec.tools.doctor.advice import find_problems, recommend
    from hf_lowprec.tools.doctor.planned_run import optimizer_of_checkpoint, plan_run
    from hf_lowprec.tools.doctor.prediction import count_weights, predict_rounding
    from hf_lowprec.tools.doctor.update_sizes import saved_directions
    from hf_lowprec.tools.user_inputs.model_files import find_model_folder

    try:
        folder = find_model_folder(model)
        if settings["optim"] is None:
            settings |= optimizer_of_checkpoint(folder, settings["optim_args"], settings["betas"])
        run = plan_run(**settings)
        stored = open_weights(folder)
        weights = count_weights(stored, _kept_in_fp32(folder, run.keep_fp32))
        prediction = predict_rounding(weights, run, saved_directions(folder, stored))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    problems, advice = find_problems(prediction), recommend(prediction, settings["optim_args"])
    if plot is not None:
        try:
            with explain_input_errors(f"{str(plot)!r} cannot be written"):
                prediction_report.plot_prediction(prediction, plot)
        except InputError as error:
            raise typer.BadParameter(str(error), param_hint="--plot") from None
    if as_json:
        numbers = prediction_report.prediction_numbers(prediction, model, settings["optim_args"])
        typer.echo(json.dumps(numbers, indent=1))
    else:
        width = Console().width
        console = Console(width=max(width, WIDTH))  # a truncated number would be wrong
        console.print(prediction_report.prediction_table(prediction))
        sizes = "as in the checkpoint's moments" if prediction.measured else "as if gradients were noise"
        legend = (
            f"Sizes of updates: {sizes}. lost: the share of updates that rounding discards; vanishing: half or more. "
            "noise: random changes by rounding, relative to how far updates move the weights; blurred: the rest of the "
            "run adds more noise than progress. split: FP32 weights, as BF16 and the 16 missing bits."
        )
        typer.echo(textwrap.fill(legend, width))
        setting = f"optim={run.optim!r}" + (f", optim_args={given!r}" if (given := settings["optim_args"]) else "")
        typer.echo(f"\n{setting}:{'' if problems else ' no problem found.'}")
        for problem in problems:
            typer.echo(textwrap.fill(f"- {problem.message}", width, subsequent_indent="  "))
        typer.echo("\n" + textwrap.fill(str(advice), width, break_long_words=False, break_on_hyphens=False))
    raise typer.Exit(int(bool(problems)))


def _kept_in_fp32(folder: Path, keep_fp32: tuple[str, ...]) -> dict[str, bool] | None:
    """For each tensor of the model in `folder`, whether a cast keeps it in FP32; None if the model cannot be built.

    Raises:
        ValueError: an entry of `keep_fp32` matches nothing, or cannot be applied because the model is unknown.
    """
    from hf_lowprec.casting.cast_plan import make_plan
    from hf_lowprec.integrations.checkpoint_files.input_errors import InputError
    from hf_lowprec.tools.user_inputs.empty_model import build_empty_model, load_config

    try:
        model = build_empty_model(*load_config(str(folder)))
    except InputError as error:
        if keep_fp32:
            raise ValueError(f"keep_fp32={'|'.join(keep_fp32)} needs the model: {error}") from None
        return None
    return {tensor.name: tensor.action == "keep" for tensor in make_plan(model, keep_fp32=keep_fp32).tensors}


def lines(name: str, results: Sequence[CheckResult]) -> list[str]:
    """Format a check's results, given in rank order: one line if all ranks agree, else one for each result."""
    ranks_by_result: dict[CheckResult, list[str]] = {}
    for rank, result in enumerate(results):
        ranks_by_result.setdefault(result, []).append(str(rank))
    return [
        f"{result.status:<8}{name:<11}{result.text}"
        + (f" (rank {', '.join(ranks)})" if len(ranks_by_result) > 1 else "")
        for result, ranks in ranks_by_result.items()
    ]
