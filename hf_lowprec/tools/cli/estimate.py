"""`hf-lowprec estimate MODEL`: estimate the memory needed for training from the model's configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedModel

    from hf_lowprec.tools.estimate.activations import Activations
    from hf_lowprec.tools.estimate.fit import Setting
    from hf_lowprec.tools.estimate.memory import Row

GIB = 1 << 30


def estimate(
    model: Annotated[str, typer.Argument(help="A name on the Hub, or a folder; only its config.json is read.")],
    optim: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="As in TrainingArguments; can be repeated to compare optimizers."),
    ] = None,
    optim_args: Annotated[str | None, typer.Option(help="As in TrainingArguments; applies to every --optim.")] = None,
    gpus: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of GPUs over which FSDP2 shards the training state.")
    ] = 1,
    gradient_accumulation_steps: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="As in TrainingArguments; with more than 1, FSDP2 keeps unsharded gradients on every GPU.",
        ),
    ] = 1,
    gpu_memory: Annotated[
        float | None,
        typer.Option(min=0, metavar="N", help="Memory of each GPU in GiB; shows how much of it is left."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Sequences per GPU and micro-batch; adds activations.")
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens per sequence, without padding; needed with --batch-size."),
    ] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="As in TrainingArguments.")
    ] = False,
    chunked_loss: Annotated[
        bool, typer.Option("--chunked-loss", help="Assume TRL's loss, which is computed in chunks of the logits.")
    ] = False,
    fit: Annotated[
        bool, typer.Option("--fit", help="Find an optimizer and options that fit in --gpu-memory, or exit with 1.")
    ] = False,
) -> None:
    """Estimate the memory of training.

    The model is built without weights and cast as for training: norms stay in
    FP32, and tied weights count once. With --batch-size and --sequence-length,
    activations are counted in a forward and backward pass that computes no
    values. Not included are the layers that FSDP2 gathers during a step, DDP's
    buckets, scratch memory of kernels, and CUDA's own memory.

    With --fit, it tries settings from the best to those that take the least
    memory, by default with one sequence of 4096 tokens.
    """
    import torch
    from rich.console import Console

    from hf_lowprec.integrations.checkpoint_files.input_files import InputError
    from hf_lowprec.integrations.transformers.named_models import build_empty_model, load_config
    from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES
    from hf_lowprec.tools.estimate.activations import estimate_activations
    from hf_lowprec.tools.estimate.fit import find_fit
    from hf_lowprec.tools.estimate.memory import fp32_row, low_precision_row

    names = list(dict.fromkeys(optim or ("adamw_bf16_split", "adamw_bf16_kahan", "adamw_bf16_sr")))
    if unknown := [name for name in names if name not in OPTIMIZER_NAMES]:
        raise typer.BadParameter(
            f"unknown: {', '.join(unknown)}; valid are {', '.join(OPTIMIZER_NAMES)}", param_hint="--optim"
        )
    if fit and (gpu_memory is None or optim or optim_args):
        raise typer.BadParameter("--fit needs --gpu-memory, and chooses the optimizer: leave out --optim, --optim-args")
    if (batch_size is None) != (sequence_length is None) and not fit:
        raise typer.BadParameter("activations need both --batch-size and --sequence-length")
    if (gradient_checkpointing or chunked_loss) and batch_size is None and not fit:
        raise typer.BadParameter("--gradient-checkpointing and --chunked-loss need --batch-size and --sequence-length")
    notes = ["Autocast (bf16=True) keeps weights, gradients and state in FP32 too."]
    if gpus > 1:
        notes.append(f"Weights, grads, state, total and bytes per parameter are those of all {gpus} GPUs.")
    if optim_args:
        notes.append(f"Rows of {', '.join(names)}: with optim_args={optim_args!r}.")

    def activations(model: PreTrainedModel, dtype: str) -> Activations | None:
        if batch_size is None or sequence_length is None:
            return None
        try:
            return estimate_activations(model, batch_size, sequence_length, gradient_checkpointing, chunked_loss)
        except InputError as error:
            notes.append(f"Activations in {dtype} are not included: {error}.")
            return None

    try:
        config, cls = load_config(model)

        def build() -> PreTrainedModel:
            return build_empty_model(config, cls)  # type: ignore[return-value]

        base, steps = build(), gradient_accumulation_steps
        if fit and gpu_memory is not None:
            size = batch_size or 1, sequence_length or 4096
            settings = find_fit(build, gpu_memory * GIB, gpus, *size, steps, gradient_checkpointing, chunked_loss)
        else:
            rows = [fp32_row(base, gpus, steps)._replace(activations=activations(base, "FP32"))]
            for name in names:
                cast = build()
                row = low_precision_row(cast, name, optim_args, gpus, steps)
                counted = activations(cast, "BF16") if name == names[0] else rows[-1].activations
                rows.append(row._replace(activations=counted))
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    console = Console(width=1000)  # a cut number would be wrong
    title, parameters = f"{model}: {cls.__name__}", sum(param.numel() for param in base.parameters())
    if fit and gpu_memory is not None:
        print(f"{title}, {steps * size[0]} x {size[1]:,} tokens per GPU and step")
        console.print(table_of_settings(settings))
        print(explain(settings, gpu_memory, 4 * parameters))
        raise typer.Exit(int(best(settings) is None))
    print(f"{title}, {parameters:,} parameters, {rows[1].memory.weights[torch.float32] // 4:,} of which stay in FP32")
    if batch_size is None:
        notes.append("Activations are not included; add --batch-size and --sequence-length.")
    console.print(table(rows, gpus, steps, gpu_memory))
    print("\n".join(notes))


def table(rows: list[Row], gpus: int, gradient_accumulation_steps: int, gpu_memory: float | None) -> Table:
    """Format the rows as a table, in GiB."""
    from rich import box
    from rich.table import Table

    with_step = any(row.step for row in rows)
    with_host = any(row.on_host(gpus) for row in rows)
    with_activations = any(row.activations for row in rows)
    lines = Table(box=box.SIMPLE_HEAD, padding=0)  # fits 80 columns
    lines.add_column("optim")
    headings = ["weights\nGiB", "grads\nGiB", "state\nGiB"]
    headings += ["in step\nGiB"] if with_step else []
    headings += ["on host\nGiB"] if with_host else []
    headings += ["total\nGiB", "bytes\n/param"]
    headings += [f"per GPU\nof {gpus}"] if gpus > 1 else []
    headings += ["activa-\ntions", "peak of\na GPU"] if with_activations else []
    if gpu_memory is not None:
        what = "free of\n" if with_activations else "left for\nactivations\nof "
        headings += [f"{what}{gpu_memory:g} GiB"]
    for heading in headings:
        lines.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        peak = row.peak(gpus, gradient_accumulation_steps)
        sizes: list[float | None] = [row.memory.weights.total(), row.gradients(gpus), row.memory.state.total()]
        sizes += [gpus * row.step] if with_step else []
        sizes += [row.on_host(gpus)] if with_host else []
        cells = [*_in_gib(*sizes, row.total(gpus)), f"{row.total(gpus) / row.memory.parameters:,.2f}"]
        cells += _in_gib(row.per_gpu(gpus)) if gpus > 1 else []
        cells += _in_gib(row.activations and row.activations.peak, peak) if with_activations else []
        if gpu_memory is not None:
            used = peak if with_activations else row.per_gpu(gpus)
            cells += _in_gib(None if used is None else gpu_memory * GIB - used)
        lines.add_row(row.name, *cells)
    return lines


def _in_gib(*sizes: float | None) -> list[str]:
    return ["-" if size is None else f"{size / GIB:,.2f}" for size in sizes]


def best(settings: list[Setting]) -> Setting | None:
    """The first setting that fits."""
    return next((setting for setting in settings if setting.missing <= 0), None)


def table_of_settings(settings: list[Setting]) -> Table:
    """Format what `find_fit` has found as a table; an arrow marks the first setting that fits."""
    from rich import box
    from rich.table import Table

    lines = Table(box=box.SIMPLE_HEAD, padding=0)  # fits 80 columns
    lines.add_column("")
    lines.add_column("setting", no_wrap=True)
    for heading in ("micro-\nbatch", "accu-\nmulate", "peak\nGiB", "disk\nGiB", "host\nGiB"):
        lines.add_column(heading, justify="right", no_wrap=True)
    lines.add_column("fits")
    for each in settings:
        sizes = [str(each.batch_size), str(each.gradient_accumulation_steps), *_in_gib(each.peak, each.checkpoint)]
        sizes += _in_gib(each.host) if each.host else [""]
        mark, fits = "→" if each is best(settings) else "", "yes" if each.missing <= 0 else "no"
        lines.add_row(mark, each.option.title, *sizes, fits)
    return lines


def explain(settings: list[Setting], gpu_memory: float, load_in_fp32: int) -> str:
    """What stands below the table of settings: what its words mean, and the lines to paste for the best setting.

    Args:
        settings: what `find_fit` has found.
        gpu_memory: GiB of each GPU.
        load_in_fp32: bytes of host memory for the model in FP32.
    """
    from hf_lowprec.tools.estimate.fit import RESERVE

    lines = [
        f"A setting fits if its peak leaves {RESERVE / GIB:g} of {gpu_memory:g} GiB free, for CUDA and for kernels.",
        "disk: a checkpoint. host: host memory. release: gradient release.",
        f"Loading the model in FP32 takes {load_in_fp32 / GIB:,.2f} GiB of host memory in each process.",
    ]
    if any(each.sync_each_batch for each in settings):
        lines.append("Where whole gradients do not fit, FSDP2 reduces them after every micro-batch (sync_each_batch).")
    chosen = best(settings)
    chunked = next((each for each in settings if each.missing <= each.chunked_loss_saves), chosen)
    if chunked is not chosen and chunked is not None:
        (peak,) = _in_gib(chunked.peak - chunked.chunked_loss_saves)
        lines.append(
            f"With TRL's trainers (--chunked-loss), the peak of {chunked.option.title} is {peak} GiB: it fits."
        )
    if chosen is None:
        least = min(settings, key=lambda setting: setting.peak)
        lines += [
            f"\nNothing fits: {least.missing / GIB:,.2f} GiB are missing for {least.option.title}.",
            "Try a smaller --batch-size or --sequence-length, or more --gpus. Or train adapters.",
        ]
        return "\n".join(lines)
    if "clip=delayed" in chosen.option.optim_args:
        lines.append("clip=delayed clips by the norm of the step before: use a warmup.")
    return "\n".join([*lines, "", _arguments(chosen)])


def _arguments(setting: Setting) -> str:
    """The lines of a script."""
    values: dict[str, Any] = {"output_dir": "out", "optim": setting.option.optim}
    if setting.option.optim_args:
        values["optim_args"] = setting.option.optim_args
    values["gradient_checkpointing"] = setting.option.gradient_checkpointing
    values["per_device_train_batch_size"] = setting.batch_size
    values["gradient_accumulation_steps"] = setting.gradient_accumulation_steps
    if setting.sync_each_batch:
        values["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    lines = ("    {}={},\n".format(key, repr(value).replace("'", '"')) for key, value in values.items())
    return f"args = TrainingArguments(\n{''.join(lines)})"
