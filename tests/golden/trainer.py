"""Trainer with every `optim=` string, and a checkpoint that an earlier commit's Trainer wrote and this one resumes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

import hf_lowprec
from tests.golden.models import Scales, digests

CHECKPOINT = Path(__file__).with_name("checkpoints") / "trainer"
RESUMED = "adamw_bf16_kahan"
STEPS, SAVED_AT = 4, 2
ARGS_OF = {RESUMED: "state_dtype=exp_avg_sq:float32,seed=3"}
"""Options by optimizer name."""


class Trained(Scales):
    """Scales as Trainer calls a model: a number in each batch tells which gradients it has."""

    def forward(self, number: Tensor) -> dict[str, Tensor]:
        self.give_factors(False, int(number), 0, 0)
        return {"loss": super().forward(torch.zeros(()))}


def train(optim: str, folder: Path, resume: Path | None = None) -> dict[str, str]:
    """Digests of the weights and optimizer state after four steps, saved in `folder` after two."""
    arguments = TrainingArguments(
        output_dir=str(folder), optim=optim, optim_args=ARGS_OF.get(optim),
        learning_rate=2.0**-9, max_steps=STEPS,
        per_device_train_batch_size=1, gradient_accumulation_steps=2, max_grad_norm=0.5, weight_decay=0.125,
        lr_scheduler_type="linear", save_steps=SAVED_AT, save_strategy="steps" if optim == RESUMED else "no",
        use_cpu=True, report_to=[], logging_strategy="no", disable_tqdm=True, remove_unused_columns=False,
        dataloader_pin_memory=False,
    )  # fmt: skip
    model = Trained()
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"number": k} for k in range(64)])
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return digests(model, optimizer)


def write(folder: Path, target: Path = CHECKPOINT) -> None:
    """Keep the checkpoint of step two."""
    train(RESUMED, folder)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder / f"checkpoint-{SAVED_AT}", target)


def entries(runs: list[str]) -> list[str]:
    """The `optim=` strings of runs, if they have one, and what is resumed."""
    names = [run.lower().replace("stochastic", "sr").replace(" ", "_bf16_") for run in runs]
    return [*(name for name in names if name in hf_lowprec.OPTIMIZER_NAMES), f"{RESUMED}, resumed"]


def record(folder: Path, runs: list[str], checkpoint: Path = CHECKPOINT) -> dict[str, Any]:
    """Digests of trainings from the start, and from the checkpoint of an earlier commit."""
    *names, resumed = entries(runs)
    found = {optim: train(optim, folder / optim) for optim in names}
    saved = torch.load(checkpoint / "training_args.bin", weights_only=False)
    started = folder / "started" / f"checkpoint-{SAVED_AT}"
    shutil.copytree(checkpoint, started)
    found[resumed] = train(saved.optim, folder / "started", started)
    return found
