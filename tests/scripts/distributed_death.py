"""One of several ranks dies, or stops, in the middle of a backward pass.

distributed_death.py trainer|ddp|fsdp2|zero2|zero3 SIGKILL|SIGSTOP TIMEOUT_IN_SECONDS OUTPUT_DIR; started once per rank,
without a launcher, which would end the others by itself.
"""

import os
import signal
import sys
from datetime import timedelta

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from torch import nn
from transformers import Trainer

import hf_lowprec
from tests.support.processes.fsdp_on_cpu import allow_fsdp_on_cpu
from tests.support.processes.rendezvous import wait_for_imports
from tests.support.training.tiny_trainer import arguments, counting_data, llama

VICTIM, STEP = 1, 3
BUCKET_MB = 0.01  # several buckets, some of which are on their way when the rank goes


def fail_in_backward(model: nn.Module, signal_number: int) -> None:
    """Let the victim send itself the signal when the backward pass of `STEP` is between the two layers: the others have
    begun to reduce the upper one's gradients, and will wait for the lower one's."""
    passes = 0

    def forward(module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        nonlocal passes
        passes += 1
        if passes == STEP and int(os.environ["RANK"]) == VICTIM:
            output.register_hook(lambda gradient: os.kill(os.getpid(), signal_number))

    model.model.layers[0].mlp.register_forward_hook(forward)


def train_with_trainer(model: nn.Module, out: str) -> None:
    configured = {"use_configured_state": True}
    args = arguments(out, optim="adamw_bf16_kahan", accelerator_config=configured, per_device_train_batch_size=2)
    args.ddp_bucket_cap_mb = BUCKET_MB
    Trainer(model=model, args=args, train_dataset=counting_data()).train()


def train_with_accelerator(model: nn.Module, sharded: bool) -> None:
    options: dict = {}
    if sharded:
        allow_fsdp_on_cpu()
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
        )
    buckets = DistributedDataParallelKwargs(bucket_cap_mb=BUCKET_MB)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[buckets], **options)
    hf_lowprec.cast_model(model)
    hf_lowprec.prepare_accelerator(accelerator)
    model, optimizer = accelerator.prepare(model, hf_lowprec.AdamW(model.parameters(), lr=1e-2))
    rows = torch.stack([row["input_ids"] for row in counting_data(8)])
    for _ in range(2 * STEP):
        accelerator.backward(model(input_ids=rows, labels=rows).loss)
        optimizer.step()
        optimizer.zero_grad()


def train_with_deepspeed(model: nn.Module, stage: int) -> None:
    import tests.support.processes.deepspeed_on_cpu  # noqa: F401
    from hf_lowprec.integrations.deepspeed.initialize import initialize_deepspeed

    hf_lowprec.cast_model(model)
    zero = {"stage": stage, "reduce_bucket_size": int(BUCKET_MB * 2**20 / 2)}
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": zero}
    engine, *_ = initialize_deepspeed(model, hf_lowprec.AdamW(model.parameters(), lr=1e-2), config)
    rows = torch.stack([row["input_ids"] for row in counting_data(8)])
    for _ in range(2 * STEP):
        engine.backward(engine(input_ids=rows, labels=rows).loss)
        engine.step()


def main(kind: str, signal_name: str, seconds: str, out: str) -> None:
    wait_for_imports()
    # Not `ddp_timeout`: transformers drops it with `use_cpu`.
    PartialState(cpu=True, timeout=timedelta(seconds=int(seconds)))
    model = llama()
    fail_in_backward(model, signal.Signals[signal_name])
    if kind == "trainer":
        train_with_trainer(model, out)
    elif kind.startswith("zero"):
        train_with_deepspeed(model, int(kind[-1]))
    else:
        train_with_accelerator(model, sharded=kind == "fsdp2")
    raise SystemExit("trained to the end, which no rank can")


if __name__ == "__main__":
    main(*sys.argv[1:])
