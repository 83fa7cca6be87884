"""`hf-lowprec demo`: the same training in FP32, in naive BF16 and in ours, side by side, on real text."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from hf_lowprec.cli.demo.stages import Stage
    from hf_lowprec.cli.demo.training import Way

STEPS, QUICK_STEPS, OWN_MODEL_STEPS = 1000, 150, 200
"""Optimizer steps per run: by default, with `--quick`, and with `--model`."""


_WITH_MODEL = ("dataset", "dataset_config", "text_column", "learning_rate", "batch_size", "length")
"""Options that say how to train a model of one's own."""


def demo(
    context: typer.Context,
    output_dir: Annotated[Path, typer.Option(help="Folder for the plot and the numbers.")] = Path("hf_lowprec-demo"),
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_STEPS} steps per run: under two minutes.")] = False,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help=f"Optimizer steps per run, {STEPS} if not given ({OWN_MODEL_STEPS} with --model)."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and the data order.")] = 0,
    ways: Annotated[str, typer.Option(help="Which ways to train, separated by commas.")] = "fp32,nearest,kahan,sr",
    model: Annotated[
        str | None, typer.Option(help="Fine-tune this model instead: a name on the hub, or a folder.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="What to fine-tune it on: a name on the hub, a file (txt, json, csv, parquet) or a folder."),
    ] = None,
    dataset_config: Annotated[str | None, typer.Option(help="The configuration of a dataset on the hub.")] = None,
    text_column: Annotated[str, typer.Option(help="The dataset's column that holds the text.")] = "text",
    learning_rate: Annotated[float, typer.Option(min=0, help="Peak, with --model.")] = 2e-5,
    batch_size: Annotated[int, typer.Option(min=1, help="Blocks per step, with --model.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens per block, with --model.")] = 128,
) -> None:
    """Train the same model in FP32, naive BF16 and our BF16, and compare.

    Without --model nothing is downloaded: a small byte-level Llama is trained
    on the standard library's source, then fine-tuned on its documentation, each
    in four ways, from the same weights and in the same data order, with the
    stock Trainer. Takes minutes on two CPU cores.
    """
    _require_extra()
    from rich.console import Console

    from hf_lowprec.cli.demo import pretrained, report, stages
    from hf_lowprec.cli.demo.text import standard_library_documentation, token_blocks
    from hf_lowprec.cli.demo.training import Settings
    from hf_lowprec.cli.inputs import InputError

    quiet_libraries()
    console = Console()
    chosen = _ways(ways)
    for name in _WITH_MODEL if model is None else ():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(f"{option} needs --model", param_hint=option)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="--output-dir") from None
    started = time.perf_counter()
    try:
        if model is None:
            chosen = _with_fp32(chosen, console)
            steps = steps or (QUICK_STEPS if quick else STEPS)
            with _Bar(console, 2 * len(chosen) * steps) as progress:
                done = stages.pretrain_and_fine_tune(chosen, steps, seed, output_dir, progress.calls)
        else:
            steps = steps or OWN_MODEL_STEPS
            build, encode = pretrained.load_model(model, length)
            text = (
                pretrained.load_text(dataset, dataset_config, text_column)
                if dataset is not None
                else standard_library_documentation()
            )
            blocks = token_blocks(text, encode, length, steps * batch_size, stages.VALIDATION_BLOCKS)
            settings = Settings(steps, batch_size, learning_rate, "constant_with_warmup", max(1, steps // 20), seed)
            with _Bar(console, len(chosen) * steps) as progress:
                done = stages.fine_tune(chosen, build, blocks, settings, output_dir, progress.calls)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    seconds = time.perf_counter() - started
    written = report.write(done, output_dir, seed, model or stages.SMALL_LLAMA, seconds)
    _show(console, done, written, seconds)


def quiet_libraries() -> None:
    """Turn off the progress bars and the advice of transformers and datasets, for this process."""
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def _show(console: Console, stages: Sequence[Stage], written: Sequence[Path], seconds: float) -> None:
    from hf_lowprec.cli.demo import report

    for stage in stages:
        console.print()
        console.print(report.table(stage))
    console.print(report.legend(stages), style="dim", highlight=False)
    console.print()
    console.print(f"{seconds / 60:.1f} minutes in all. Written:", highlight=False)
    for path in written:
        console.print(f"  {path}", highlight=False, soft_wrap=True)


def _require_extra() -> None:
    missing = [name for name in ("datasets", "matplotlib") if find_spec(name) is None]
    if missing:
        typer.echo(f"the demo needs {' and '.join(missing)}: pip install 'hf-lowprec[demo]'", err=True)
        raise typer.Exit(1)


def _ways(names: str) -> list[Way]:
    from hf_lowprec.cli.demo.training import WAYS

    asked = dict.fromkeys(name.strip() for name in names.split(",") if name.strip())
    if unknown := [name for name in asked if name not in WAYS]:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; there are {', '.join(WAYS)}", param_hint="--ways")
    if not asked:
        raise typer.BadParameter(f"none given; there are {', '.join(WAYS)}", param_hint="--ways")
    return [way for name, way in WAYS.items() if name in asked]


def _with_fp32(ways: list[Way], console: Console) -> list[Way]:
    """Fine-tuning starts from FP32's result."""
    from hf_lowprec.cli.demo.training import WAYS

    if WAYS["fp32"] in ways:
        return ways
    console.print("fp32 is trained too: its result is what the second stage starts from")
    return [WAYS["fp32"], *ways]


class _Bar:
    """One progress bar over all runs, and a line for each that is done."""

    def __init__(self, console: Console, steps: int) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        from hf_lowprec.cli.demo import stages

        self._progress = Progress(
            TextColumn("{task.description}"),
            *(
                BarColumn(bar_width=16),
                MofNCompleteColumn(),
                TextColumn("steps"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            ),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=steps)
        self.calls = stages.Progress(
            on_run=lambda stage, way: self._progress.update(self._task, description=f"{stage}, {way.label}"),
            on_step=lambda: self._progress.advance(self._task),
            on_result=lambda stage, way, run: self._progress.print(
                f"{stage + ',':<13} {way.label:<16} validation loss {run.start:.4f} → {run.final:.4f}", highlight=False
            ),
        )

    def __enter__(self) -> _Bar:
        self._progress.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._progress.__exit__(*exception)
