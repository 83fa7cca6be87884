"""Pre-train a small ModernBERT and its tokenizer on real text, in FP32 and in minutes, and keep them in a folder.

ModernBERT, because its classifier can take the mean over a passage: BERT's takes [CLS], of which masked words alone
teach nothing.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from encoder.text import corpus, unlabelled

SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
RECORD = "pretraining.json"


@dataclass(frozen=True)
class Pretraining:
    """How the encoder is made.

    Attributes:
        steps: optimizer steps.
        batch_size: passages per step.
        length: tokens per passage.
        hidden: width.
        layers: blocks.
        vocabulary: WordPieces.
        learning_rate: the peak.
        text: path of a file with more text, or empty.
    """

    steps: int = 1000
    batch_size: int = 32
    length: int = 64
    hidden: int = 128
    layers: int = 4
    vocabulary: int = 4096
    learning_rate: float = 2e-3
    text: str = ""


def pretrained(settings: Pretraining, folder: Path) -> dict[str, Any]:
    """Make sure that `folder` has a tokenizer and an encoder of these settings.

    Returns:
        A record of its training: `settings`, and the training loss as (step, loss).
    """
    record = folder / RECORD
    if record.is_file():
        found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
        if found["settings"] == asdict(settings):
            return found
    shutil.rmtree(folder, ignore_errors=True)
    texts = corpus(Path(settings.text).read_text(encoding="utf-8") if settings.text else "").pretraining
    tokenizer = word_pieces(texts[::4], settings.vocabulary)
    losses = _train(settings, texts, tokenizer, folder)
    found = {"settings": asdict(settings), "losses": losses}
    record.write_text(json.dumps(found, indent=1), encoding="utf-8")  # last: a folder without it is not complete
    return found


def word_pieces(texts: list[str], vocabulary: int) -> Any:
    """BERT's tokenizer (words split at punctuation, then WordPieces; cased), trained on `texts`."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIAL.values()), limit_alphabet=200, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def _train(settings: Pretraining, texts: list[str], tokenizer: Any, folder: Path) -> list[tuple[int, float]]:
    set_seed(0)
    model = ModernBertForMaskedLM(
        ModernBertConfig(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden,
            intermediate_size=2 * settings.hidden,  # gated: three matrices of it
            num_hidden_layers=settings.layers,
            num_attention_heads=max(1, settings.hidden // 32),
            max_position_embeddings=settings.length,
            classifier_pooling="mean",
            sparse_prediction=True,  # logits of masked tokens only
            pad_token_id=tokenizer.pad_token_id,
            cls_token_id=tokenizer.cls_token_id,
            sep_token_id=tokenizer.sep_token_id,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            optim="adamw_torch",
            max_steps=settings.steps,
            per_device_train_batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=settings.steps // 10,
            weight_decay=0.01,
            logging_steps=max(1, settings.steps // 20),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=unlabelled(texts, tokenizer, settings.length, settings.steps * settings.batch_size),
        data_collator=DataCollatorForLanguageModeling(tokenizer),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
