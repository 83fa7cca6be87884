"""Bytes to train on: the standard library of the running Python, or the files of a folder."""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

VALIDATION_SEQUENCES = 1024
ROWS_AT_ONCE = 64
"""In validation, so that memory stays small."""
SMALLEST = 100_000
"""Bytes of a text."""
STEPS_PER_DRAW = 1000
"""Steps whose sequences are drawn at once."""


SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "pydoc_data", "encodings"}
"""Folders that are not the library's own source, are not in every installation, or hold only tables."""


class Bytes(NamedTuple):
    """Training and validation bytes, uint8 of shape (bytes), and the first digits of their SHA-256."""

    train: Tensor
    validation: Tensor
    checksum: str


@functools.cache
def load(folder: Path | None, packages: bool = False) -> Bytes:
    """The text files of `folder`, whose last tenth is held out; None means the standard library.

    With `packages`, it also means the packages that are installed.
    """
    if folder is None:
        documents = standard_library() | (sources(Path(sysconfig.get_path("purelib"))) if packages else {})
        parts = ["\n".join(part).encode() for part in held_out(documents)]
    else:
        whole = b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*.txt")))
        if not folder.is_dir():
            raise SystemExit(f"--data-dir: there is no folder {folder}")
        if len(whole) < SMALLEST:
            raise SystemExit(f"--data-dir: the .txt files of {folder} have {len(whole)} bytes; it takes {SMALLEST:,}")
        parts = [whole[: len(whole) * 9 // 10], whole[len(whole) * 9 // 10 :]]
    checksum = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return Bytes(*(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts), checksum)


def standard_library() -> dict[str, str]:
    """The modules of the standard library without its tests, by path."""
    return sources(Path(sysconfig.get_path("stdlib")))


def sources(root: Path) -> dict[str, str]:
    """The Python files of a folder without tests, by path; those that are not UTF-8 are left out."""
    found = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if SKIPPED.isdisjoint(name.parts):
            try:
                found[name.as_posix()] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
    return found


def held_out(documents: dict[str, str]) -> tuple[list[str], list[str]]:
    """Documents to train on, and each tenth for validation, in an order that depends on names and mixes packages."""
    names = sorted(
        (name for name in documents if documents[name]), key=lambda name: hashlib.sha256(name.encode()).digest()
    )
    return [documents[name] for k, name in enumerate(names) if k % 10], [documents[name] for name in names[::10]]


def entropy(text: Bytes) -> float:
    """Cross entropy of the validation bytes by the frequencies of single bytes in training; nats per byte."""
    counts, seen = (torch.bincount(part.long(), minlength=256).double() for part in (text.train, text.validation))
    frequencies = (counts + 1) / (counts + 1).sum()
    return float(-(seen / seen.sum() * frequencies.log()).sum())


def _cut(text: Tensor, starts: Tensor, length: int) -> Tensor:
    return text[starts.unsqueeze(-1) + torch.arange(length + 1)].long()


class Sequences:
    """The sequences of every step, for several seeds. They depend on seed and step alone.

    Args:
        text: the bytes.
        seeds: of the order, one for each replica.
        count: sequences per step and seed.
        length: bytes per sequence that are predicted.
    """

    def __init__(self, text: Bytes, seeds: list[int], count: int, length: int) -> None:
        self._text, self._seeds, self._count, self._length = text, seeds, count, length
        self._draw, self._starts = -1, torch.empty(0)

    def of_step(self, step: int) -> Tensor:
        """Shape (seeds, count, length + 1)."""
        draw, row = divmod(step, STEPS_PER_DRAW)
        if draw != self._draw:
            end, size = len(self._text.train) - self._length - 1, (STEPS_PER_DRAW, self._count)
            drawn = [np.random.default_rng([seed, draw]).integers(end, size=size) for seed in self._seeds]
            self._draw, self._starts = draw, torch.from_numpy(np.stack(drawn, axis=1))
        return _cut(self._text.train, self._starts[row], self._length)

    def validation(self) -> Iterator[tuple[Tensor, int]]:
        """The same for all seeds and steps: parts of shape (seeds, rows, length + 1), and their numbers of rows."""
        end = len(self._text.validation) - self._length - 1
        starts = torch.from_numpy(np.random.default_rng(0).integers(end, size=VALIDATION_SEQUENCES))
        for part in starts.split(ROWS_AT_ONCE):
            yield _cut(self._text.validation, part, self._length).expand(len(self._seeds), -1, -1), len(part)
