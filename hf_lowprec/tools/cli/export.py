"""`hf-lowprec export CHECKPOINT OUT`: write a checkpoint as a model folder, compensation included."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of Trainer or of Accelerator.save_state.")],
    out: Annotated[Path, typer.Argument(help="The model folder to write: new, or empty.")],
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Dtype of the weights in the folder.")
    ] = "float32",
    model_folder: Annotated[
        Path | None,
        typer.Option(help="A folder with config.json and tokenizer, for a checkpoint that has none."),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest size of a weight file; limits the memory of the export.")
    ] = "5GB",
) -> None:
    """Write a checkpoint as a standard model folder, for from_pretrained and other programs.

    The checkpoint may be from one process, DDP, FSDP2 or DeepSpeed's ZeRO, full
    or sharded. The training script is not needed. The tokenizer and generation
    config are copied. For a PEFT model, the folder holds the adapters.

    By default, weights are written in FP32: with split weights, the exact FP32
    weights; with Kahan summation, weight + compensation, which has about 16
    significant bits. With --dtype bfloat16, each is rounded up or down at random,
    so that small changes are kept on average. What training keeps in FP32, such
    as norms, stays FP32 in the file, as in the folders that Trainer saves.
    """
    from hf_lowprec.integrations.export.checkpoint_export import export_checkpoint

    try:
        report = export_checkpoint(
            checkpoint, out, dtype=dtype, model_folder=model_folder, max_shard_size=max_shard_size
        )
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(f"{out}: {report}")
