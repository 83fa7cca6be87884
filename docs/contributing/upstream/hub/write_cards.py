"""Write the cards of two models that differ in the optimizer alone, with the numbers of a recorded experiment.

python docs/contributing/upstream/hub/write_cards.py
"""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECORD = HERE.parents[3] / "benchmarks" / "results" / "evidence" / "pretrained-night.json"
RATE = "2e-05"
TWINS = {"fp32": ("adamw_torch", "FP32", 16), "split": ("adamw_bf16_split", "BF16", 10)}
"""Name in the record -> `optim`, dtype of the weights in training, bytes per parameter."""
FOLDERS = {"fp32": "fp32", "split": "adamw_bf16_split"}

CARD = """\
---
library_name: transformers
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
pipeline_tag: text-generation
tags: [hf_lowprec, {optim}]
model-index:
- name: smollm2-135m-{folder}
  results:
  - task: {{type: text-generation}}
    dataset: {{name: Python's standard library, type: python-stdlib}}
    metrics: [{{type: loss, name: nats per token, value: {loss:.4f}}}]
---

# SmolLM2-135M, trained in {dtype} with `{optim}`

One of two models with the same start, data, order and hyperparameters. The other is
[OWNER/smollm2-135m-{other}](https://huggingface.co/OWNER/smollm2-135m-{other}).

{table}

Losses are in nats per token, on {validation} × {length} held-out tokens, computed in FP32 with FP32 weights. Bytes are
for weights, gradients and optimizer states.

**Training**: {steps} steps of {batch} × {length} tokens of Python's standard library, AdamW with β₂ = 0.999 and weight
decay 0.01, a constant rate of {rate} after warm-up. The first weights were dequantized from 4 bits and rounded to BF16.
Uploaded: seed 0, in FP32.

**Limits**: an experiment, not a better model. It is one small model, one rate and {seeds} seeds, not run on a GPU.
"""


def card(way: str) -> str:
    """The text of a twin's card."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    settings, cases = record["settings"], record["cases"]
    runs = {each: [cases[f"{each} {RATE} {seed}"] for seed in range(settings["seeds"])] for each in TWINS}
    before = f"{runs['fp32'][0]['before']:.4f}"
    rows = [["", *(f"`{optim}`" for optim, _, _ in TWINS.values())], ["---", "---:", "---:"]]
    rows.append(["bytes per parameter", *(str(size) for _, _, size in TWINS.values())])
    rows.append(["loss before", before, before])
    for seed in range(settings["seeds"]):
        rows.append([f"loss after, seed {seed}", *(f"{runs[each][seed]['loss']:.4f}" for each in TWINS)])
    optim, dtype, _ = TWINS[way]
    (other,) = {*FOLDERS} - {way}
    return CARD.format(
        **settings, optim=optim, dtype=dtype, folder=FOLDERS[way], other=FOLDERS[other], rate=float(RATE),
        loss=runs[way][0]["loss"], table="\n".join(f"| {' | '.join(row)} |" for row in rows),
    )  # fmt: skip


if __name__ == "__main__":
    for way, folder in FOLDERS.items():
        (HERE / folder / "README.md").write_text(card(way), encoding="utf-8")
