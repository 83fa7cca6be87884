"""Healthy models give no finding: ten runs in FP32 and ten in BF16, at their start, at their end, and between."""

from pathlib import Path

import pytest

from hf_lowprec.tools.inspection.inspect_checkpoints import inspect_checkpoints
from tests.support.training.tiny_trainer import llama, trained

FP32_RUNS = [("adamw_torch", 1e-3), ("adamw_torch", 1e-6), ("sgd", 1e-2), ("adamw_torch_fused", 1e-4)]
BF16_RUNS = [
    ("adamw_bf16_kahan", 1e-3),
    ("adamw_bf16_sr", 1e-3),
    ("adamw_bf16_kahan", 1e-6),
    ("adamw_bf16_sr", 1e-6),
    ("lion_bf16_kahan", 1e-4),
]
RUNS = [(seed, *FP32_RUNS[seed % 4]) for seed in range(10)] + [(seed, *BF16_RUNS[seed % 5]) for seed in range(10)]


def codes(*folders: Path) -> list[str]:
    return [finding.message for finding in inspect_checkpoints(*map(str, folders)).findings]


@pytest.mark.combinations(1)
@pytest.mark.parametrize(("seed", "optim", "lr"), RUNS)
def test_no_alarm(tmp_path, seed, optim, lr):
    start, end = tmp_path / "start", tmp_path / "end"
    model = llama(seed)
    model.save_pretrained(start)
    options = {"max_steps": 16, "save_strategy": "steps", "save_steps": 8, "seed": seed, "weight_decay": 0.1}
    trained(tmp_path, model=model, optim=optim, learning_rate=lr, **options).save_model(end)
    middle, last = tmp_path / "checkpoint-8", tmp_path / "checkpoint-16"
    for folders in ((start,), (end,), (last,), (start, end), (start, last), (middle, last)):
        assert codes(*folders) == [], folders
