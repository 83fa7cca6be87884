"""Finds the files of a checkpoint that are damaged or missing.

What Trainer loads must open: this finds empty and truncated files, flipped bits in what `torch.save` wrote, except in
large tensors, and what would make Trainer run code or read other folders. Besides, the files must have the sizes and
checksums of the manifest. If it is incomplete, or there is none, as in checkpoints of a stock Trainer, they must be
there: Trainer writes its own state last, and each rank its random states.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from safetensors import safe_open
from transformers.trainer_pt_utils import safe_globals

from hf_lowprec.integrations.checkpoint_files.json_files import read_json
from hf_lowprec.integrations.checkpoint_files.stored_tensors import ShardedFolder, UnreadableError, load_mapped
from hf_lowprec.integrations.checkpoint_files.stored_weights import ZERO_STATES, files_of_index
from hf_lowprec.integrations.export.parameter_names import PARAMETERS_NAME
from hf_lowprec.integrations.transformers.checkpoints.manifest import CHUNK_BYTES, Manifest, checksums

_NEVER_LOADED = ("training_args.bin", "generation_config.json", "README.md", PARAMETERS_NAME)
"""Files that no Trainer needs to resume. (Sentence-transformers' needs `config.json` and the tokenizer files.)"""
_OPTIMIZER = ("optimizer.pt", "optimizer*.bin", "optimizer_[0-9]*", ZERO_STATES)
_SHARDS = ("optimizer_[0-9]*", "pytorch_model_fsdp_[0-9]*")
"""Folders that torch.distributed.checkpoint writes."""
_WEIGHTS = (
    "**/*.safetensors", "**/pytorch_model*.bin", "**/adapter_model.bin", "pytorch_model_fsdp_[0-9]*", ZERO_STATES
)  # fmt: skip


def changed_files(folder: Path, manifest: Manifest) -> list[str]:
    """Compare the files of a checkpoint with its complete manifest.

    Returns:
        A line for every listed file that has changed, or that is missing and needed to resume.
    """
    problems, same_size = [], []
    missing = missing_files(folder, manifest)
    try:
        for name, (size, _) in manifest.files.items():
            if name in missing:
                problems += [f"{name} is missing"] if missing[name] else []
            elif (size_now := (folder / name).stat().st_size) != size:
                problems.append(f"{name} has {size_now} bytes, but {size} were written")
            else:
                same_size.append(name)
        checksums_now = checksums(folder / name for name in same_size)
    except OSError as error:
        return [*problems, f"{error.filename} cannot be read: {error.strerror}"]
    changed = [name for name in same_size if checksums_now[folder / name] != manifest.files[name].checksum]
    return [*problems, *(f"{name} does not match its checksum" for name in changed)]


def missing_files(folder: Path, manifest: Manifest) -> dict[str, bool]:
    """The files of a complete manifest that are missing -> whether each is needed to resume."""
    missing = (name for name in manifest.files if not (folder / name).is_file())
    return {name: name.rpartition("/")[2] not in _NEVER_LOADED for name in missing}


def damaged_files(checkpoint: Path, manifest: Manifest | None) -> list[str]:
    """A line for every file of a checkpoint that is missing, has changed or does not open.

    Args:
        checkpoint: the checkpoint, which has a `trainer_state.json`.
        manifest: its manifest, complete or not; None if it has none.
    """
    if manifest is not None and manifest.complete:
        return changed_files(checkpoint, manifest) or files_that_do_not_open(checkpoint)
    problems = files_that_do_not_open(checkpoint)
    if not _holds(checkpoint, *_WEIGHTS):
        problems.append("model.safetensors and all other weight files are missing")
    if holds_optimizer(checkpoint) != _holds(checkpoint, "scheduler.pt"):  # Trainer loads both or neither
        problems.append(f"{'scheduler.pt' if holds_optimizer(checkpoint) else 'optimizer.pt'} is missing")
    expected = manifest.random_states if manifest is not None else []
    found = len(list(checkpoint.glob(ZERO_STATES)))
    if 0 < found < len(expected):
        problems.append(f"{len(expected) - found} of {len(expected)} files {ZERO_STATES} are missing")
    return problems + [f"{name} is missing" for name in expected if not (checkpoint / name).is_file()]


def files_that_do_not_open(checkpoint: Path) -> list[str]:
    """A line for every file in a folder that a checkpoint may have, and that does not open."""
    problems = []
    for pattern, check in _CHECKS.items():
        for path in sorted(checkpoint.glob(pattern)):
            name = path.relative_to(checkpoint).as_posix()
            try:
                problems += [f"{name}{problem}" for problem in check(path)]
            except UnreadableError as error:
                name = error.path.relative_to(checkpoint).as_posix()
                problems.append(f"{name} does not open: {error.reason}")
            except Exception as error:  # readers raise many types, zipfile even NotImplementedError
                problems.append(f"{name} does not open: {error}")
    return problems


def holds_optimizer(checkpoint: Path) -> bool:
    """Return whether the checkpoint has an optimizer's state; `save_only_model=True` writes none."""
    return _holds(checkpoint, *_OPTIMIZER)


def holds_random_states(checkpoint: Path) -> bool:
    """Return whether the checkpoint has random states, for any number of ranks."""
    return _holds(checkpoint, "rng_state*.pth")


def _holds(checkpoint: Path, *patterns: str) -> bool:
    return any(True for pattern in patterns for _ in checkpoint.glob(pattern))


def _check_json(path: Path) -> list[str]:
    read_json(path)
    return []


def _check_index(path: Path) -> list[str]:
    """Check the index of weights that are split over several files."""
    return [f" lists {file.name}, which is missing" for file in files_of_index(path) if not file.is_file()]


def _check_safetensors(path: Path) -> list[str]:
    with safe_open(path, framework="pt"):  # it compares the header with the file's size
        return []


def _check_zip(path: Path) -> list[str]:
    """Check what `torch.save` wrote, without loading it: DeepSpeed's files hold more than data."""
    if not path.stat().st_size:
        return [" is empty"]
    with zipfile.ZipFile(path) as file:  # the directory is at the end of the file
        for entry in file.infolist():
            if entry.file_size <= CHUNK_BYTES:
                file.read(entry)  # it compares the checksum, as torch does not
    return []


def _check_torch_file(path: Path) -> list[str]:
    if empty := _check_zip(path):
        return empty
    with safe_globals() if path.name.startswith("rng_state") else nullcontext():  # as Trainer does
        load_mapped(path)
    return []


def _check_shards(folder: Path) -> list[str]:
    """Check a folder of torch.distributed.checkpoint: its metadata, and the sizes of the files that hold the shards."""
    if not folder.is_dir():
        return []
    if not (folder / ".metadata").is_file():
        return ["/.metadata is missing"]
    stored = ShardedFolder(folder)
    ends: dict[str, int] = {}
    for part in stored.metadata.storage_data.values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    sizes = {name: (folder / name).stat().st_size if (folder / name).is_file() else None for name in ends}
    problems = [
        f"/{name} is missing" if size is None else f"/{name} has {size} bytes, but {ends[name]} were written"
        for name, size in sizes.items()
        if size is None or size < ends[name]
    ]
    if not problems:
        stored.check_objects()
    return problems


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
    "global_step*/*.pt": _check_zip,
    **dict.fromkeys(_SHARDS, _check_shards),
}  # fmt: skip
"""Pattern of file names -> the function that checks such a file and returns the ends of the lines about it."""
