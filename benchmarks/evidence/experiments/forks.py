"""Pre-training that forks: does each way of training go on where autocast does?

A Llama is pre-trained on Python sources in FP32 with BF16 autocast. From these weights, every way trains on, on the
same batches at a tenth of the rate. What counts is the difference of the batches' losses over the last steps.

The full size is a few minutes of one GPU, which cases must not share:

    python -m benchmarks.evidence forks --full --device cuda --processes 1 --output FOLDER
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.evidence.experiments.steps import change_slightly
from benchmarks.evidence.harness import Experiment, Workspace
from benchmarks.evidence.page import Row, Section, markdown_table
from benchmarks.evidence.statistics import Paired, exceeds, paired, verdict
from benchmarks.evidence.training import text
from benchmarks.evidence.training.loop import Training
from benchmarks.evidence.training.modes import MODES

TRUNK, PERTURBED = "trunk", "perturbed"
LABELS = {name: mode.label for name, mode in MODES.items()}
LABELS[PERTURBED] = "FP32 weights, autocast, first weights changed by a thousandth"
WITHIN = {"split": 0.002, "feedback": 0.003}
ABOVE = {"nearest": 0.02}
"""Predictions in nats per token, made before the experiment ran."""
_WAYS = ("split", "feedback", "nearest", "feedback-int8", "o2", "split-int8", "sr")
BLOCKS = 10
"""Of consecutive steps at the end, each with one mean difference: losses of neighbouring steps depend on each other."""
BYTES_PER_TOKEN = 5
"""At most."""
PIECE, LEARNED = 100_000, 200
"""Characters that are split into tokens at once, and pieces from which the vocabulary is learned."""


@dataclass(frozen=True)
class Settings:
    """Settings of the training runs.

    Attributes:
        ways: names in `MODES` and `PERTURBED`, autocast first.
        layers: of the model.
        width: of the model.
        vocabulary: tokens of the byte-pair encoding, which is learned from the text.
        batch: sequences per step.
        length: tokens per sequence.
        first_steps: of the trunk.
        first_rate: its largest rate; it falls to a tenth.
        steps: of each fork.
        rate: its largest rate; likewise.
        tail: of its last steps, losses are compared.
        validation: batches.
        packages: whether installed packages are part of the text.
        compiled: whether decoder layers are compiled.
    """

    ways: tuple[str, ...] = ("autocast", PERTURBED, *_WAYS)
    layers: int = 12
    width: int = 768
    vocabulary: int = 8192
    batch: int = 16
    length: int = 1024
    first_steps: int = 1200
    first_rate: float = 6e-4
    steps: int = 500
    rate: float = 6e-5
    tail: int = 100
    validation: int = 8
    packages: bool = True
    compiled: bool = True


HOUR = Settings(
    layers=2, width=64, vocabulary=512, batch=8, length=64, first_steps=1500, first_rate=3e-3, steps=400, rate=3e-4,
    validation=16, packages=False, compiled=False,
)  # fmt: skip


class ReplicaForCausalLM(LlamaForCausalLM):
    """One replica for `Training`."""

    def losses(self, tokens: Tensor) -> Tensor:
        """The mean loss of a batch, of shape (1)."""
        return self(input_ids=tokens, labels=tokens).loss.view(1)


class Batches:
    """The batches of every step: the same for every way."""

    def __init__(self, train: Tensor, validation: Tensor) -> None:
        self._train, self._validation = train, validation

    def of_step(self, step: int) -> Tensor:
        """Shape (batch, length)."""
        return self._train[step].long()

    def validation(self) -> Iterator[tuple[Tensor, int]]:
        """Batches that are held out, and their numbers of rows."""
        return ((part.long(), len(part)) for part in self._validation)


def cases(settings: Settings) -> list[str]:
    """The trunk, then the forks."""
    return [TRUNK, *settings.ways]


def needs(case: str) -> list[str]:
    """Forks begin with the weights of the trunk."""
    return [] if case == TRUNK else [TRUNK]


def batches(settings: Settings, work: Workspace) -> tuple[Batches, str]:
    """The tokens, which the first case makes and keeps, and their checksum."""
    path = work.folder / "tokens.pt"
    if not path.exists():
        torch.save(_tokens(settings, work), path)
    parts: list[Tensor] = torch.load(path)
    checksum = hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()[:16]
    return Batches(*parts), checksum


def _tokens(settings: Settings, work: Workspace) -> list[Tensor]:
    """To train on and to validate on: int16 of shape (steps, batch, length)."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    coder, found = Tokenizer(models.BPE()), []
    coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=settings.vocabulary, initial_alphabet=alphabet, show_progress=False)
    counts = (settings.first_steps + settings.steps, settings.validation)
    for steps, part in zip(counts, text.load(work.data, settings.packages), strict=False):
        needed = steps * settings.batch * settings.length
        words = part[: BYTES_PER_TOKEN * needed].numpy().tobytes().decode(errors="ignore")
        pieces = [words[k : k + PIECE] for k in range(0, len(words), PIECE)]
        if not found:
            coder.train_from_iterator(pieces[:LEARNED], trainer)
        ids = [torch.tensor(each.ids, dtype=torch.int16) for each in coder.encode_batch(pieces)]
        tokens = torch.cat(ids)[:needed]
        if len(tokens) < needed:
            raise SystemExit(f"forks: the text has {len(tokens):,} of {needed:,} tokens")
        sequences = tokens.view(-1, settings.length)
        order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(0))  # a batch is of many files
        found.append(sequences[order].view(steps, settings.batch, settings.length))
    return found


def model_of(case: str, settings: Settings, work: Workspace) -> ReplicaForCausalLM:
    """The first weights of a case, in FP32."""
    torch.manual_seed(0)
    heads = settings.width // 64
    model = ReplicaForCausalLM(LlamaConfig(
        vocab_size=settings.vocabulary, hidden_size=settings.width, intermediate_size=settings.width * 8 // 3,
        num_hidden_layers=settings.layers, num_attention_heads=heads, num_key_value_heads=heads, use_cache=False,
        max_position_embeddings=settings.length, tie_word_embeddings=True, attn_implementation="sdpa",
    ))  # fmt: skip
    if case != TRUNK:
        model.load_state_dict(work.load(TRUNK)["model"])
    if case == PERTURBED:
        change_slightly(model.parameters(), seed=0)
    return model


def run(case: str, settings: Settings, work: Workspace) -> dict[str, Any]:
    """Train the trunk, or from its weights in one way."""
    data, checksum = batches(settings, work)
    of_trunk = (0, settings.first_steps, settings.first_rate)
    first, steps, largest = of_trunk if case == TRUNK else (settings.first_steps, settings.steps, settings.rate)

    def rate(step: int) -> float:
        done = max(0, step - first)
        return largest * min((done + 1) / max(1, steps // 20), 1 - 0.9 * done / steps)

    mode = MODES["autocast" if case in (TRUNK, PERTURBED) else case]
    options = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    model = model_of(case, settings, work)
    training = Training(work, case, mode, model, data, rate, options, kept=settings.tail)
    training.step = first
    training.load(case)
    if settings.compiled:
        torch.compiler.reset()
        for layer in model.model.layers:
            layer.compile()
    points = training.run(first + steps)
    tail = torch.cat(training.losses).tolist()
    return {"points": points, "tail": tail, "text": checksum, "parameters": model.num_parameters()}


def apart(losses: list[float], exact: list[float]) -> Paired:
    """The difference over blocks of steps."""
    return paired(*(np.array(each).reshape(BLOCKS, -1).mean(1) for each in (losses, exact)))


def section(record: dict[str, Any]) -> Section:
    """Differences from autocast: of training losses over the last steps, and of the validation loss."""
    settings, found = Settings(**record["settings"]), record["cases"]
    ways, rows, lines = [way for way in settings.ways[1:] if way in found], list[Row](), list[list[str]]()
    exact = found["autocast"]
    for way in ways:
        difference = apart(found[way]["tail"], exact["tail"])
        spread = float(np.std(np.subtract(found[way]["tail"], exact["tail"]), ddof=1))
        held_out = found[way]["points"][-1]["loss"][0] - exact["points"][-1]["loss"][0]
        lines.append([LABELS[way], str(difference), f"{spread:.4f}", f"{held_out:+.4f}"])
        if way in WITHIN:
            claim = f"{LABELS[way]}: within {WITHIN[way]} of autocast"
            rows.append(Row(claim, str(difference), verdict(difference, WITHIN[way])))
        if way in ABOVE:
            claim = f"{LABELS[way]}: more than {ABOVE[way]} above autocast"
            beyond = difference._replace(mean=difference.mean - ABOVE[way])
            rows.append(Row(claim, str(difference), exceeds([beyond])))
    words = (
        f"A Llama of {exact['parameters'] / 1e6:.2f} million parameters ({settings.layers} layers, width "
        f"{settings.width}) learns Python sources in FP32 with autocast, {settings.first_steps:,} steps of "
        f"{settings.batch} × {settings.length} tokens. From these weights, every way trains {settings.steps} steps on "
        f"the same batches, at a rate that rises to {settings.rate:g} and falls to a tenth, with new AdamW states, "
        "β₂ = 0.95 and decay 0.1. Differences are from autocast in nats per token, over the last "
        f"{settings.tail} steps. There is one run of each way, and the interval is that of {BLOCKS} blocks of steps. "
        "The way whose first weights were changed shows how far runs part by chance. Limits were fixed before the "
        "first run; since a first run of a small model, sequences of many files are in each batch."
    )
    heads = ["", "loss of batches, less autocast's", "deviation of steps", "validation loss, less autocast's"]
    answer = ", ".join(f"{row.claim.partition(':')[0]} {row.ours}" for row in rows)
    return Section(
        "Forks of one pre-training", words, rows, [], question="Does pre-training go on where autocast does?",
        answer=f"Loss less autocast's, in nats/token: {answer}.", model=f"{exact['parameters'] / 1e6:.2f} million",
        table=markdown_table(heads, lines),
    )  # fmt: skip


EXPERIMENT = Experiment(
    "forks", {"hour": HOUR, "full": Settings()}, cases, run, section,
    reference=lambda case: "autocast", needs=needs, on_gpus=True,
)  # fmt: skip
