"""Pickles that do something when they are loaded, in place of a checkpoint's files."""

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from hf_lowprec.integrations.transformers.checkpoints.manifest import MANIFEST_NAME


class Creates:
    """Creates a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def plant(file: Path, marker: Path) -> None:
    """Replace `file` by one of its kind that creates `marker` when it is loaded."""
    content = {"state": Creates(marker), "param_groups": []}
    if file.name == ".metadata":
        file.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, file)


def with_planted_files(checkpoint: Path, folder: Path) -> Iterator[Path]:
    """Copies of a checkpoint in `folder`, one after the other, in each of which another file is planted.

    Fails if what is done with a copy has run it. Text is left alone.
    """
    files = (path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file())
    for file in sorted(path for path in files if path.suffix not in (".json", ".py")):
        copy = folder / checkpoint.name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(checkpoint, copy, ignore=shutil.ignore_patterns(MANIFEST_NAME))
        plant(copy / file, folder / "marker")
        yield copy
        assert not (folder / "marker").exists(), file
