"""Train on several ranks; save the model by `save_pretrained`, a checkpoint, and the FP32 state dict.

exported_on_ranks.py ddp|fsdp2|hsdp full|sharded FOLDER [adapters]

Writes FOLDER/live (the model) and FOLDER/state (for `export_checkpoint`); `fp32.pt` is `fp32_state_dict`, gathered.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import hf_lowprec
from tests.scripts import same_batches, trainer_ranks
from tests.scripts.same_batches import build, train
from tests.support.processes.fsdp_on_cpu import allow_fsdp_on_cpu
from tests.support.processes.ranks import leave


def adapted() -> torch.nn.Module:
    import peft

    return peft.get_peft_model(trainer_ranks.llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))


def main(kind: str, format: str, folder: str, adapters: str = "") -> None:
    allow_fsdp_on_cpu()
    if adapters:
        same_batches.llama = adapted
    accelerator, model, optimizer = build(kind, format, "kahan")
    train(accelerator, model, optimizer, range(3))
    before = [param.detach().clone() for param in model.parameters()]
    hf_lowprec.save_pretrained(model, optimizer, Path(folder, "live"), max_shard_size="50KB")
    written = "adapter_config.json" if adapters else "model.safetensors.index.json"
    if kind != "ddp" or accelerator.is_main_process:
        assert Path(folder, "live", written).exists()  # complete on every rank
    accelerator.save_state(str(Path(folder, "state")))
    full = hf_lowprec.fp32_state_dict(accelerator.unwrap_model(model), optimizer)
    full = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in full.items()}
    if accelerator.is_main_process:
        torch.save(full, Path(folder, "fp32.pt"))
    for param, was in zip(model.parameters(), before, strict=True):
        assert param.dtype == was.dtype
        assert torch.equal(*(tensor.to_local() if kind != "ddp" else tensor for tensor in (param, was)))
    if kind != "ddp":
        Path(folder, "a file").touch()
        try:
            hf_lowprec.save_pretrained(model, optimizer, Path(folder, "a file", "below"))
        except (OSError, RuntimeError) as error:
            named = isinstance(error, OSError) if dist.get_rank() == 0 else "rank 0 could not save" in str(error)
            assert named, error
        else:
            raise AssertionError("saved below a file")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
