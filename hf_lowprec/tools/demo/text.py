"""Text that needs no download: the standard library of the running Python, and its documentation.

Every Python installation has both. The modules are code and the documentation is English prose in reStructuredText, so
a model trained on one still has something to learn from the other.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hf_lowprec.integrations.checkpoint_files.input_errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset

Encode = Callable[[list[str]], list[list[int]]]
"""Texts → token numbers of each text."""

BYTES = 256
"""Vocabulary size of `encode_bytes`."""

HELD_OUT = 10
"""One in this many documents is held out for validation."""

# Folders that are not the library's own source, are not in every installation, or serve as the other text. `encodings`
# contains only tables.
_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "pydoc_data",
    "encodings",
}


@dataclass(frozen=True)
class Text:
    """Documents to train on and others to validate on.

    Attributes:
        title: names the text in a table's heading.
        train: `datasets.Dataset` with a column `text`.
        validation: the same with other documents.
    """

    title: str
    train: Dataset
    validation: Dataset


@dataclass(frozen=True)
class Blocks:
    """Token blocks of equal length, as the Trainer takes them.

    Attributes:
        title: the text's.
        length: tokens per block.
        train: `datasets.Dataset` with columns `input_ids` and `labels`, which are equal.
        validation: the same from other documents.
    """

    title: str
    length: int
    train: Dataset
    validation: Dataset


def standard_library_modules() -> Text:
    """The `*.py` files of the standard library without its tests, split by file; files that are not UTF-8 are left out.

    Raises:
        InputError: this Python has no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    return _split("the standard library's modules", standard_library_sources(), root)


def standard_library_sources() -> dict[str, str]:
    """Path within the standard library → source, for the files of `standard_library_modules`."""
    root = Path(sysconfig.get_path("stdlib"))
    documents: dict[str, str] = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if _SKIPPED_FOLDERS.isdisjoint(name.parts):
            try:
                documents[name.as_posix()] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
    return documents


def standard_library_documentation() -> Text:
    """The language reference that `help()` shows, split by topic.

    Topics repeat one another's sections, so a paragraph that is held out is dropped from the training topics.

    Raises:
        InputError: this Python has no `pydoc_data`.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        documents = {}
    else:
        documents = dict(topics)
    text = _split("the language reference", documents, Path(sysconfig.get_path("stdlib"), "pydoc_data"))
    held_out = {paragraph for document in text.validation["text"] for paragraph in document.split("\n\n")}
    train = ["\n\n".join(p for p in document.split("\n\n") if p not in held_out) for document in text.train["text"]]
    return Text(text.title, _dataset(train), text.validation)


def _split(title: str, documents: dict[str, str], source: Path) -> Text:
    """Hold out every `HELD_OUT`-th document for validation, in an order that depends only on names and mixes packages.

    Args:
        title: of the text.
        documents: name → content.
        source: where they come from, for the error.
    """
    names = sorted((name for name in documents if documents[name]), key=_digest)
    if len(names) < 2:
        raise InputError(
            f"this Python has no text in {str(source)!r}; use --model and --dataset to train on something else"
        )
    train = [documents[name] for k, name in enumerate(names) if k % HELD_OUT]
    return Text(title, _dataset(train), _dataset([documents[name] for name in names[::HELD_OUT]]))


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _dataset(texts: list[str]) -> Dataset:
    from datasets import Dataset

    return Dataset.from_dict({"text": texts})


def encode_bytes(texts: list[str]) -> list[list[int]]:
    """Encode each text as its UTF-8 bytes."""
    return [list(text.encode()) for text in texts]


def token_blocks(text: Text, encode: Encode, length: int, train: int, validation: int) -> Blocks:
    """Join the documents end to end and cut them into blocks; only as many documents as needed are encoded.

    Args:
        text: the documents.
        encode: the tokenizer.
        length: tokens per block.
        train: blocks for training, at most.
        validation: blocks for validation, at most.

    Raises:
        InputError: there is not even one block of each.
    """
    return Blocks(
        text.title,
        length,
        _blocks(text.train, encode, length, train, f"{text.title}, training part"),
        _blocks(text.validation, encode, length, validation, f"{text.title}, validation part"),
    )


def _blocks(documents: Dataset, encode: Encode, length: int, count: int, title: str) -> Dataset:
    """At most `count` blocks of the documents; `title` names them in the error."""
    from datasets import Dataset

    blocks: list[list[int]] = []
    rest: list[int] = []
    for tokens in _encode_documents(documents, encode):
        rest += tokens
        cuts = range(0, len(rest) - length + 1, length)
        blocks += [rest[cut : cut + length] for cut in cuts]
        rest = rest[len(cuts) * length :]
        if len(blocks) >= count:
            break
    if not blocks:
        raise InputError(f"{title}: too little text for one block of {length} tokens ({len(rest)} tokens)")
    array = np.array(blocks[:count], dtype=np.int64)
    return Dataset.from_dict({"input_ids": array, "labels": array})


def _encode_documents(documents: Dataset, encode: Encode) -> Iterator[list[int]]:
    """Yield the tokens of each document, encoding 64 of them at a time."""
    for batch in documents.iter(batch_size=64):
        yield from encode([text or "" for text in batch["text"]])  # a row may be null
