"""One of several ranks dies, or stops, in the middle of a backward pass.

distributed_death.py trainer|ddp|fsdp2 SIGKILL|SIGSTOP TIMEOUT_IN_SECONDS; started once per rank, without a launcher,
which would end the others by itself.
"""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
)
from torch import nn
from transformers import Trainer

import hf_lowprec
from tests.integrations.tiny_training import arguments, counting_data, llama

VICTIM, STEP, BUCKET_MB = 1, 3, 0.01


def wait_for_imports() -> None:
    """Ranks of a busy machine get here at very different times, which must not count against the short timeout."""
    ranks = int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(minutes=4))
    if store.add("imported", 1) == ranks:
        store.set("all imported", "yes")
    store.wait(["all imported"])


def fail_in_backward(model: nn.Module, signal_number: int) -> None:
    """Rank 1 sends itself the signal when step 3's backward pass has the gradients of the upper layer, not those of
    the lower one: the others have started to reduce some, and wait for the rest."""
    passes = 0

    def forward(module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        nonlocal passes
        passes += 1
        if passes == STEP and int(os.environ["RANK"]) == VICTIM:
            output.register_hook(lambda gradient: os.kill(os.getpid(), signal_number))

    model.model.layers[0].mlp.register_forward_hook(forward)


def train_with_trainer(signal_number: int, seconds: int) -> None:
    model = llama()
    fail_in_backward(model, signal_number)
    args = arguments(os.environ["OUT"], optim="adamw_bf16_kahan", ddp_timeout=seconds, per_device_train_batch_size=2)
    args.ddp_bucket_cap_mb = BUCKET_MB
    Trainer(model=model, args=args, train_dataset=counting_data()).train()


def train_with_accelerator(kind: str, signal_number: int, seconds: int) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(
        cpu=True,
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(seconds=seconds)),
            DistributedDataParallelKwargs(bucket_cap_mb=BUCKET_MB),
        ],
    )
    if kind == "fsdp2":  # accelerate itself shards on GPUs only
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    model = llama()
    hf_lowprec.cast_model(model)
    fail_in_backward(model, signal_number)
    hf_lowprec.prepare_accelerator(accelerator)
    model, optimizer = accelerator.prepare(model, hf_lowprec.AdamW(model.parameters(), lr=1e-2))
    rows = torch.stack([row["input_ids"] for row in counting_data(8)])
    for _ in range(2 * STEP):
        accelerator.backward(model(input_ids=rows, labels=rows).loss)
        optimizer.step()
        optimizer.zero_grad()


def main(kind: str, signal_name: str, seconds: str) -> None:
    wait_for_imports()
    signal_number = signal.Signals[signal_name]
    if kind == "trainer":
        train_with_trainer(signal_number, int(seconds))
    else:
        train_with_accelerator(kind, signal_number, int(seconds))
    print("trained to the end", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
