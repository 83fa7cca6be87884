"""Load the user's own model and dataset, from the Hub or from local files, without output of other libraries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_lowprec.integrations.checkpoint_files.input_errors import InputError, check_path_exists, explain_input_errors
from hf_lowprec.tools.demo.text import Encode, Text

if TYPE_CHECKING:
    from datasets import Dataset


READERS = {
    ".txt": "text",
    ".md": "text",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
"""Suffix of a local file → the reader of `datasets` for it."""

HELD_OUT_SHARE = 0.1
"""Share of the rows used for validation if the dataset has no validation split."""


def load_model(name: str, length: int) -> tuple[Callable[[], nn.Module], Encode]:
    """Load a model's configuration and tokenizer.

    Args:
        name: a model on the Hub, or a folder.
        length: tokens per training block.

    Returns:
        A function that builds the model in FP32, with the same weights every time; and the tokenizer's encoding.

    Raises:
        InputError: the model cannot be loaded, or `length` exceeds its maximum length.
    """
    check_path_exists(name, "--model", READERS)

    with explain_input_errors(f"the model {name!r} cannot be loaded"):
        longest = getattr(AutoConfig.from_pretrained(name), "max_position_embeddings", None)
    with explain_input_errors(f"the tokenizer of {name!r} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(name)
    if longest is not None and length > longest:
        raise InputError(f"{name!r} takes at most {longest} tokens, but a block has {length}; use a smaller --length")

    def build() -> nn.Module:
        with explain_input_errors(f"the model {name!r} cannot be loaded"):
            model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        model.config.use_cache = False
        return model

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, verbose=False)["input_ids"]

    return build, encode


def load_text(name: str, config: str | None, column: str) -> Text:
    """Load a dataset's training and validation rows.

    Without a split called `validation` or `test`, the last rows of the training split are held out.

    Args:
        name: a dataset on the Hub, a local file, or a folder of files of one type.
        config: the configuration, for a dataset on the Hub that has several.
        column: the column that contains the text.

    Raises:
        InputError: the dataset cannot be loaded, lacks the column, or has too few rows.
    """
    from datasets import load_dataset

    check_path_exists(name, "--dataset", READERS)
    path = Path(name).expanduser()
    with explain_input_errors(f"the dataset {name!r} cannot be loaded"):
        if path.exists():
            reader, files = _local_files(path)
            options = {"keep_linebreaks": True} if reader == "text" else {}
            splits = load_dataset(reader, data_files={"train": files}, **options)
        else:
            splits = load_dataset(name, config)
    if "train" not in splits:
        raise InputError(f"the dataset {name!r} has no split 'train', only {', '.join(splits)}")
    train = splits["train"]
    if column not in train.column_names:
        raise InputError(
            f"the dataset {name!r} has no column {column!r}; set --text-column to one of "
            f"{', '.join(train.column_names)}"
        )
    if "string" not in str(getattr(train.features[column], "dtype", "")):
        raise InputError(f"the column {column!r} of the dataset {name!r} contains no text")
    rows = len(train)
    held_out = next((splits[split] for split in ("validation", "test") if split in splits), None)
    if held_out is None:
        if rows < 2:
            raise InputError(
                f"the dataset {name!r} has {rows} row; it needs at least one for training and one for validation"
            )
        last = max(1, round(rows * HELD_OUT_SHARE))
        train, held_out = train.select(range(rows - last)), train.select(range(rows - last, rows))
    return Text(Path(name).name, _select_text(train, column), _select_text(held_out, column))


def _select_text(rows: Dataset, column: str) -> Dataset:
    """Reduce the rows to their text, in a column named `text`."""
    return rows.select_columns([column]).rename_columns({column: "text"} if column != "text" else {})


def _local_files(path: Path) -> tuple[str, list[str]]:
    """The reader for a file, or for most of a folder's files, and the paths of the files that it reads."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in READERS)
    readers = Counter(READERS[file.suffix] for file in files if file.suffix in READERS)
    if not readers:
        raise InputError(
            f"{str(path)!r} is not, or does not contain, a file of a supported type ({', '.join(READERS)})"
        )
    reader = readers.most_common(1)[0][0]
    return reader, [str(file) for file in files if READERS[file.suffix] == reader]


def quiet_libraries() -> None:
    """Turn off the progress bars and the advice of transformers and datasets, for this process."""
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
