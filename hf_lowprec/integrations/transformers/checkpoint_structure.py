"""Checkpoints without a manifest: whether the files that Trainer loads are there and open.

That finds empty, missing and truncated files. Flipped bits take checksums, which only a manifest has.
"""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import TrainerState

from hf_lowprec.integrations.transformers.checkpoint_manifest import read_json

_OPTIMIZER = ("optimizer.pt", "optimizer*.bin", "optimizer_[0-9]*")
_SHARDS = ("optimizer_[0-9]*", "pytorch_model_fsdp_[0-9]*")
"""Folders of torch.distributed.checkpoint."""
_WEIGHTS = ("**/*.safetensors", "**/pytorch_model*.bin", "**/adapter_model.bin", "pytorch_model_fsdp_[0-9]*")


def read_trainer_state(path: Path, cls: type[TrainerState] = TrainerState) -> TrainerState:
    """The Trainer's state in a JSON file as a `cls`, without fields that another version of transformers has added.

    Raises:
        ValueError: it is missing or damaged; the message names the file.
    """
    if not path.is_file():
        raise ValueError(f"{path.name} is missing")
    fields = read_json(path)
    unknown = unknown_fields(fields, cls)
    try:
        state = cls(**{name: value for name, value in fields.items() if name not in unknown})
    except TypeError as error:
        raise ValueError(f"{path.name} is not a Trainer's: {error}") from error
    for name, kind in (("global_step", int), ("log_history", list), ("stateful_callbacks", dict)):
        if not isinstance(getattr(state, name), kind):
            raise ValueError(f"{path.name} has {name}={getattr(state, name)!r}")
    return state


def unknown_fields(state: dict[str, Any], cls: type[TrainerState] = TrainerState) -> list[str]:
    """The fields of a saved state that `cls` of this version of transformers does not have."""
    return sorted(state.keys() - {field.name for field in dataclasses.fields(cls)})


def holds_optimizer(checkpoint: Path) -> bool:
    """Whether there is an optimizer's state; `save_only_model=True` writes none."""
    return _holds(checkpoint, *_OPTIMIZER)


def holds_random_states(checkpoint: Path) -> bool:
    """Whether there are random states, of whatever number of ranks."""
    return _holds(checkpoint, "rng_state*.pth")


def damaged_files(checkpoint: Path) -> list[str]:
    """A line for every file that is missing or does not open, `trainer_state.json` excluded."""
    problems = []
    for pattern, check in _CHECKS.items():
        for path in sorted(checkpoint.glob(pattern)):
            name = path.relative_to(checkpoint).as_posix()
            try:
                problems += [f"{name}{problem}" for problem in check(path)]
            except Exception as error:  # readers raise many kinds, a zip file of an unknown version NotImplementedError
                problems.append(f"{name} does not open: {error}")
    if not _holds(checkpoint, *_WEIGHTS):
        problems.append("model.safetensors is missing, and so are all other weights")
    if holds_optimizer(checkpoint) != _holds(checkpoint, "scheduler.pt"):  # Trainer loads both or neither
        problems.append(f"{'scheduler.pt' if holds_optimizer(checkpoint) else 'optimizer.pt'} is missing")
    return problems


def _holds(checkpoint: Path, *patterns: str) -> bool:
    return any(True for pattern in patterns for _ in checkpoint.glob(pattern))


def _check_json(path: Path) -> list[str]:
    read_json(path)
    return []


def _check_index(path: Path) -> list[str]:
    """The index of weights in several files."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        return [" has no weight_map"]
    missing = sorted({str(name) for name in weight_map.values() if not (path.parent / str(name)).is_file()})
    return [f" lists {name}, which is missing" for name in missing]


def _check_safetensors(path: Path) -> list[str]:
    with safe_open(path, framework="pt"):  # compares the header with the file's size
        return []


def _check_torch_file(path: Path) -> list[str]:
    if not path.stat().st_size:
        return [" is empty"]
    with zipfile.ZipFile(path):  # the directory is at the end of the file
        return []


def _check_shards(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    if not (folder / ".metadata").is_file():
        return ["/.metadata is missing"]
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        pieces = FileSystemReader(folder).read_metadata().storage_data
        ends: dict[str, int] = {}
        for piece in (pieces or {}).values():
            ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
    except Exception as error:  # unpickling can raise anything
        return [f"/.metadata does not open: {type(error).__name__}: {error}"]
    sizes = {name: (folder / name).stat().st_size if (folder / name).is_file() else None for name in ends}
    return [
        f"/{name} is missing" if size is None else f"/{name} has {size} bytes, {ends[name]} were written"
        for name, size in sizes.items()
        if size is None or size < ends[name]
    ]


_CHECKS: dict[str, Callable[[Path], list[str]]] = {
    "**/*.safetensors": _check_safetensors,
    "**/*.index.json": _check_index,
    "**/config.json": _check_json,
    "**/adapter_config.json": _check_json,
    **dict.fromkeys(
        ("**/pytorch_model*.bin", "**/adapter_model.bin", "optimizer.pt", "optimizer*.bin", "scheduler.pt",
         "scaler.pt", "rng_state*.pth"),
        _check_torch_file,
    ),
    **dict.fromkeys(_SHARDS, _check_shards),
}  # fmt: skip
"""How files are checked, by their names."""
