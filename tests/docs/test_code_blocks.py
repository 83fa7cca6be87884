"""The Python blocks of a page run, one after the other, on tiny models and without a hub."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import hf_lowprec
from tests.support.docs.pages import DOCS, ROOT, blocks
from tests.support.training.counting_text import preferences, sentences, tokenizer
from tests.support.training.tiny_trainer import counting_data, llama

MODEL = "HuggingFaceTB/SmolLM2-135M"
"""The name that pages load by; a folder with a tiny model takes its place."""

DATA = "stanfordnlp/imdb"
"""The data set that pages load by name; some sentences take its place."""

PAGES = [
    page
    for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
    if ("contributing" not in page.parts or "upstream" in page.parts)
    and any(block.language == "python" for block in blocks(page))
]

DEFAULTS = {"max_steps": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_steps": 1}
"""Training arguments that are added to those of a page: two steps, on the CPU."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama and its tokenizer, saved."""
    path = tmp_path_factory.mktemp("model")
    model = llama()
    model.config.update({"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512})
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def prelude(folder: str) -> dict[str, Any]:
    """The names that pages take for granted."""
    import datasets

    rows = counting_data(16)
    return {
        "model": AutoModelForCausalLM.from_pretrained(folder),
        "tokenizer": AutoTokenizer.from_pretrained(folder),
        "dataset": rows,
        "loader": torch.utils.data.DataLoader(rows, batch_size=8),
        "text_dataset": datasets.Dataset.from_dict({"text": sentences(16)}),
        "preference_dataset": datasets.Dataset.from_list(preferences(16)),
    }


def without_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `DistributedConfig` check its sizes, for which there are no processes here, and shard nothing."""
    config = transformers.distributed.DistributedConfig
    monkeypatch.setattr(transformers.distributed, "DistributedConfig", lambda **sizes: config(**sizes) and None)


def installed(block: str) -> bool:
    """Whether what `block` says it needs, `# needs NAME`, is here: packages that no extra in `all` installs."""
    return all(importlib.util.find_spec(name) is not None for name in re.findall(r"# needs (\w+)", block))


def defaults_of_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every `TrainingArguments` of a page take `DEFAULTS` where the page says nothing."""
    from trl import DPOConfig, SFTConfig

    for cls in (TrainingArguments, SFTConfig, DPOConfig):
        original = cls.__init__

        def init(self: Any, *args: Any, original: Any = original, **kwargs: Any) -> None:
            original(self, *args, **{**DEFAULTS, **kwargs})

        monkeypatch.setattr(cls, "__init__", init)


def without_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `load_dataset` give sentences for `DATA`."""
    import datasets

    rows, original = datasets.Dataset.from_dict({"text": sentences(16)}), datasets.load_dataset
    load = lambda name, **kwargs: rows if name == DATA else original(name, **kwargs)  # noqa: E731
    monkeypatch.setattr(datasets, "load_dataset", load)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(
    page: Path, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    defaults_of_arguments(monkeypatch)
    without_sharding(monkeypatch)
    without_hub(monkeypatch)
    Path("train.txt").write_text("\n".join(sentences(16)))
    names = prelude(folder)
    if "reference" in page.parts:  # shows calls; the others are programs, with their imports
        names |= {"hf_lowprec": hf_lowprec, "TrainingArguments": TrainingArguments, "accelerator": Accelerator()}
        names |= {"optimizer": hf_lowprec.AdamW(names["model"].parameters())}
    for block in blocks(page):
        if block.language == "python" and installed(block.text):
            source = block.text.replace(MODEL, folder)
            if "mesh" in source:
                names["mesh"] = request.getfixturevalue("mesh")
            code = compile("\n" * block.line + source, str(page), "exec")
            exec(code, names)
