"""`hf-lowprec doctor`: check that training works on this machine, or predict how many updates a planned run loses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_lowprec.tools.machine_checks import CheckResult

_RUN = "Planned run"


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(help="A model to train: a folder, or a name on the Hub. Without it, check this machine."),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="The peak learning rate.", rich_help_panel=_RUN)] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="The number of steps.", rich_help_panel=_RUN)] = None,
    scheduler: Annotated[
        str, typer.Option(help="As lr_scheduler_type in TrainingArguments.", rich_help_panel=_RUN)
    ] = "linear",
    warmup_steps: Annotated[
        float, typer.Option(min=0, help="Warm-up steps; below 1, a share of all steps.", rich_help_panel=_RUN)
    ] = 0.0,
    weight_decay: Annotated[float, typer.Option(min=0, help="As in TrainingArguments.", rich_help_panel=_RUN)] = 0.0,
    optim: Annotated[str, typer.Option(help="As in TrainingArguments.", rich_help_panel=_RUN)] = "adamw_torch",
) -> None:
    """Check this machine, or predict how many updates a run loses.

    The check tries each part of training on a small scale: packages, optimizer
    names, backends, gradient sums, a short training run. It exits with 1 if
    something is broken. Missing parts that have a slower substitute are reported
    but are not errors. To check gradient sums between processes, launch it like
    a training script: accelerate launch -m hf_lowprec doctor

    With MODEL, it reads the weights, computes the run's learning rates, and
    shows what share of the updates rounding would lose and how much noise it
    would add. It exits with 1 if the rounding of --optim loses more than half
    of the updates, or if its noise moves weights over ten times as far as the
    updates do.
    """
    if model is None:
        for option, value in (("--lr", lr), ("--steps", steps)):
            if value is not None:
                raise typer.BadParameter("it is for predictions, which need a MODEL", param_hint=option)
        _check_machine()
    if lr is None or steps is None:
        raise typer.BadParameter(f"with MODEL, {'--lr' if lr is None else '--steps'} must be given", param_hint="MODEL")
    from hf_lowprec.integrations.checkpoint_files.stored_tensors import open_weights
    from hf_lowprec.integrations.transformers.named_models import find_model_folder
    from hf_lowprec.tools.prediction import count_weights, plan_run, predict_rounding, recommend, suits

    try:
        run = plan_run(optim, lr, steps, scheduler, warmup_steps, weight_decay)
        predicted = predict_rounding(count_weights(open_weights(find_model_folder(model))), run)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(recommend(predicted, run.algorithm) + "\n")
    typer.echo("rounding    lost updates  noise")
    for mode, found in predicted.items():
        typer.echo(f"{mode:<12}{round(found.lost, 3) + 0.0:>12.1%}  {found.noise:5.2f}")  # + 0.0 makes 0 of -0
    typer.echo("\nnoise: random changes by rounding, relative to how far updates move the weights")
    if not suits(predicted, run.rounding):
        typer.echo(f"exit status 1: {optim} ({run.rounding}) does not suit this run")
        raise typer.Exit(1)


def _check_machine() -> NoReturn:
    """Run all checks, print their results, and exit."""
    import torch.distributed as dist

    from hf_lowprec.reduction.collectives import gather_objects
    from hf_lowprec.tools import machine_checks as checks

    broken = False
    with checks.joined_ranks():
        for name, check in checks.CHECKS.items():
            result = checks.run_check(check)
            if result.unexpected and dist.is_initialized() and dist.get_world_size() > 1:
                typer.echo(f"{result.status:<8}{name:<11}{result.text} (rank {dist.get_rank()})", err=True)
                checks.abort_launch()
            results = gather_objects(result, "checking this machine")
            broken |= any(result.status == checks.FAILED for result in results)
            if not dist.is_initialized() or dist.get_rank() == 0:
                for line in lines(name, results):
                    typer.echo(line)
    raise typer.Exit(int(broken))


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
