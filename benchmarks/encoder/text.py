"""The task: from which package of the standard library is this passage? No download, and files of its own to validate.

Six packages that every CPython has. A passage is some 60 tokens cut out of a file anywhere, so it is code, docstring or
comment, rarely names its package, and has to be recognised by what it is about.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hf_lowprec.cli.demo.text import InputError, standard_library_documentation, standard_library_sources

PACKAGES = ("asyncio", "email", "importlib", "multiprocessing", "unittest", "xml")
"""The classes."""

HELD_OUT = 4
"""One file of a package in so many is for validation."""


@dataclass(frozen=True)
class Corpus:
    """Texts by what they are for; a file is in one of the splits only.

    Attributes:
        pretraining: everything unlabelled, files of `train` included, of `validation` not.
        train: for each class its files.
        validation: the same.
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
        `datasets.Dataset` with columns `input_ids` and `labels`, classes in turn.
    """
    from datasets import Dataset

    rows, labels = list[list[int]](), list[int]()
    for label, texts in enumerate(files):
        cut = [piece for text in texts for piece in pieces(tokenizer, text, length - 2)]
        for k in range(min(most, len(cut))):
            rows.append([tokenizer.cls_token_id, *cut[k * len(cut) // min(most, len(cut))], tokenizer.sep_token_id])
            labels.append(label)
    return Dataset.from_dict({"input_ids": rows, "labels": labels})


def pieces(tokenizer: Any, text: str, length: int) -> Iterator[list[int]]:
    """`text` cut into pieces of `length` tokens; the rest is left out."""
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return (tokens[k : k + length] for k in range(0, len(tokens) - length + 1, length))


def sentence_pairs(texts: list[str], tokenizer: Any, length: int, count: int) -> Any:
    """What BERT is pre-trained on: pairs of neighbouring pieces, or (half of them) of pieces from two documents.

    Args:
        texts: documents.
        tokenizer: of transformers.
        length: tokens per pair, an even number, [CLS] and two [SEP] included.
        count: pairs.

    Returns:
        `datasets.Dataset` with columns `input_ids`, `token_type_ids` and `next_sentence_label` (0: neighbours), in
        random order.

    Raises:
        InputError: there is too little text.
    """
    from datasets import Dataset

    half = length // 2
    found = list[tuple[int, list[int]]]()
    for number, text in enumerate(texts):
        found += [(number, piece) for piece in pieces(tokenizer, text, length - 3)]
        if len(found) >= count and found[0][0] != number:
            break
    if not found or found[0][0] == found[-1][0]:
        raise InputError(f"too little text for two pairs of {length} tokens from two documents")
    generator = torch.Generator().manual_seed(0)

    def draw() -> int:
        return int(torch.randint(len(found), (), generator=generator))

    rows, labels = list[list[int]](), list[int]()
    order = [
        k for _ in range(-(-count // len(found))) for k in torch.randperm(len(found), generator=generator).tolist()
    ]
    for turn, at in enumerate(order[:count]):
        number, piece = found[at]
        other_number, other = number, piece
        while turn % 2 and other_number == number:
            other_number, other = found[draw()]
        first, second = piece[: half - 2], other[half - 2 :]
        rows.append([tokenizer.cls_token_id, *first, tokenizer.sep_token_id, *second, tokenizer.sep_token_id])
        labels.append(turn % 2)
    types = [[0] * half + [1] * (length - half)] * len(rows)
    return Dataset.from_dict({"input_ids": rows, "token_type_ids": types, "next_sentence_label": labels})
