"""`hf-lowprec estimate MODEL`: estimate the memory needed for training from the model's configuration alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from hf_lowprec.tools.cli.estimate_fit import GIB, as_data, print_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.table import Table
    from transformers import PreTrainedModel

    from hf_lowprec.tools.estimate.activations import Activations
    from hf_lowprec.tools.estimate.rows import Row

WIDTH = 80
"""Columns of the narrowest terminal that is thought of."""


class Setup(NamedTuple):
    """The setup of the training whose memory is estimated.

    Attributes:
        gpus: number of GPUs over which FSDP2 shards the training state.
        gradient_accumulation_steps: as in TrainingArguments.
        gpu_memory: GiB of each GPU, or None.
        batch_size: sequences per GPU, or None.
        sequence_length: tokens per sequence, or None.
        gradient_checkpointing: as in TrainingArguments.
        tp: GPUs over which tensor parallelism shards the matrices of a layer.
        ep: GPUs over which expert parallelism shards the experts.
        zero: the stage of DeepSpeed's ZeRO, or None for FSDP2.
    """

    gpus: int = 1
    gradient_accumulation_steps: int = 1
    gpu_memory: float | None = None
    batch_size: int | None = None
    sequence_length: int | None = None
    gradient_checkpointing: bool = False
    tp: int = 1
    ep: int = 1
    zero: int | None = None


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
    tp: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of these, GPUs that share each layer (tensor parallelism).")
    ] = 1,
    ep: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of these, GPUs that share the experts (expert parallelism).")
    ] = 1,
    zero: Annotated[
        Literal["1", "2", "3"] | None,
        typer.Option(metavar="N", help="DeepSpeed's ZeRO of this stage over --gpus, not FSDP2."),
    ] = None,
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
        typer.Option(min=0, metavar="N", help="Memory of each GPU in GiB; shows how much of it remains."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Sequences per GPU and micro-batch; adds activations.")
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens per sequence, without padding; goes with --batch-size."),
    ] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="As in TrainingArguments.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also show rounded BF16, 8-bit AdamW and Adafactor.")
    ] = False,
    lora: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Also show LoRA of this rank on all linear layers.")
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Find optimizer and options that fit in --gpu-memory; else, exit with 1.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with sizes in bytes.")] = False,
) -> None:
    """Estimate the memory of training.

    The model is built without weights and cast as for training: norms stay in
    FP32, and tied weights count once. With --batch-size and --sequence-length,
    activations are counted in a forward and backward without values. Not
    included: the layers that FSDP2 gathers during a step, DDP's buckets, scratch
    memory of kernels, and CUDA's own memory.

    With --fit, settings are tried from the best to the smallest, by default with
    one sequence of 4096 tokens.
    """
    from hf_lowprec.integrations.checkpoint_files.input_errors import InputError
    from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES
    from hf_lowprec.tools.user_inputs.empty_model import build_empty_model, load_config

    names = list(dict.fromkeys(optim or ("adamw_bf16_split", "adamw_bf16_kahan", "adamw_bf16_sr")))
    if unknown := [name for name in names if name not in OPTIMIZER_NAMES]:
        raise typer.BadParameter(
            f"unknown: {', '.join(unknown)}; valid are {', '.join(OPTIMIZER_NAMES)}", param_hint="--optim"
        )
    if fit and (gpu_memory is None or optim or optim_args or compare):
        raise typer.BadParameter(
            "--fit needs --gpu-memory, and chooses the optimizer: leave out --optim, --optim-args and --compare"
        )
    if fit:
        batch_size, sequence_length = batch_size or 1, sequence_length or 4096
    if (batch_size is None) != (sequence_length is None):
        raise typer.BadParameter("activations need both --batch-size and --sequence-length")
    if gradient_checkpointing and batch_size is None:
        raise typer.BadParameter("--gradient-checkpointing needs --batch-size and --sequence-length")
    stage = None if zero is None else int(zero)
    accumulation = gradient_accumulation_steps
    setup = Setup(gpus, accumulation, gpu_memory, batch_size, sequence_length, gradient_checkpointing, tp, ep, stage)
    if (max(tp, ep) > 1 or zero is not None) and (fit or compare or lora):
        raise typer.BadParameter("--tp, --ep and --zero do not go with --fit, --compare and --lora")
    if max(tp, ep) > 1 and batch_size is not None:
        raise typer.BadParameter("activations are not estimated with --tp and --ep: leave out --batch-size")
    try:
        config, cls = load_config(model)

        def build() -> PreTrainedModel:
            return build_empty_model(config, cls)  # type: ignore[return-value]

        if fit:
            return _fit_settings(model, cls.__name__, build, setup, lora or 16, as_json)
        rows, notes = estimate_rows(build, names, optim_args, setup, compare, lora)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        print(json.dumps({"model": model, "class": cls.__name__, **_as_data(rows, notes, setup)}, indent=2))
    else:
        _print(f"{model}: {cls.__name__}", rows, notes, setup)


def _fit_settings(
    model: str, cls: str, build: Callable[[], PreTrainedModel], setup: Setup, lora: int, as_json: bool
) -> None:
    """Find the settings that fit, and print them.

    Raises:
        InputError: activations cannot be estimated.
        typer.Exit: nothing fits.
    """
    from hf_lowprec.tools.estimate.fit import find_fit

    gpus, steps, gpu_memory, batch_size, length, checkpointing = setup[:6]
    assert gpu_memory is not None and batch_size is not None and length is not None
    found = find_fit(build, gpu_memory * GIB, gpus, batch_size, steps, length, checkpointing, lora)
    if as_json:
        print(json.dumps({"model": model, "class": cls, "setup": setup._asdict(), **as_data(found)}, indent=2))
    else:
        title = f"{model}: {cls}, {steps * batch_size} x {length:,} tokens per GPU and step"
        print_table(title, found, gpu_memory, lora)
    if found.best is None:
        raise typer.Exit(1)


def estimate_rows(
    build: Callable[[], PreTrainedModel],
    names: list[str],
    optim_args: str | None = None,
    setup: Setup = Setup(),  # noqa: B008  # immutable
    compare: bool = False,
    lora: int | None = None,
) -> tuple[list[Row], list[str]]:
    """The rows of the table, and sentences about activations.

    Args:
        build: builds the model in FP32 on the meta device.
        names: values of `optim`.
        optim_args: as in TrainingArguments.
        setup: how the model is trained.
        compare: whether rows of other optimizers are added.
        lora: the rank of a row for LoRA.

    Raises:
        InputError: something is not supported.
    """
    import torch

    from hf_lowprec.tools.estimate.parallelism import Parallelism
    from hf_lowprec.tools.estimate.rows import compared_rows, fp32_row, lora_row, low_precision_row

    settings = setup.gpus, setup.gradient_accumulation_steps
    parallelism = Parallelism(setup.tp, setup.ep, setup.zero)
    parallelism.check(*settings)
    notes: dict[str, None] = (
        {f"Rows of {', '.join(names)}: with optim_args={optim_args!r}.": None} if optim_args else {}
    )
    base = build()
    row = fp32_row(base, *settings, parallelism)
    in_fp32 = _activations(base, "FP32" if setup.zero is None else "BF16", setup, notes)
    rows = [row._replace(activations=in_fp32)]
    in_16_bits: dict[str, Activations | None] = {}
    for name in names:
        cast = build()
        row = low_precision_row(cast, name, optim_args, *settings, parallelism)
        for reason, elements in (row.kept_in_bf16 or {}).items():
            notes[f"{name}: {elements:,} elements of the state stay in BF16: {reason}."] = None
        key = str(row.fp32_parts)
        if key not in in_16_bits:
            in_16_bits[key] = _activations(cast, "BF16", setup, notes)
        rows.append(row._replace(activations=in_16_bits[key]))
    if compare:
        rounded = _activations(build().to(torch.bfloat16), "rounded BF16", setup, notes)
        rows += [
            row._replace(activations=in_fp32 if torch.float32 in row.memory.weights else rounded)
            for row in compared_rows(build, *settings)
        ]
    if lora is not None:
        rows.append(lora_row(build(), lora, *settings))
        if setup.batch_size is not None:
            notes["Activations of LoRA are not estimated."] = None
    return rows, list(notes)


def _activations(model: PreTrainedModel, dtype: str, setup: Setup, notes: dict[str, None]) -> Activations | None:
    """The activations of `model`, with a sentence about them, or about why they are not known, in `notes`."""
    from hf_lowprec.integrations.checkpoint_files.input_errors import InputError
    from hf_lowprec.tools.estimate.activations import choose_attention, estimate_activations

    if setup.batch_size is None or setup.sequence_length is None:
        notes["Activations are not included; add --batch-size and --sequence-length."] = None
        return None
    size = (setup.batch_size, setup.sequence_length)
    attention = choose_attention(model)
    found: dict[bool, Activations] = {}
    for checkpointing in (False, True):
        try:
            found[checkpointing] = estimate_activations(model, *size, checkpointing)
        except InputError as error:
            if checkpointing == setup.gradient_checkpointing:
                notes[f"Activations in {dtype} are not included: {error}."] = None
                return None
    chosen, other = (found.get(each) for each in (setup.gradient_checkpointing, not setup.gradient_checkpointing))
    assert chosen is not None
    words = {True: "with gradient checkpointing", False: "without gradient checkpointing"}
    text = (
        f"Activations of {size[0]} x {size[1]:,} tokens per GPU in {dtype}, {attention} attention, "
        f"{words[setup.gradient_checkpointing]}: {_size(chosen.peak)}"
    )
    if chosen.layers:
        text += (
            f" = {chosen.layers} layers x {_size(chosen.per_layer)} + {_size(chosen.rest)} for logits, loss, the rest"
        )
    if other is not None:
        text += f"; {words[not setup.gradient_checkpointing]}: {_size(other.peak)}"
    notes[f"{text}."] = None
    return chosen


def _size(nbytes: float) -> str:
    return f"{nbytes / GIB:,.2f} GiB" if nbytes >= GIB else f"{nbytes / (1 << 20):,.2f} MiB"


def _print(title: str, rows: list[Row], notes: list[str], setup: Setup) -> None:
    from rich.console import Console

    console = Console(width=max(Console().width, WIDTH))
    filled = table(rows, setup)
    _fit(filled, [row.name for row in rows], console)
    plain: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}
    kept = next(row.fp32_parts for row in rows if row.fp32_parts is not None)
    count = f"{rows[0].memory.parameters:,} parameters, {sum(kept.values()):,} of which stay in FP32"
    console.print(f"{title}, {count}", **plain)
    for reason, number in kept.items():
        console.print(f"  {number:,} in FP32: {reason}", **plain)
    console.print(filled)
    if setup.zero is None:
        console.print("Autocast (bf16=True) keeps weights, gradients and state in FP32 too.", **plain)
    else:
        console.print("DeepSpeed's buckets (reduce_bucket_size, allgather_bucket_size) are not included.", **plain)
    if setup.gpus > 1:
        console.print(
            f"Weights, grads, state, total and bytes per parameter are those of all {setup.gpus} GPUs.", **plain
        )
    for note in notes:
        console.print(note, **plain)


def _fit(table: Table, names: list[str], console: Console) -> None:
    """Wrap the names in the first column of `table` if it is too wide; widen `console` if that is not enough."""
    from rich.measure import Measurement

    width = Measurement.get(console, console.options.update(width=1000), table).maximum
    longest, longest_word = (max(map(len, words)) for words in (names, " ".join(names).split()))
    if width > console.width:
        table.columns[0].width = max(longest_word, longest - (width - console.width))
        console.width = max(console.width, width - longest + table.columns[0].width)  # a cut number would be wrong


def table(rows: list[Row], setup: Setup) -> Table:
    """Format the rows as a table, in MiB or GiB."""
    from rich import box
    from rich.table import Table

    gpus, gpu_memory = setup.gpus, setup.gpu_memory
    with_host = any(row.on_host(gpus) for row in rows)
    with_step, with_activations = any(row.step for row in rows), any(row.activations for row in rows)
    peaks = [row.peak(gpus, setup.gradient_accumulation_steps) for row in rows]
    power, unit = (
        (30, "GiB") if max(*(row.total(gpus) for row in rows), *(each or 0 for each in peaks)) >= 2**32 else (20, "MiB")
    )
    lines = Table(box=box.SIMPLE_HEAD, padding=0)  # fits 80 columns
    lines.add_column("optim")
    headings = [f"weights\n{unit}", f"grads\n{unit}", f"state\n{unit}"]
    headings += [f"in step\n{unit}"] if with_step else []
    headings += [f"on host\n{unit}"] if with_host else []
    headings += [f"total\n{unit}", "bytes\n/param"]
    headings += [f"per GPU\nof {gpus}"] if gpus > 1 else []
    headings += ["activa-\ntions", "peak of\na GPU"] if with_activations else []
    if gpu_memory is not None:
        headings += (
            [f"free of\n{gpu_memory:g} GiB"] if with_activations else [f"left for\nactivations\nof {gpu_memory:g} GiB"]
        )
    for heading in headings:
        lines.add_column(heading, justify="right", no_wrap=True)
    for row, peak in zip(rows, peaks, strict=True):
        used = row.per_gpu(gpus) if peak is None else peak
        sizes: list[float | None] = [row.memory.weights.total(), row.gradients(gpus), row.memory.state.total()]
        sizes += [gpus * row.step] if with_step else []
        sizes += [row.on_host(gpus)] if with_host else []
        cells = [*_in_units(sizes, power), *_in_units([row.total(gpus)], power)]
        cells += [f"{row.total(gpus) / row.memory.parameters:,.2f}"]
        cells += _in_units([row.per_gpu(gpus)], power) if gpus > 1 else []
        if with_activations:
            cells += _in_units([None if row.activations is None else row.activations.peak, peak], power)
        if gpu_memory is not None:
            cells += ["-" if with_activations and peak is None else f"{gpu_memory - used / GIB:,.2f}"]
        lines.add_row(row.name, *cells)
    return lines


def _in_units(sizes: list[float | None], power: int) -> list[str]:
    return ["-" if size is None else f"{size / 2**power:,.2f}" for size in sizes]


def _as_data(rows: list[Row], notes: list[str], setup: Setup) -> dict[str, Any]:
    """The estimate as JSON data: bytes over all GPUs, except where the key says `per_gpu`."""
    gpus = setup.gpus
    return {
        "parameters": rows[0].memory.parameters,
        "setup": setup._asdict(),
        "rows": [
            {
                "name": row.name,
                "weights": row.memory.weights.total(),
                "gradients": row.gradients(gpus),
                "state": row.memory.state.total(),
                "step_per_gpu": row.step,
                "host": row.on_host(gpus),
                "total": row.total(gpus),
                "bytes_per_parameter": row.total(gpus) / row.memory.parameters,
                "per_gpu": row.per_gpu(gpus),
                "bytes_per_parameter_per_gpu": row.per_gpu(gpus) / row.memory.parameters,
                "activations_per_gpu": None if row.activations is None else row.activations.peak,
                "activations_per_layer": None if row.activations is None else row.activations.per_layer,
                "peak_per_gpu": row.peak(gpus, setup.gradient_accumulation_steps),
                "kept_in_fp32": row.fp32_parts,
                "state_kept_in_bf16": row.kept_in_bf16,
            }
            for row in rows
        ],
        "notes": notes,
    }
