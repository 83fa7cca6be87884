"""A training run that takes seconds, on all ranks of a launch: a tiny Llama learns to count, with the stock Trainer."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import gettempdir
from typing import NoReturn

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

from hf_lowprec import LowPrecisionCallback

VOCABULARY, LENGTH, STEPS = 64, 16, 12


def training_arguments(**options: object) -> TrainingArguments:
    """`TrainingArguments` that write and print nothing, for the device that Trainer chooses."""
    quiet = {
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "log_level": "error",
        "ddp_find_unused_parameters": False,
    }
    use_cpu = not torch.accelerator.is_available()  # otherwise accelerate starts no process group on a CPU
    return TrainingArguments(gettempdir(), use_cpu=use_cpu, **quiet, **options)  # type: ignore[arg-type]


@contextmanager
def joined_ranks() -> Iterator[None]:
    """Join the process group of an `accelerate launch` or `torchrun`, as Trainer would, and leave it at the end."""
    _ = training_arguments().device  # reading this property starts the process group
    yield
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def abort_launch() -> NoReturn:
    """End this process and with it the launch: other ranks may be waiting in a collective that this one left."""
    sys.stderr.flush()
    os._exit(1)


def train() -> tuple[Trainer, dict[str, torch.Tensor]]:
    """Train the tiny Llama.

    Returns:
        The trainer after training, and a copy of the weights before it, by name, on the CPU.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
        )
    )
    tokens = (torch.arange(VOCABULARY).unsqueeze(1) + torch.arange(LENGTH)) % VOCABULARY
    trainer = Trainer(
        model,
        training_arguments(optim="adamw_bf16_kahan", learning_rate=1e-2, max_steps=STEPS, logging_steps=1),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],  # type: ignore[arg-type]
        callbacks=[LowPrecisionCallback(report=False)],
    )
    trainer.remove_callback(PrinterCallback)
    before = {name: param.detach().to("cpu", copy=True) for name, param in model.named_parameters()}
    trainer.train()
    return trainer, before
