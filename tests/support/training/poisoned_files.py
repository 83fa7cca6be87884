"""Checkpoints with a file that creates a marker if anybody unpickles it."""

import io
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from hf_lowprec.integrations.transformers.checkpoints.manifest import MANIFEST_NAME


class Creates:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def poisons(checkpoint: Path, marker: Path) -> Iterator[tuple[str, dict[Path, bytes]]]:
    """Every way to poison each file of a checkpoint: its name, and the new contents of the files concerned.

    Files that differ in a rank's number only are poisoned together, so that all ranks meet them.
    """
    poison, archive = Creates(marker), io.BytesIO()
    torch.save(poison, archive)
    alike: dict[str, list[Path]] = {}
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST_NAME):
        alike.setdefault(re.sub(r"_\d_?", "_", path.name) + path.parent.name, []).append(path)
    for paths in alike.values():
        is_archive = paths[0].read_bytes().startswith(b"PK")
        content = archive.getvalue() if is_archive else pickle.dumps(poison)
        yield paths[0].relative_to(checkpoint).as_posix(), dict.fromkeys(paths, content)
    for path in checkpoint.glob("*/.metadata"):
        metadata = pickle.loads(path.read_bytes())
        metadata.planner_data["poison"] = poison
        yield f"an entry of {path.parent.name}/.metadata", {path: pickle.dumps(metadata)}
        metadata = pickle.loads(path.read_bytes())
        shard = path.parent / "__0_0.distcp"
        info = _StorageInfo(shard.name, shard.stat().st_size, len(archive.getvalue()))
        for key in metadata.state_dict_metadata:  # every tensor becomes an object
            metadata.state_dict_metadata[key] = BytesStorageMetadata()
            metadata.storage_data[MetadataIndex(key)] = info
        contents = {path: pickle.dumps(metadata), shard: shard.read_bytes() + archive.getvalue()}
        yield f"the objects in {path.parent.name}", contents


def write_poisoned(checkpoint: Path, contents: dict[Path, bytes], copy: Path) -> None:
    """Copy a checkpoint, with other contents of some files, and without its manifest."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(checkpoint, copy)
    (copy / MANIFEST_NAME).unlink()
    for path, content in contents.items():
        (copy / path.relative_to(checkpoint)).write_bytes(content)
