"""Reads single tensors from the files of a checkpoint, without loading the rest, and finds its weights.

A folder may be a model, an adapter, or a checkpoint, with weights in one file, several files or sharded.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hf_lowprec.integrations.checkpoint_files.input_files import InputError, path_inside, read_json

ADAPTER_WEIGHTS = "adapter_model.safetensors"
SHARDED_WEIGHTS, SHARDED_STATE = "pytorch_model_fsdp_0", "optimizer_0"
"""The folders for shards: of FSDP2 with sharded state dicts, and of models sharded at load."""
ZERO_STATES = "*/*_optim_states.pt"
"""The files of DeepSpeed's ZeRO optimizers, one for each rank."""
_INDEX = "model.safetensors.index.json"
_WEIGHTS = (
    *("model.safetensors", ADAPTER_WEIGHTS, _INDEX, SHARDED_WEIGHTS),
    *("pytorch_model_fsdp.bin", "pytorch_model.bin", "adapter_model.bin"),
)
"""The names of weights in a folder; the first one that exists is read."""


@contextmanager
def explain_unreadable(
    path: Path, errors: tuple[type[BaseException], ...] = (Exception, CheckpointException)
) -> Iterator[None]:
    """Turn errors of a reader inside into an `InputError`; torch's own is not an `Exception`."""
    try:
        yield
    except InputError:
        raise
    except errors as error:
        raise InputError(f"{path} cannot be read: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return _reason(next(iter(error.failures.values()))[0])
    refused = re.search(r"GLOBAL (\S+) was not an allowed", str(error))
    if refused:  # torch's message is a page
        return _refusal(refused[1])
    first_line = next(iter(str(error).strip().splitlines()), "")
    return first_line if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line}"


def _refusal(name: str) -> str:
    return f"it names {name}, which checkpoints do not contain; loading it could run foreign code"


class TensorInfo(NamedTuple):
    """Facts of a tensor that are known before it is read."""

    shape: torch.Size
    dtype: torch.dtype


class LazyTensors(NamedTuple):
    """Tensors by name, each of which is read, or computed, when it is asked for.

    Attributes:
        infos: the shape and dtype of each.
        read: reads one of them; from files, to the CPU.
    """

    infos: dict[str, TensorInfo]
    read: Callable[[str], Tensor]

    def renamed(self, stored_names: Mapping[str, str]) -> LazyTensors:
        """Return the tensors under new names: the keys of `stored_names`, whose values are the present names."""
        infos = {name: self.infos[stored_name] for name, stored_name in stored_names.items()}
        return LazyTensors(infos, lambda name: self.read(stored_names[name]))


def refuse_folder_of_checkpoints(folder: Path) -> None:
    """Raise ValueError if `folder` has checkpoints in it, such as the `output_dir` of a run."""
    inner = sorted(path.name for path in folder.glob("checkpoint[-_]*") if path.is_dir())
    if inner:
        raise ValueError(f"{str(folder)!r} is a folder of checkpoints; pass one of {', '.join(inner)}")


def open_weights(folder: Path) -> LazyTensors:
    """Open the weights in `folder`; each tensor is read when it is asked for.

    Raises:
        ValueError: there are none, or they cannot be read.
    """
    path = next((folder / name for name in _WEIGHTS if (folder / name).exists()), None)
    if path is None:
        refuse_folder_of_checkpoints(folder)
        raise ValueError(
            f"{str(folder)!r} has no weights that can be read (model.safetensors, {ADAPTER_WEIGHTS}, "
            f"{SHARDED_WEIGHTS}, pytorch_model.bin); pass a checkpoint of Trainer or of Accelerator.save_state"
        )
    if path.name == SHARDED_WEIGHTS:
        return ShardedFolder(path).tensors("model")
    tensors: dict[str, Tensor] = {}
    infos: dict[str, TensorInfo] = {}
    for file in _files_of_index(path) if path.name == _INDEX else [path]:
        with explain_unreadable(file):  # both readers map the file into memory
            loaded = load_file(file) if file.suffix == ".safetensors" else load_mapped(file)
            infos |= {name: TensorInfo(tensor.shape, tensor.dtype) for name, tensor in sorted(loaded.items())}
            tensors |= loaded
    return LazyTensors(infos, tensors.__getitem__)


def _files_of_index(index: Path) -> list[Path]:
    """Return the files of weights that an index lists.

    Raises:
        InputError: it is damaged, or names files outside its folder.
    """
    with explain_unreadable(index):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError("it has no weight_map")
        return [path_inside(index.parent, name, "weight_map") for name in sorted(set(map(str, weight_map.values())))]


def load_mapped(path: Path, classes: Sequence[type] = ()) -> Any:
    """Load what `torch.save` wrote; the values of tensors are read from the file when they are used.

    Args:
        path: the file.
        classes: the classes whose objects it may hold, besides data.

    Raises:
        InputError: it is damaged, or holds anything else.
    """
    with explain_unreadable(path), torch.serialization.safe_globals([*classes]):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


_IN_METADATA = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
}  # fmt: skip
"""The classes and functions that `torch.distributed.checkpoint` pickles in `.metadata`, besides dtypes and paths."""


class _MetadataUnpickler(pickle.Unpickler):
    """Reads `.metadata`, which is a pickle, without running what else a file might name."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _IN_METADATA.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return PurePosixPath  # where it was saved, which is not used; another system's path cannot be built
        raise ValueError(_refusal(f"{module}.{name}"))


def read_metadata(folder: Path) -> Metadata:
    """Read the metadata of a folder of `torch.distributed.checkpoint`. torch's own function runs what the file names.

    Raises:
        InputError: the file is damaged, or names anything but metadata, or files outside the folder.
    """
    path = folder / ".metadata"
    with explain_unreadable(path), path.open("rb") as file:
        metadata: Metadata = _MetadataUnpickler(file).load()
        for part in metadata.storage_data.values():
            path_inside(folder, part.relative_path, path.name)
    return metadata


class ShardedFolder:
    """The full tensors and objects in a folder of `torch.distributed.checkpoint`, by their paths in the state dict.

    It needs no process group.
    """

    def __init__(self, folder: Path) -> None:
        metadata = read_metadata(folder)
        self._folder = folder
        self._reader = FileSystemReader(folder)
        self._reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]  # once, not for every tensor
        with explain_unreadable(folder / ".metadata"):
            self._infos = {key: _info(stored) for key, stored in metadata.state_dict_metadata.items()}
            self._keys = {path: key for key, path in metadata.planner_data.items() if key in self._infos}

    def read(self, path: tuple[Any, ...]) -> Any:
        """Read one tensor or object.

        Raises:
            InputError: it is damaged, or an object holds anything but data.
        """
        return self._load([self._keys[path]])[self._keys[path]]

    def outline(self, root: str) -> dict[Any, Any]:
        """Return the nested dict `root` of the state dict. Lists become dicts; tensors of several elements lack values.

        Raises:
            InputError: an object is damaged, or holds anything but data.
        """
        keys = {path: key for path, key in self._keys.items() if path[0] == root}
        large = {key: info for key in keys.values() if (info := self._infos[key]) and info.shape.numel() > 1}
        values = self._load(keys.values() - large.keys())
        values |= {key: torch.empty(info.shape, dtype=info.dtype, device="meta") for key, info in large.items()}
        found: dict[Any, Any] = {}
        for path, key in keys.items():
            inner = found
            for part in path[1:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = values[key]
        return found

    def tensors(self, root: str) -> LazyTensors:
        """Return the tensors whose paths are `(root, name)`."""
        keys = {path[1]: key for path, key in self._keys.items() if path[0] == root and len(path) == 2}
        infos = {name: info for name, key in keys.items() if (info := self._infos[key])}
        return LazyTensors(infos, lambda name: self.read((root, name)))

    def check_objects(self) -> None:
        """Raise InputError if an object other than a tensor is damaged, or holds anything but data.

        torch's own reader, with which Trainer resumes, runs what the object names.
        """
        self._load(key for key, info in self._infos.items() if info is None)

    def _load(self, keys: Iterable[str]) -> dict[str, Any]:
        infos = {key: self._infos[key] for key in keys}
        values = {
            key: None if info is None else torch.empty(info.shape, dtype=info.dtype) for key, info in infos.items()
        }
        with explain_unreadable(self._folder), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there is no process group
            state_dict_loader.load(values, storage_reader=self._reader, planner=_DataOnlyPlanner(), no_dist=True)
        return values


class _DataOnlyPlanner(DefaultLoadPlanner):
    """Loads no object that would run anything."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        torch.load(value, weights_only=True)  # raises an error where what follows would run anything
        value.seek(0)
        super().load_bytes(read_item, value)


def _info(stored: Any) -> TensorInfo | None:
    return TensorInfo(stored.size, stored.properties.dtype) if isinstance(stored, TensorStorageMetadata) else None


def is_zero_checkpoint(folder: Path) -> bool:
    """Return whether DeepSpeed has saved a ZeRO optimizer in `folder`."""
    return any(folder.glob(ZERO_STATES))


def read_zero_states(checkpoint: Path, tag: str | None = None) -> tuple[Path, int, int]:
    """Check that a checkpoint of DeepSpeed is complete and holds only data: DeepSpeed itself runs what its files name.

    Args:
        checkpoint: the folder with the file `latest`.
        tag: the name of the folder in it that has the states; the one that `latest` names by default.

    Returns:
        The folder with the states, the number of ranks that saved them, and the stage of ZeRO; both are 0 without ZeRO.

    Raises:
        ValueError: `latest` names a folder outside the checkpoint; or a file is missing, is damaged, or holds anything
            but data.
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
        whole = f"a complete checkpoint of {ranks} ranks under ZeRO {stage}" if ranks else "a checkpoint of DeepSpeed"
        raise ValueError(f"{str(folder)!r} is not {whole}: {', '.join(missing)} is missing")
    return folder, ranks, stage


def open_zero_weights(folder: Path) -> LazyTensors:
    """Open the FP32 weights in the optimizer states of a ZeRO checkpoint, with the dtypes that training has stored.

    DeepSpeed reads them, after `read_zero_states`.

    Raises:
        ValueError: DeepSpeed is missing, or the weights cannot be read.
    """
    try:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    except ImportError as error:
        raise ValueError(
            f"{str(folder)!r} was saved by DeepSpeed and needs it to be read: pip install deepspeed ({error})"
        ) from error
    states, _, _ = read_zero_states(folder)
    with explain_unreadable(folder, (AssertionError,)), contextlib.redirect_stdout(sys.stderr):
        tensors = get_fp32_state_dict_from_zero_checkpoint(str(states.parent), states.name, lazy_mode=True)
    try:
        stored = open_weights(folder).infos
    except ValueError:  # ZeRO 3 need not save the model in 16 bits
        stored = {}
    infos = {name: stored.get(name, TensorInfo(tensor.shape, torch.float32)) for name, tensor in tensors.items()}
    return LazyTensors(infos, lambda name: tensors[name].contiguous())
