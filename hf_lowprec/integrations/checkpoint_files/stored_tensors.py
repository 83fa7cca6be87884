"""Reads single tensors from the files of a checkpoint, without loading the rest."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hf_lowprec.integrations.checkpoint_files.input_files import InputError, path_inside


class UnreadableError(InputError):
    """A file or folder of a checkpoint cannot be read."""


@contextmanager
def explain_unreadable(
    path: Path, errors: tuple[type[BaseException], ...] = (Exception, CheckpointException)
) -> Iterator[None]:
    """Turn errors of a reader inside into an `UnreadableError`; torch's own is not an `Exception`."""
    try:
        yield
    except UnreadableError:
        raise
    except errors as error:
        raise UnreadableError(f"{path} cannot be read: {_reason(error)}") from error


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
    """Facts of a stored tensor that are known before it is read."""

    shape: torch.Size
    dtype: torch.dtype


class StoredTensors(NamedTuple):
    """The tensors of some files by name.

    Attributes:
        infos: the shape and dtype of each.
        read: reads one of them to the CPU.
    """

    infos: dict[str, TensorInfo]
    read: Callable[[str], Tensor]


def open_safetensors(paths: Iterable[Path]) -> StoredTensors:
    """The tensors of safetensors files.

    Raises:
        UnreadableError: a file is damaged.
    """
    infos: dict[str, TensorInfo] = {}
    files: dict[str, Any] = {}
    for path in paths:
        with explain_unreadable(path):
            file = safe_open(path, framework="pt")
            for name in sorted(file.keys()):
                part = file.get_slice(name)
                dtype = _SAFETENSORS_DTYPES.get(part.get_dtype()) or file.get_tensor(name).dtype
                infos[name] = TensorInfo(torch.Size(part.get_shape()), dtype)
                files[name] = file
    return StoredTensors(infos, lambda name: files[name].get_tensor(name))


_SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def load_mapped(path: Path, classes: Sequence[type] = ()) -> Any:
    """Load what `torch.save` wrote; the values of tensors are read from the file when they are used.

    Args:
        path: the file.
        classes: the classes whose objects it may hold, besides data.

    Raises:
        UnreadableError: it is damaged, or holds anything else.
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
            return PurePosixPath  # where it was saved, which nobody asks; one of another system cannot be built
        raise ValueError(_refusal(f"{module}.{name}"))


def read_metadata(folder: Path) -> Metadata:
    """Read the metadata of a folder of `torch.distributed.checkpoint`. torch's own function runs what the file names.

    Raises:
        UnreadableError: the file is damaged, or names anything but metadata, or files outside of the folder.
    """
    path = folder / ".metadata"
    with explain_unreadable(path), path.open("rb") as file:
        metadata: Metadata = _MetadataUnpickler(file).load()
        for part in metadata.storage_data.values():
            path_inside(folder, part.relative_path, path.name)
    return metadata


class ShardedFolder:
    """The tensors and objects in a folder of `torch.distributed.checkpoint`, whole, by their paths in the state dict.

    Needs no process group.

    Attributes:
        infos: the shape and dtype of each tensor, and None for each other object, by their paths.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        class Reader(FileSystemReader):
            """Reads the metadata once, not once for every tensor."""

            def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
                return metadata

        metadata = read_metadata(folder)
        self._folder = folder
        self._objects = {key for key, one in metadata.state_dict_metadata.items() if _info(one) is None}
        self._reader = Reader(folder)
        with explain_unreadable(folder / ".metadata"):
            stored = metadata.state_dict_metadata
            self._keys = {path: key for key, path in metadata.planner_data.items() if key in stored}
            self.infos = {path: _info(stored[key]) for path, key in self._keys.items()}

    def read(self, path: tuple[Any, ...]) -> Any:
        """Read one tensor or object.

        Raises:
            UnreadableError: it is damaged, or an object holds anything but data.
        """
        key = self._keys[path]
        return self._load({key: _empty(self.infos[path], "cpu")})[key]

    def outline(self, root: str) -> dict[Any, Any]:
        """The nested dict `root` of the state dict, lists as dicts; only tensors of several elements lack their values.

        Raises:
            UnreadableError: an object is damaged, or holds anything but data.
        """
        keys = {path: key for path, key in self._keys.items() if path[0] == root}
        values = {
            key: _empty(info := self.infos[path], "meta" if info is not None and info.shape.numel() > 1 else "cpu")
            for path, key in keys.items()
        }
        values |= self._load({key: value for key, value in values.items() if value is None or not value.is_meta})
        found: dict[Any, Any] = {}
        for path, key in keys.items():
            inner = found
            for part in path[1:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = values[key]
        return found

    def tensors(self, root: str) -> StoredTensors:
        """The tensors whose paths are `(root, name)`."""
        infos = {path[1:]: info for path, info in self.infos.items() if path[0] == root and info is not None}
        return StoredTensors(
            {path[0]: info for path, info in infos.items() if len(path) == 1}, lambda name: self.read((root, name))
        )

    def check_objects(self) -> None:
        """Raise UnreadableError if an object that is no tensor is damaged, or holds anything but data.

        torch's own reader, with which Trainer resumes, runs what it names.
        """
        self._load(dict.fromkeys(self._objects))

    def _load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Fill in the values of `state_dict`."""
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.state_dict_loader import load

        class Planner(DefaultLoadPlanner):
            def load_bytes(self, read_item: Any, value: Any) -> None:
                torch.load(value, weights_only=True)  # raises an error where what follows would run anything
                value.seek(0)
                super().load_bytes(read_item, value)

        with explain_unreadable(self._folder), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there is no process group
            load(state_dict, storage_reader=self._reader, planner=Planner(), no_dist=True)
        return state_dict


def _info(stored: Any) -> TensorInfo | None:
    return TensorInfo(stored.size, stored.properties.dtype) if isinstance(stored, TensorStorageMetadata) else None


def _empty(info: TensorInfo | None, device: str) -> Tensor | None:
    return None if info is None else torch.empty(info.shape, dtype=info.dtype, device=device)
