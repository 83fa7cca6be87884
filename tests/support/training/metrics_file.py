"""Metrics files as a run writes them, with numbers like those of a small Llama. Nothing is trained."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KINDS = ("embeddings", "attention", "mlp", "norms", "head")
LOST = {"nearest": 0.97, "kahan": 0.0, "stochastic": 0.0}
"""Share of the updates that is lost at the end of a cosine schedule."""


def run_record(rounding: str, model: str = "LlamaForCausalLM") -> dict[str, Any]:
    counts = dict(zip(KINDS, (32768, 65536, 131072, 640, 32768), strict=True))
    kinds = {
        kind: {"tensors": 2, "parameters": count, "dtypes": {"float32" if kind == "norms" else "bfloat16": count}}
        for kind, count in counts.items()
    }
    report = f"hf_lowprec: {model}, AdamW, {rounding} rounding\n  BF16 weights   0.26 M\n  FP32 norms     640\n"
    record = {"record": "run", "version": 1, "model": model, "optimizer": "AdamW", "kinds": kinds, "report": report}
    return {**record, "optim": f"adamw_bf16_{rounding}", "parameters": sum(counts.values())}


def step_records(
    rounding: str, steps: int = 2000, every: int = 20, seed: int = 0, kinds: Sequence[str] = KINDS
) -> list[dict[str, Any]]:
    """One record per `every` steps, with an evaluation five times per run."""
    generator = random.Random(seed)
    records = []
    for step in range(every, steps + 1, every):
        done = step / steps
        rate = 2e-5 * (0.5 + 0.5 * math.cos(math.pi * done))
        floor = 2.31 if rounding == "nearest" else 2.05
        loss = floor + 0.9 * math.exp(-6 * done)
        record: dict[str, Any] = {"record": "step", "step": step, "epoch": round(3 * done, 4)}
        record["loss"] = round(loss + generator.gauss(0, 0.02), 4)
        record["grad_norm"] = round(1.4 * math.exp(generator.gauss(0, 0.25)) * (1 + 4 * math.exp(-20 * done)), 4)
        record["learning_rate"] = rate
        record["precision"] = {
            kind: _precision(rounding, kind, done, rate, generator) for kind in ("all", *kinds) if kind != "norms"
        }
        if "norms" in kinds:
            record["precision"]["norms"] = {"never_moved": 0.0, "update_to_weight": rate * 0.6}
        if rounding == "nearest":
            worst = [["model.layers.3.self_attn.q_proj.weight", 0.998], ["model.embed_tokens.weight", 0.991]]
            record["worst"] = {"lost_updates": worst}
            share = record["precision"]["all"]["lost_updates"]
            record["findings"] = [
                f"Rounding lost {share:.0%} of the updates of the 16-bit weights. Use optim='adamw_bf16_kahan'."
            ]
        if step % (steps // 5) == 0:
            record["eval_loss"] = round(loss + 0.05, 4)
        records.append(record)
    return records


def _precision(rounding: str, kind: str, done: float, rate: float, generator: random.Random) -> dict[str, float]:
    shift = {"all": 0.0, "embeddings": 0.02, "attention": -0.08, "mlp": -0.05, "head": -0.2}[kind]
    error = 0.05 if rounding == "stochastic" else 0.004
    lost = LOST[rounding] and min(1.0, LOST[rounding] + shift - 0.35 * rate / 2e-5)
    found = {
        "lost_updates": lost + generator.gauss(0, error),
        "lost_updates_error": error,
        "lost_second_moment": generator.gauss(0, 0.03),
        "lost_second_moment_error": 0.03,
        "lost_weight_decay": 1.0 if rounding == "nearest" else generator.gauss(0, 0.02),
        "lost_weight_decay_error": 0.02,
        "never_moved": (0.9 + shift / 3) * math.exp(-done),
        "update_to_weight": rate * 50 * math.exp(shift) * math.exp(generator.gauss(0, 0.03)),
    }
    if rounding == "nearest":
        found["changed"] = round(1 - lost, 4)  # in a real file only where lost_updates is unknown
    else:
        found["never_moved"] = round(0.02 + 0.9 * math.exp(-30 * done), 4)
    if rounding == "kahan":
        found["compensation_ulps"] = 0.289 + generator.gauss(0, 0.002)
    return found


def write_metrics(folder: Path, rounding: str = "kahan", **options: Any) -> Path:
    """The metrics file of a run in `folder`; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "hf_lowprec_metrics.jsonl"
    write_records(path, [run_record(rounding), *step_records(rounding, **options)])
    return path


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record, allow_nan=False) + "\n" for record in records), encoding="utf-8")
