"""Finds the weights in a folder: a model, an adapter, or a checkpoint, in one file, several files or sharded."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import torch

from hf_lowprec.integrations.checkpoint_files.input_files import path_inside, read_json
from hf_lowprec.integrations.checkpoint_files.stored_tensors import (
    ShardedFolder,
    StoredTensors,
    TensorInfo,
    explain_unreadable,
    load_mapped,
    open_safetensors,
)

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_SHARDED_WEIGHTS = "pytorch_model_fsdp_0"
ZERO_STATES = "*/*_optim_states.pt"
"""The files of DeepSpeed's ZeRO optimizers, one for each rank."""


def open_weights(folder: Path) -> StoredTensors:
    """Open the weights in `folder`; each tensor is read when it is asked for.

    Raises:
        ValueError: there are none, or they cannot be read.
    """
    for weights in ("model.safetensors", ADAPTER_WEIGHTS):
        if (folder / weights).is_file():
            return open_safetensors([folder / weights])
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return open_safetensors(_files_of_index(index))
    if (folder / _SHARDED_WEIGHTS).is_dir():
        return ShardedFolder(folder / _SHARDED_WEIGHTS).tensors("model")
    for weights in ("pytorch_model_fsdp.bin", "pytorch_model.bin", "adapter_model.bin"):
        if (folder / weights).is_file():
            with explain_unreadable(folder / weights):
                tensors = load_mapped(folder / weights)
                infos = {name: TensorInfo(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
                return StoredTensors(infos, tensors.__getitem__)
    raise ValueError(
        f"{str(folder)!r} has no weights that can be read (model.safetensors, {ADAPTER_WEIGHTS}, {_SHARDED_WEIGHTS}, "
        "pytorch_model.bin); pass a checkpoint of Trainer or of Accelerator.save_state"
    )


def is_zero_checkpoint(folder: Path) -> bool:
    """Return whether DeepSpeed has saved a ZeRO optimizer in `folder`."""
    return any(folder.glob(ZERO_STATES))


def read_zero_states(checkpoint: Path, tag: str | None = None) -> tuple[Path, int, int]:
    """Check that a checkpoint of DeepSpeed is whole and holds data alone: DeepSpeed itself runs what its files name.

    Args:
        checkpoint: the folder with the file `latest`.
        tag: the name of the folder in it that has the states; the one that `latest` names by default.

    Returns:
        The folder with the states, the number of ranks that saved them, and the stage of ZeRO, both 0 without it.

    Raises:
        ValueError: `latest` names a folder outside of the checkpoint; or a file is missing, is damaged, or holds
            anything but data.
    """
    from hf_lowprec.integrations.deepspeed.private_apis import SAVED_CLASSES, saved_by

    with explain_unreadable(checkpoint / "latest"):
        folder = checkpoint / tag if tag else path_inside(checkpoint, (checkpoint / "latest").read_text().strip(), "it")
    ranks, stage, files = 0, 0, {file.name: file for file in sorted(folder.glob("*_states.pt"))}
    for name, file in files.items():
        saved = load_mapped(file, SAVED_CLASSES)
        if name.endswith("_optim_states.pt"):
            with explain_unreadable(file):
                ranks, stage = saved_by(saved)
    names = {*files, "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"}
    names = {re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", name) for name in names for rank in range(max(ranks, 1))}
    if missing := sorted(names - files.keys()):
        whole = f"a whole checkpoint of {ranks} ranks under ZeRO {stage}" if ranks else "a checkpoint of DeepSpeed"
        raise ValueError(f"{str(folder)!r} is not {whole}: {', '.join(missing)} is missing")
    return folder, ranks, stage


def open_zero_weights(folder: Path) -> StoredTensors:
    """Open the FP32 weights in the optimizer states of a ZeRO checkpoint, with the dtypes that training has stored.

    DeepSpeed reads them, after `read_zero_states`.

    Raises:
        ValueError: DeepSpeed is missing, or the weights cannot be read.
    """
    try:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    except ImportError as error:
        raise ValueError(
            f"{str(folder)!r} was saved by DeepSpeed, which reads it: pip install deepspeed ({error})"
        ) from error
    states, _, _ = read_zero_states(folder)
    with explain_unreadable(folder, (AssertionError,)), contextlib.redirect_stdout(sys.stderr):
        tensors = get_fp32_state_dict_from_zero_checkpoint(str(states.parent), states.name, lazy_mode=True)
    try:
        stored = open_weights(folder).infos
    except ValueError:  # ZeRO 3 need not save the model in 16 bits
        stored = {}
    infos = {name: stored.get(name, TensorInfo(tensor.shape, torch.float32)) for name, tensor in tensors.items()}
    return StoredTensors(infos, lambda name: tensors[name].contiguous())


def _files_of_index(index: Path) -> list[Path]:
    """The files over which an index says that weights are split.

    Raises:
        UnreadableError: it is damaged, or names files outside of its folder.
    """
    with explain_unreadable(index):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError("it has no weight_map")
        return [path_inside(index.parent, name, "weight_map") for name in sorted(set(map(str, weight_map.values())))]
