"""The task: from which package of the standard library is a passage? Nothing is downloaded.

The classes are six packages that every CPython has; some files of each are held out for validation. A passage is some
60 tokens cut out of a file anywhere, so it is code, docstring or comment. It rarely names its package, and has to be
recognised by its subject.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hf_lowprec.integrations.checkpoint_files.input_errors import InputError
from hf_lowprec.tools.demo.text import standard_library_documentation, standard_library_sources

PACKAGES = ("asyncio", "email", "importlib", "multiprocessing", "unittest", "xml")
"""The classes."""

HELD_OUT = 4
"""Every how many files of a package one is held out for validation."""


@dataclass(frozen=True)
class Corpus:
    """Texts by purpose; no file is in both splits.

    Attributes:
        pretraining: all texts without labels, including files of `train` and excluding those of `validation`.
        train: the files of each class.
        validation: the held-out files of each class.
    """

    pretraining: list[str]
    train: list[list[str]]
    validation: list[list[str]]


def corpus(extra: str = "") -> Corpus:
    """The standard library and its documentation.

    Args:
        extra: more text to pre-train on.

    Raises:
        InputError: this Python lacks the source of one of `PACKAGES`.
    """
    sources = standard_library_sources()
    train, validation = list[list[str]](), list[list[str]]()
    held_out: set[str] = set()
    for package in PACKAGES:
        # By size, so that the held-out files are as long as the others.
        names = sorted((n for n in sources if n.startswith(f"{package}/")), key=lambda n: (len(sources[n]), n))
        if len(names) < HELD_OUT:
            raise InputError(f"this Python has no source of the package {package!r} to make a task from")
        chosen = names[-2::-HELD_OUT]
        held_out.update(chosen)
        validation.append([sources[name] for name in chosen])
        train.append([sources[name] for name in names if name not in held_out])
    names = sorted(sources.keys() - held_out, key=_digest)
    documentation = standard_library_documentation()
    texts = [sources[name] for name in names] + [*documentation.train["text"], *documentation.validation["text"]]
    # Pieces as long as the other documents, so that one long text does not come in one piece.
    texts += [extra[k : k + 20_000] for k in range(0, len(extra), 20_000)]
    return Corpus(texts, train, validation)


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def passages(files: list[list[str]], tokenizer: Any, length: int, most: int) -> Any:
    """Passages of exactly `length` tokens, [CLS] and [SEP] included, with their class.

    Args:
        files: for each class its files.
        tokenizer: of transformers.
        length: tokens per passage.
        most: passages per class at most, spread evenly over its text.

    Returns:
        `datasets.Dataset` with columns `input_ids` and `labels`, one class after another.
    """
    from datasets import Dataset

    rows, labels = list[list[int]](), list[int]()
    for label, texts in enumerate(files):
        found = [piece for text in texts for piece in pieces(tokenizer, text, length)]
        count = min(most, len(found))
        rows += [found[k * len(found) // count] for k in range(count)]
        labels += [label] * count
    return Dataset.from_dict({"input_ids": rows, "labels": labels})


@dataclass(frozen=True)
class Task:
    """Sequences to classify.

    Attributes:
        name: for the file of results.
        classes: how many there are.
        train: `datasets.Dataset` of sequences of one length, with `labels`.
        validation: the same.
    """

    name: str
    classes: int
    train: Any
    validation: Any


def packages(tokenizer: Any, length: int, most: int) -> Task:
    """`PACKAGES` to tell apart; a quarter as many passages to validate as to train."""
    texts = corpus()
    train = passages(texts.train, tokenizer, length, most)
    validation = passages(texts.validation, tokenizer, length, most // 4)
    return Task(f"packages: {', '.join(PACKAGES)}", len(PACKAGES), train, validation)


def glue(task: str, tokenizer: Any, length: int) -> Task:
    """A classification of GLUE, from the hub; sequences are padded, or cut, to `length`."""
    from datasets import load_dataset

    splits = load_dataset("nyu-mll/glue", task)
    features = splits["train"].features
    texts = [name for name, feature in features.items() if feature.dtype == "string"]  # one, or a pair in order

    def encode(rows: Any) -> Any:
        return tokenizer(*(rows[name] for name in texts), truncation=True, padding="max_length", max_length=length)

    train, validation = (
        splits[split].rename_column("label", "labels").map(encode, batched=True, remove_columns=[*texts, "idx"])
        for split in ("train", "validation_matched" if task == "mnli" else "validation")
    )
    return Task(f"glue/{task}", features["label"].num_classes, train, validation)


def unlabelled(texts: list[str], tokenizer: Any, length: int, most: int) -> Any:
    """As `passages`, without a class: the first `most` of the texts."""
    from datasets import Dataset

    rows = islice((piece for text in texts for piece in pieces(tokenizer, text, length)), most)
    return Dataset.from_dict({"input_ids": list(rows)})


def pieces(tokenizer: Any, text: str, length: int) -> Iterator[list[int]]:
    """`text` cut into pieces of `length` tokens, [CLS] and [SEP] included; the rest is left out."""
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    inner = length - 2
    for start in range(0, len(tokens) - inner + 1, inner):
        yield [tokenizer.cls_token_id, *tokens[start : start + inner], tokenizer.sep_token_id]
