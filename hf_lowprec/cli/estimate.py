"""`hf-lowprec estimate MODEL`: estimate the memory needed for training from the model's configuration alone."""

from __future__ import annotations

from collections import Counter
from tempfile import gettempdir
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from hf_lowprec.diagnostics.memory import MemoryUse

FP32 = "FP32 or autocast, AdamW"
"""The row to compare with: torch's AdamW on FP32 weights, which take the same memory with BF16 autocast and without."""
WIDTH = 120
"""Terminal width that fits any table."""


class Row(NamedTuple):
    """The memory of training with one optimizer.

    Attributes:
        name: the row's title: `FP32` or the value of `optim`.
        memory: of weights, gradients and state.
        accumulation: bytes for adding up micro-batches in addition to the gradients, on every GPU.
        fp32_parameters: number of parameters kept in FP32.
    """

    name: str
    memory: MemoryUse
    accumulation: int
    fp32_parameters: int

    @property
    def total(self) -> int:
        """Total bytes."""
        return self.memory.total + self.accumulation

    def per_gpu(self, gpus: int) -> float:
        """Bytes on each of `gpus`."""
        return self.memory.total / gpus + self.accumulation


def estimate(
    model: Annotated[str, typer.Argument(help="A name on the Hub, or a folder; only its config.json is read.")],
    optim: Annotated[
        list[str] | None, typer.Option(help="As in TrainingArguments; can be repeated to compare optimizers.")
    ] = None,
    optim_args: Annotated[str | None, typer.Option(help="As in TrainingArguments; applies to every --optim.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs over which FSDP2 shards the training state.")] = 1,
    gradient_accumulation_steps: Annotated[
        int,
        typer.Option(
            min=1, help="As in TrainingArguments; with more than 1, FSDP2 keeps unsharded gradients on every GPU."
        ),
    ] = 1,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0, help="Memory of each GPU in GiB; shows how much of it remains.")
    ] = None,
) -> None:
    """Estimate the memory of full fine-tuning, excluding activations.

    The model is built without weights and cast as for training: norms stay in
    FP32, and tied weights count once. Not included: activations, the layers
    that FSDP2 gathers during a step, DDP's buckets, and CUDA's own memory.
    """
    from rich.console import Console

    from hf_lowprec.optim.registry import OPTIMIZER_NAMES
    from hf_lowprec.user_inputs.empty_model import build_empty_model, load_config
    from hf_lowprec.user_inputs.input_errors import InputError

    names = list(dict.fromkeys(optim or ("adamw_bf16_kahan", "adamw_bf16_sr")))
    if unknown := [name for name in names if name not in OPTIMIZER_NAMES]:
        raise typer.BadParameter(
            f"unknown: {', '.join(unknown)}; valid are {', '.join(OPTIMIZER_NAMES)}", param_hint="--optim"
        )
    try:
        config, cls = load_config(model)
        steps = gradient_accumulation_steps
        rows = [_fp32_row(build_empty_model(config, cls), gpus, steps)]
        rows += [_low_precision_row(build_empty_model(config, cls), name, optim_args, gpus, steps) for name in names]
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    console = Console(width=max(Console().width, WIDTH))  # a truncated number would be wrong
    console.print(
        f"{model}: {cls.__name__}, {rows[0].memory.parameters:,} parameters, "
        f"{rows[-1].fp32_parameters:,} of which stay in FP32",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    console.print(table(rows, gpus, gpu_memory))


def table(rows: list[Row], gpus: int, gpu_memory: float | None) -> Table:
    """Format the rows as a table, in MiB or GiB."""
    from rich import box
    from rich.table import Table

    power, unit = (30, "GiB") if max(row.total for row in rows) >= 2**32 else (20, "MiB")
    lines = Table(box=box.SIMPLE_HEAD, padding=0)  # fits 80 columns
    lines.add_column("optim", no_wrap=True)
    headings = [f"weights\n{unit}", f"grads\n{unit}", f"state\n{unit}", f"total\n{unit}", "bytes\n/param"]
    headings += [f"per GPU\nof {gpus}"] if gpus > 1 else []
    headings += [f"free of\n{gpu_memory:g} GiB"] if gpu_memory is not None else []
    for heading in headings:
        lines.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        sizes = [sum(row.memory.weights.values()), sum(row.memory.gradients.values()) + row.accumulation]
        cells = [size / 2**power for size in (*sizes, sum(row.memory.state.values()), row.total)]
        cells += [row.total / row.memory.parameters]
        cells += [row.per_gpu(gpus) / 2**power] if gpus > 1 else []
        cells += [gpu_memory - row.per_gpu(gpus) / 2**30] if gpu_memory is not None else []
        lines.add_row(row.name, *(f"{cell:,.2f}" for cell in cells))
    return lines


def _fp32_row(model: nn.Module, gpus: int, steps: int) -> Row:
    """The memory of `model` in FP32 with torch's AdamW."""
    import torch

    from hf_lowprec.diagnostics.memory import MemoryUse

    count = sum(param.numel() for param in model.parameters())
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    gradients = Counter({torch.float32: 4 * trained})
    memory = MemoryUse(count, Counter({torch.float32: 4 * count}), gradients, Counter({torch.float32: 8 * trained}))
    return Row(FP32, memory, _whole_gradients(memory, gpus, steps), count)


def _low_precision_row(model: nn.Module, name: str, optim_args: str | None, gpus: int = 1, steps: int = 1) -> Row:
    """The memory of `model` with one of our optimizers, both set up as Trainer would."""
    import torch
    from transformers import Trainer, TrainingArguments

    from hf_lowprec import cast_model
    from hf_lowprec.diagnostics.memory import expected_memory
    from hf_lowprec.integrations.transformers.optim_args import optim_args_of
    from hf_lowprec.reduction.grad_accumulation import accumulator_bytes, check_grad_accumulation
    from hf_lowprec.user_inputs.input_errors import InputError, explain_input_errors

    with explain_input_errors(f"--optim {name}"):
        args = TrainingArguments(gettempdir(), optim=name, optim_args=optim_args, use_cpu=True, report_to=[])
        options = optim_args_of(args)
        mode = check_grad_accumulation("nearest" if options.grad_accumulation is None else options.grad_accumulation)
        if gpus > 1 and mode == "kahan":
            raise InputError("grad_accumulation='kahan' is not supported with FSDP2; use fp32 or nearest, or one GPU")
        cast_model(model, keep_fp32=options.keep_fp32)
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
        memory = expected_memory(model, cls(model.parameters(), **kwargs))
    fp32_parameters = sum(param.numel() for param in model.parameters() if param.dtype == torch.float32)
    accumulation = accumulator_bytes(model.parameters(), mode) or _whole_gradients(memory, gpus, steps)
    return Row(name, memory, accumulation, fp32_parameters)


def _whole_gradients(memory: MemoryUse, gpus: int, steps: int) -> int:
    """Bytes of the unsharded gradients that FSDP2 keeps on every GPU while it accumulates micro-batches."""
    return memory.gradients.total() if gpus > 1 and steps > 1 else 0
