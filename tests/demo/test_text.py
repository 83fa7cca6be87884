"""The text of the demo: what every Python carries, the same each time, split without overlap."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("datasets")

from hf_lowprec.integrations.checkpoint_files.input_errors import InputError
from hf_lowprec.tools.demo import text


@pytest.mark.parametrize("read", [text.standard_library_modules, text.standard_library_documentation])
def test_the_built_in_text_is_the_same_every_time_and_split(read: Any) -> None:
    first, second = read(), read()
    for part in ("train", "validation"):
        assert getattr(first, part)["text"] == getattr(second, part)["text"]
    assert not set(first.train["text"]) & set(first.validation["text"])
    assert sum(map(len, first.train["text"])) > 100_000


def test_no_held_out_paragraph_of_the_documentation_is_trained_on() -> None:
    documents = text.standard_library_documentation()
    train, held_out = (
        {paragraph for document in part["text"] for paragraph in document.split("\n\n")} - {""}
        for part in (documents.train, documents.validation)
    )
    assert held_out and not train & held_out


def test_blocks_are_the_documents_end_to_end() -> None:
    from datasets import Dataset

    documents = text.Text("x", Dataset.from_dict({"text": ["abc", "defgh", "i"]}), Dataset.from_dict({"text": ["xyz"]}))
    blocks = text.token_blocks(documents, text.encode_bytes, 3, 4, 10)
    assert [bytes(row) for row in blocks.train["input_ids"]] == [b"abc", b"def", b"ghi"]
    assert blocks.train["labels"] == blocks.train["input_ids"]
    with pytest.raises(InputError, match="too little text"):
        text.token_blocks(documents, text.encode_bytes, 4, 2, 10)
