"""Start on each of several ranks: after which micro-batches FSDP2 has reduced the gradients to shards."""

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch.distributed.tensor import DTensor

import hf_lowprec
from tests.scripts.trainer_ranks import llama, text
from tests.support.processes.fsdp_on_cpu import accelerator_arguments, allow_fsdp_on_cpu
from tests.support.processes.ranks import leave


def run(sync_each_batch: bool) -> list[bool]:
    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=sync_each_batch)
    sharding = accelerator_arguments("fsdp2", auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, **sharding)
    model = llama()
    hf_lowprec.cast_model(model)
    optimizer = hf_lowprec.AdamW(model.parameters())
    hf_lowprec.prepare_accelerator(accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)
    reduced = []
    for row in text(3):
        tokens = row["input_ids"][None]
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            reduced.append(all(isinstance(param.grad, DTensor) for param in model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
    return reduced


if __name__ == "__main__":
    allow_fsdp_on_cpu()
    for sync_each_batch in (False, True):
        found = run(sync_each_batch)
        if dist.get_rank() == 0:
            print(f"{sync_each_batch=}: shards after micro-batches {found}", flush=True)
    leave()
