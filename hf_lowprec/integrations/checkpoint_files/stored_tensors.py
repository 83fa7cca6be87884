"""Reads single tensors from the files of a checkpoint, without loading the rest."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


class TensorInfo(NamedTuple):
    """Facts of a stored tensor that are known before it is read."""

    shape: torch.Size
    dtype: torch.dtype


class StoredTensors(Protocol):
    """The tensors of some files by name.

    Attributes:
        infos: the shape and dtype of each tensor by name.
    """

    infos: dict[str, TensorInfo]

    def read(self, name: str) -> Tensor:
        """Read one tensor to the CPU."""
        ...


class SafetensorsFiles:
    """The tensors of safetensors files."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.infos: dict[str, TensorInfo] = {}
        self._files: dict[str, Any] = {}
        for path in paths:
            file = safe_open(path, framework="pt")
            for name in sorted(file.keys()):
                part = file.get_slice(name)
                dtype = _SAFETENSORS_DTYPES.get(part.get_dtype()) or file.get_tensor(name).dtype
                self.infos[name] = TensorInfo(torch.Size(part.get_shape()), dtype)
                self._files[name] = file

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


_SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class TensorsInMemoryMap:
    """The tensors of a dict that `torch.save` wrote, mapped into memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.infos = {name: TensorInfo(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def load_mapped(path: Path) -> Any:
    """Load what `torch.save` wrote; the values of tensors are read from the file when they are used."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


class ShardedFolder:
    """The tensors and objects in a folder of `torch.distributed.checkpoint`, whole, by their paths in the state dict.

    Needs no process group.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        class Reader(FileSystemReader):
            """Reads the metadata once, not once for every tensor."""

            def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
                return metadata

        metadata = FileSystemReader(folder).read_metadata()
        self._reader = Reader(folder)
        self._metadata = metadata.state_dict_metadata
        self._keys = {path: key for key, path in metadata.planner_data.items()}

    def paths(self) -> Iterable[tuple[Any, ...]]:
        """The paths of all tensors and objects."""
        return self._keys

    def info(self, path: tuple[Any, ...]) -> TensorInfo | None:
        """The shape and dtype of a tensor; None for another object."""
        stored = self._metadata[self._keys[path]]
        return TensorInfo(stored.size, stored.properties.dtype) if isinstance(stored, TensorStorageMetadata) else None

    def read(self, path: tuple[Any, ...]) -> Any:
        """Read one tensor or object."""
        from torch.distributed.checkpoint.state_dict_loader import load

        key, info = self._keys[path], self.info(path)
        state_dict = {key: None if info is None else torch.empty(info.shape, dtype=info.dtype)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there is no process group
            load(state_dict, storage_reader=self._reader, no_dist=True)
        return state_dict[key]


class ShardedTensors:
    """The tensors of a `ShardedFolder` whose paths are `(root, name)`."""

    def __init__(self, folder: ShardedFolder, root: str) -> None:
        self._folder, self._root = folder, root
        infos = {path[1]: folder.info(path) for path in folder.paths() if path[0] == root and len(path) == 2}
        self.infos = {name: info for name, info in infos.items() if info is not None}

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._folder.read((self._root, name))
        return tensor
