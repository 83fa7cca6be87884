"""Rank 0 writes patches of a model that several ranks train; a copy that applies them has its weights.

weight_patches_on_ranks.py KIND[,…] FOLDER   (as same_batches.py has them)
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import hf_lowprec
from hf_lowprec.optim.sharding import is_sharded
from tests.scripts.same_batches import build, train
from tests.support.processes.fsdp_on_cpu import allow_fsdp_on_cpu
from tests.support.processes.ranks import leave


def whole_weights(model) -> dict[str, torch.Tensor]:
    params = model.module if hasattr(model, "module") else model
    return {
        name: (param.full_tensor() if is_sharded(param) else param).detach().clone()
        for name, param in params.named_parameters()
    }


def main(kinds: str, folder: str) -> None:
    allow_fsdp_on_cpu()
    for kind in kinds.split(","):
        accelerator, model, optimizer = build(kind, "full", "split-int8", track_changes=True)  # rows of whole blocks
        for group in optimizer.param_groups:
            group["lr"] = 1e-6
        copies = whole_weights(model)
        for step in range(3):
            train(accelerator, model, optimizer, range(step, step + 1))
            path = Path(folder) / f"{kind}-{step}"
            patch = hf_lowprec.save_weight_patch(model, optimizer, path, base=step, target=step + 1)
            now = whole_weights(model)
            assert (patch is None) == (dist.get_rank() != 0)
            if patch is not None:
                hf_lowprec.apply_weight_patch(path, copies, base=step)
                assert all(torch.equal(copies[name], weight) for name, weight in now.items())
                whole = sum(weight.nbytes for weight in now.values())
                assert patch.nbytes < 0.7 * whole, (patch, whole)
        if dist.get_rank() == 0:
            print(f"{kind}: 3 patches agree")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
