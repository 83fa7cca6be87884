"""A classifier in an Accelerate loop on several ranks: FP32 outputs, and an FP32 loss.

accelerate_outputs.py ddp|fsdp2
"""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.nn.functional import cross_entropy

import hf_lowprec
from tests.support.models import tiny_models
from tests.support.processes.fsdp_on_cpu import allow_fsdp_on_cpu
from tests.support.processes.ranks import leave


def main(kind: str) -> None:
    allow_fsdp_on_cpu()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if kind == "fsdp2" else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model, batch = tiny_models.bert()
    hf_lowprec.cast_model(model)
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-3)
    hf_lowprec.prepare_accelerator(accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        outputs = model(**batch)
        assert outputs.logits.dtype == torch.float32
        exact = cross_entropy(outputs.logits.double(), batch["labels"])
        assert abs(outputs.loss.double() - exact) < 1e-6 * exact, (outputs.loss, exact)
        assert outputs.loss != outputs.loss.bfloat16()
        accelerator.backward(outputs.loss)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        gathered = accelerator.gather_for_metrics(model(**batch).logits)
    assert gathered.cpu().numpy().shape == (dist.get_world_size() * tiny_models.BATCH, tiny_models.CLASSES)
    print("FP32 outputs, a loss of FP32", flush=True)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
