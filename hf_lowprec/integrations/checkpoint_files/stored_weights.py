"""Finds the weights in a folder: a model, an adapter, or a checkpoint, in one file, several files or sharded."""

from __future__ import annotations

from pathlib import Path

from hf_lowprec.integrations.checkpoint_files.json_files import path_inside, read_json
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
        return open_safetensors(files_of_index(index))
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


def files_of_index(index: Path) -> list[Path]:
    """The files over which an index says that weights are split.

    Raises:
        UnreadableError: it is damaged, or names files outside of its folder.
    """
    with explain_unreadable(index):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError("it has no weight_map")
        return [path_inside(index.parent, name, "weight_map") for name in sorted(set(map(str, weight_map.values())))]
