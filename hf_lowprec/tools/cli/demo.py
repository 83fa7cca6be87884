"""`hf-lowprec demo`: compare training in FP32, naive BF16 and hf_lowprec's BF16 on real text."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from hf_lowprec.tools.demo.stages import Stage
    from hf_lowprec.tools.demo.variants import Variant

STEPS, QUICK_STEPS, OWN_MODEL_STEPS = 1000, 150, 200
"""Optimizer steps per run: by default, with `--quick`, and with `--model`."""

_WITH_MODEL = ("dataset", "dataset_config", "text_column", "learning_rate", "batch_size", "length")
"""Options that apply only to a model given with `--model`."""


def demo(
    context: typer.Context,
    output_dir: Annotated[Path, typer.Option(help="Folder for the plot and the numbers.")] = Path("hf_lowprec-demo"),
    quick: Annotated[
        bool, typer.Option("--quick", help=f"{QUICK_STEPS} steps per run; takes under two minutes.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help=f"Optimizer steps per run; by default {STEPS} ({OWN_MODEL_STEPS} with --model)."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed for the weights and the data order.")] = 0,
    ways: Annotated[str, typer.Option(help="Variants to train, separated by commas.")] = "fp32,nearest,kahan,sr",
    model: Annotated[
        str | None, typer.Option(help="Fine-tune this model instead: a name on the Hub, or a folder.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Dataset to fine-tune it on: a name on the Hub, a file (txt, json, csv, parquet) or a folder."
        ),
    ] = None,
    dataset_config: Annotated[str | None, typer.Option(help="Configuration name of a dataset on the Hub.")] = None,
    text_column: Annotated[str, typer.Option(help="Column of the dataset that contains the text.")] = "text",
    learning_rate: Annotated[float, typer.Option(min=0, help="Peak learning rate, with --model.")] = 2e-5,
    batch_size: Annotated[int, typer.Option(min=1, help="Blocks per step, with --model.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens per block, with --model.")] = 128,
) -> None:
    """Train the same model in FP32, naive BF16 and hf_lowprec's BF16, and compare.

    Without --model, nothing is downloaded: a small byte-level Llama is trained
    on the source code of Python's standard library, then fine-tuned on Python's
    documentation. The four variants start from the same weights, see the same
    data in the same order, and use the stock Trainer. Takes minutes on two CPU
    cores.
    """
    _require_extra()
    from rich.console import Console

    from hf_lowprec.integrations.checkpoint_files.input_errors import InputError
    from hf_lowprec.tools.demo import pretrained, report, stages
    from hf_lowprec.tools.demo.pretrained import quiet_libraries
    from hf_lowprec.tools.demo.text import standard_library_documentation, token_blocks
    from hf_lowprec.tools.demo.training import Settings

    quiet_libraries()
    console = Console()
    variants = _parse_variants(ways)
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
            variants = _add_fp32(variants, console)
            steps = steps or (QUICK_STEPS if quick else STEPS)
            with _ProgressBar(console, 2 * len(variants) * steps) as bar:
                done = stages.pretrain_and_fine_tune(variants, steps, seed, output_dir, bar.callbacks)
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
            with _ProgressBar(console, len(variants) * steps) as bar:
                done = stages.fine_tune(variants, build, blocks, settings, output_dir, bar.callbacks)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    seconds = time.perf_counter() - started
    paths = report.write(done, output_dir, seed, model or stages.SMALL_LLAMA, seconds)
    _print_results(console, done, paths, seconds)


def _print_results(console: Console, stages: Sequence[Stage], paths: Sequence[Path], seconds: float) -> None:
    from hf_lowprec.tools.demo import report

    for stage in stages:
        console.print()
        console.print(report.table(stage))
    console.print(report.legend(stages), style="dim", highlight=False)
    console.print()
    console.print(f"{seconds / 60:.1f} minutes in total. Files written:", highlight=False)
    for path in paths:
        console.print(f"  {path}", highlight=False, soft_wrap=True)


def _require_extra() -> None:
    """Exit with a hint if the packages of the extra `demo` are not installed."""
    missing = [name for name in ("datasets", "matplotlib") if find_spec(name) is None]
    if missing:
        typer.echo(f"the demo needs {' and '.join(missing)}: pip install 'hf-lowprec[demo]'", err=True)
        raise typer.Exit(1)


def _parse_variants(names: str) -> list[Variant]:
    """The variants named by `--ways`, in the order of `VARIANTS`."""
    from hf_lowprec.tools.demo.variants import VARIANTS

    chosen = dict.fromkeys(name.strip() for name in names.split(",") if name.strip())
    if unknown := [name for name in chosen if name not in VARIANTS]:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; valid are {', '.join(VARIANTS)}", param_hint="--ways")
    if not chosen:
        raise typer.BadParameter(f"none given; valid are {', '.join(VARIANTS)}", param_hint="--ways")
    return [variant for name, variant in VARIANTS.items() if name in chosen]


def _add_fp32(variants: list[Variant], console: Console) -> list[Variant]:
    """Add FP32 if it is missing, because fine-tuning starts from its result."""
    from hf_lowprec.tools.demo.variants import VARIANTS

    if VARIANTS["fp32"] in variants:
        return variants
    console.print("also training fp32: the second stage starts from its result")
    return [VARIANTS["fp32"], *variants]


class _ProgressBar:
    """One progress bar over all runs, and a line for each run when it ends."""

    def __init__(self, console: Console, steps: int) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        from hf_lowprec.tools.demo import stages

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
        self.callbacks = stages.Progress(
            on_run=lambda stage, variant: self._progress.update(self._task, description=f"{stage}, {variant.label}"),
            on_step=lambda: self._progress.advance(self._task),
            on_result=lambda stage, variant, run: self._progress.print(
                f"{stage + ',':<13} {variant.label:<16} validation loss {run.start:.4f} → {run.final:.4f}",
                highlight=False,
            ),
        )

    def __enter__(self) -> _ProgressBar:
        self._progress.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._progress.__exit__(*exception)
