"""Print what `hf-lowprec estimate --fit` has found: a table, and the lines to paste for the best setting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_lowprec.tools.estimate.fit import Fit, Setting

GIB = 1 << 30


def print_table(title: str, fit: Fit, gpu_memory: float, lora: int) -> None:
    """Print the settings and what to do.

    Args:
        title: the first line.
        fit: what was found.
        gpu_memory: GiB of each GPU.
        lora: the rank of the adapters.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from hf_lowprec.tools.estimate.fit import RESERVE

    table = Table(box=box.SIMPLE_HEAD, padding=0)  # fits 80 columns
    table.add_column("")
    table.add_column("setting", no_wrap=True)
    for heading in ("micro-\nbatch", "accu-\nmulate", "peak\nGiB", "disk\nGiB", "host\nGiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("fits")
    for each in fit.settings:
        sizes = str(each.batch_size), str(each.gradient_accumulation_steps)
        in_gib = (f"{number / GIB:,.2f}" if number else "" for number in (each.peak, each.checkpoint, each.host))
        mark, fits = "→" if each is fit.best else "", "yes" if each.missing <= 0 else "no"
        name = each.option.title.replace("gradient release", "release")
        name = name.replace("states and gradients on the host", "states, gradients on host")
        table.add_row(mark, name, *sizes, *in_gib, fits)
    print(title)
    Console(width=max(Console().width, 80)).print(table)
    print(
        f"A setting fits if its peak leaves {RESERVE / GIB:g} of {gpu_memory:g} GiB free, for CUDA and for kernels.\n"
        "disk: a checkpoint. host: host memory. release: gradient release.\n"
        f"Loading the model in FP32 takes {fit.load_in_fp32 / GIB:,.2f} GiB of host memory in each process."
    )
    if any(each.sync_each_batch for each in fit.settings):
        print("Where whole gradients do not fit, FSDP2 reduces them after every micro-batch (sync_each_batch).")
    if fit.best is not None:
        if "clip=delayed" in fit.best.option.optim_args:
            print("clip=delayed clips by the norm of the step before: use a warmup.")
        print(f"\n{_arguments(fit.best)}")
        return
    least = min(fit.settings, key=lambda setting: setting.peak)
    print(
        f"\nNothing fits: {least.missing / GIB:,.2f} GiB are missing for {least.option.title}.\n"
        "Try a smaller --batch-size or --sequence-length, or more --gpus. Or train adapters:\n"
        f"LoRA of rank {lora} takes {fit.adapters / GIB:,.2f} GiB per GPU and activations, which are not estimated."
    )


def _arguments(setting: Setting) -> str:
    """The lines of a script."""
    values = {"output_dir": "out", **{key: value for key, value in _chosen(setting).items() if value is not None}}
    lines = ("    {}={},\n".format(key, repr(value).replace("'", '"')) for key, value in values.items())
    return f"args = TrainingArguments(\n{''.join(lines)})"


def _chosen(setting: Setting) -> dict[str, Any]:
    """Arguments of TrainingArguments."""
    return {
        "optim": setting.option.optim,
        "optim_args": setting.option.optim_args or None,
        "gradient_checkpointing": setting.option.gradient_checkpointing,
        "per_device_train_batch_size": setting.batch_size,
        "gradient_accumulation_steps": setting.gradient_accumulation_steps,
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        if setting.sync_each_batch
        else None,
    }


def as_data(fit: Fit) -> dict[str, Any]:
    """The result as JSON data; sizes are in bytes."""
    settings = [
        {
            **_chosen(each),
            "peak_per_gpu": each.peak,
            "missing": max(0, each.missing),
            "checkpoint": each.checkpoint,
            "host": each.host,
        }
        for each in fit.settings
    ]
    best = None if fit.best is None else fit.settings.index(fit.best)
    return {
        "settings": settings,
        "best": best,
        "load_in_fp32": fit.load_in_fp32,
        "lora_per_gpu_without_activations": fit.adapters,
    }
