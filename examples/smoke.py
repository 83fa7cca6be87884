"""The small models and datasets of the examples with `--smoke`: random weights, and data that every Python has.

Nothing is downloaded: models, tokenizers and datasets are written to a folder, from where an example loads them
as it would from the hub. The text is that of the standard library: its source and its docstrings.
"""

from __future__ import annotations

import importlib
import inspect
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from accelerate import PartialState
from datasets import ClassLabel, Dataset, Features, Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

ARGUMENTS = {
    **{"max_steps": 60, "per_device_train_batch_size": 8, "learning_rate": 3e-3, "warmup_steps": 10},
    **{"logging_steps": 20, "save_strategy": "no", "report_to": "none", "use_cpu": not torch.cuda.is_available()},
}
"""Training arguments for which `--smoke` has other defaults."""


_SOURCE = Path(sysconfig.get_path("stdlib")) / "argparse.py"
MODULES = "argparse ast bisect calendar cmath codecs csv datetime decimal fractions functools heapq inspect io json"
MODULES += " logging math mimetypes operator os pathlib pickle random re shutil socket statistics string subprocess"
MODULES += " tarfile textwrap threading time tokenize types unittest urllib.parse uuid warnings zipfile"
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant>{% endif %}"
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 160}


def text() -> str:
    """The source of `argparse`, a hundred kilobytes of English and Python."""
    return str(_SOURCE)


def questions(folder: str) -> str:
    """Functions of the standard library and their docstrings: a dataset with the columns `prompt` and `completion`."""
    return _saved(_questions(), folder)


def preferences(folder: str) -> str:
    """Questions with the answer, and with the answer written backwards: columns `prompt`, `chosen` and `rejected`."""
    rows = _questions()
    chosen = rows["completion"]
    return _saved({"prompt": rows["prompt"], "chosen": chosen, "rejected": [text[::-1] for text in chosen]}, folder)


def sentences(folder: str) -> str:
    """Lines of code and lines of docstrings: columns `sentence` and `label`, 0 for code."""
    prose = [line for line in _questions()["completion"] if len(line) > 30]
    lines = (line.strip() for line in _SOURCE.read_text().splitlines())
    code = [line for line in lines if len(line) > 30 and not line.startswith("#")][: len(prose)]
    return _saved({"sentence": prose + code, "label": [1] * len(prose) + [0] * len(code)}, folder)


def images(folder: str) -> str:
    """Noisy stripes, 32 × 32: columns `image` and `label`, 0 where they are horizontal, 1 where vertical."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 600)
    stripes = np.sin(0.8 * np.arange(32) + random.uniform(0, 6.3, (600, 1)))[:, None].repeat(32, axis=1)
    stripes = np.where(labels[:, None, None] == 1, stripes, stripes.swapaxes(1, 2))
    noisy = 128 + 40 * stripes + random.normal(0, 40, stripes.shape)
    pixels = noisy.clip(0, 255).astype(np.uint8)
    features = Features({"image": Image(), "label": ClassLabel(names=["horizontal", "vertical"])})
    return _saved({"image": [PIL.Image.fromarray(one) for one in pixels], "label": labels.tolist()}, folder, features)


def _questions() -> dict[str, list[str]]:
    rows = {}
    for name in MODULES.split():
        module = importlib.import_module(name)
        for attribute, value in sorted(vars(module).items()):
            summary = (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")
            if callable(value) and not attribute.startswith("_") and 20 < len(summary) < 120:
                rows[f"What does {name}.{attribute} do?"] = summary
    return {"prompt": list(rows), "completion": list(rows.values())}


def _saved(rows: dict[str, list], folder: str, features: Features | None = None) -> str:
    path = Path(folder) / "smoke-data"
    with _one_process_first() as it_writes:
        if it_writes:
            Dataset.from_dict(rows, features).shuffle(seed=0).to_parquet(path / "train.parquet")
    return str(path)


def causal_lm(folder: str) -> str:
    """A Llama of 0.2 million parameters, without a padding token, as many have none."""
    words = _tokenizer(pad_token=None)
    special = {"eos_token_id": words.eos_token_id, "bos_token_id": None}
    config = LlamaConfig(vocab_size=len(words), num_key_value_heads=2, **special, **SIZES)
    return _written(LlamaForCausalLM, config, words, folder)


def encoder(folder: str) -> str:
    """A BERT of 0.2 million parameters."""
    words = _tokenizer()
    config = BertConfig(vocab_size=len(words), pad_token_id=words.pad_token_id, **SIZES)
    return _written(BertForMaskedLM, config, words, folder)


def seq2seq(folder: str) -> str:
    """A T5 of 0.2 million parameters."""
    words = _tokenizer()
    ids = {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id, "decoder_start_token_id": 0}
    config = T5Config(vocab_size=len(words), d_model=64, d_kv=16, d_ff=160, num_layers=2, num_heads=4, **ids)
    return _written(T5ForConditionalGeneration, config, words, folder)


def vision(folder: str) -> str:
    """A ViT of 0.1 million parameters, for images of 32 × 32."""
    from transformers import ViTImageProcessor  # warns on import that there is a faster one

    processor = ViTImageProcessor(size={"height": 32, "width": 32})
    return _written(ViTForImageClassification, ViTConfig(image_size=32, patch_size=8, **SIZES), processor, folder)


def _written(cls: type, config: PreTrainedConfig, processing: Any, folder: str) -> str:
    torch.manual_seed(0)
    path = Path(folder) / "smoke-model"
    with _one_process_first() as it_writes:
        if it_writes:
            cls(config).save_pretrained(path)
            processing.save_pretrained(path)
    return str(path)


@contextmanager
def _one_process_first() -> Iterator[bool]:
    """Under `accelerate launch`, let one process of a machine go first while the others wait."""
    state = PartialState()
    with state.local_main_process_first():
        yield state.is_local_main_process


def _tokenizer(pad_token: str | None = "<pad>") -> PreTrainedTokenizerFast:
    """A tokenizer of 512 byte pairs, trained on `text`."""
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = bytewise, decoders.ByteLevel()
    learner = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<pad>", "</s>"], initial_alphabet=bytewise.alphabet(), show_progress=False
    )
    bpe.train([text()], learner)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=pad_token, eos_token="</s>", model_max_length=256)
    wrapped.chat_template = CHAT
    return wrapped
