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
    from hf_lowprec.tools.demo.training import Run
    from hf_lowprec.tools.demo.variants import Variant

STEPS, QUICK_STEPS, OWN_MODEL_STEPS = 1000, 150, 200
"""Optimizer steps per run: by default, with `--quick`, and with `--model`."""

SILENCE = 20.0
"""Seconds after which the step is printed again, in a file."""

_WITH_MODEL = ("dataset", "dataset_config", "text_column", "learning_rate", "batch_size", "length")
"""Options that apply only to a model given with `--model`."""


def demo(
    context: typer.Context,
    output_dir: Annotated[Path, typer.Option(help="Folder for the plots and the numbers.")] = Path("hf_lowprec-demo"),
    quick: Annotated[
        bool, typer.Option("--quick", help=f"{QUICK_STEPS} steps per run; takes under two minutes, start-up included.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help=f"Optimizer steps per run; by default {STEPS} ({OWN_MODEL_STEPS} with --model)."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed for the weights and the data order.")] = 0,
    ways: Annotated[
        str, typer.Option(help="Variants to train, of fp32, nearest, split, sr, kahan.")
    ] = "fp32,nearest,split,sr",
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
    documentation. The variants start from the same weights, see the same data
    in the same order, and use the stock Trainer. Takes minutes on two CPU
    cores; on busy ones, OMP_NUM_THREADS=1 makes it faster.
    """
    from hf_lowprec.tools.demo.variants import VARIANTS

    _require_extra()
    variants = _parse_variants(ways)
    for name in _WITH_MODEL if model is None else ():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(f"{option} needs --model", param_hint=option)
    if model is None and VARIANTS["fp32"] not in variants:
        typer.echo("also training fp32: the second stage starts from its result")
        variants = [VARIANTS["fp32"], *variants]
    steps = steps or (OWN_MODEL_STEPS if model is not None else QUICK_STEPS if quick else STEPS)
    runs = len(variants) if model is not None else 2 * len(variants)
    typer.echo(_plan(runs, steps, model is None))
    from rich.console import Console

    from hf_lowprec.integrations.checkpoint_files.input_errors import InputError
    from hf_lowprec.tools.demo import pretrained, report, stages
    from hf_lowprec.tools.demo.pretrained import quiet_libraries
    from hf_lowprec.tools.demo.text import standard_library_documentation, token_blocks
    from hf_lowprec.tools.demo.training import Settings

    quiet_libraries()
    console = Console()
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="--output-dir") from None
    started = time.perf_counter()
    try:
        if model is None:
            with _Progress(console, runs, steps) as progress:
                done = stages.pretrain_and_fine_tune(variants, steps, seed, output_dir, progress.callbacks)
        else:
            build, encode = pretrained.load_model(model, length)
            text = (
                pretrained.load_text(dataset, dataset_config, text_column)
                if dataset is not None
                else standard_library_documentation()
            )
            blocks = token_blocks(text, encode, length, steps * batch_size, stages.VALIDATION_BLOCKS)
            settings = Settings(steps, batch_size, learning_rate, "constant_with_warmup", max(1, steps // 20), seed)
            with _Progress(console, runs, steps) as progress:
                done = stages.fine_tune(variants, build, blocks, settings, output_dir, progress.callbacks)
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


def _plan(runs: int, steps: int, is_built_in: bool) -> str:
    """A line that says how many runs there are, and how long they take."""
    times = {STEPS: "5 minutes", QUICK_STEPS: "2 minutes"}
    takes = f", about {times[steps]} on two idle CPU cores" if is_built_in and runs == 8 and steps in times else ""
    return f"{runs} runs of {steps} steps{takes}. Loading torch and transformers ..."


class _Progress:
    """Says which run is in progress: in a bar on a terminal, in lines in a file."""

    def __init__(self, console: Console, runs: int, steps: int) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Remaining

        from hf_lowprec.tools.demo import stages

        columns = (TextColumn("{task.description}"), BarColumn(16), TaskProgressColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, Remaining(), console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=runs * steps)
        self._console, self._runs, self._steps = console, runs, steps
        self._run, self._step, self._name, self._said = 0, 0, "", 0.0
        self.callbacks = stages.Progress(self._on_run, self._on_step, self._on_result)

    def _on_run(self, stage: str, variant: Variant) -> None:
        self._run, self._step = self._run + 1, 0
        self._name = f"run {self._run} of {self._runs}: {stage}, {variant.label}"
        self._bar.update(self._task, description=self._name)
        self._say(self._name)

    def _on_step(self) -> None:
        self._step += 1
        self._bar.advance(self._task)
        if time.monotonic() > self._said + SILENCE:
            self._say(f"{self._name}, step {self._step} of {self._steps}")

    def _on_result(self, stage: str, variant: Variant, run: Run) -> None:
        self._console.print(f"{self._name:<40} validation loss {run.start:.4f} → {run.final:.4f}", highlight=False)

    def _say(self, text: str) -> None:
        """Print what the bar shows, where there is none."""
        if not self._console.is_terminal:
            self._console.print(text, highlight=False)
            self._said = time.monotonic()

    def __enter__(self) -> _Progress:
        self._bar.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.__exit__(*exception)
