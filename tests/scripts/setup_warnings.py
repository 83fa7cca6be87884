"""What rank 0 says of 16-bit sums when an optimizer steps, in several loops on two ranks; rank 1 says nothing.

setup_warnings.py [fsdp2]
"""

import logging
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hf_lowprec
from hf_lowprec.integrations.live_models import setup_warnings
from hf_lowprec.reduction import reduce_in_fp32, reduce_scatter_in_fp32
from tests.support.processes.fsdp_on_cpu import allow_fsdp_on_cpu
from tests.support.processes.ranks import leave

messages: list[str] = []


class Collect(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        messages.append(record.getMessage())


def cast() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    hf_lowprec.cast_model(model)
    return model


def report(name: str, model: nn.Module, optimizer=None) -> None:
    setup_warnings._searches.clear()
    messages.clear()
    optimizer = optimizer or hf_lowprec.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [text for text in messages if "in 16 bits. For FP32 sums, call hf_lowprec.prepare_accelerator" in text]
    if dist.get_rank() == 0:
        print(f"{name}: {len(found)}", flush=True)
    else:
        assert not found


def prepared(by_us: bool):
    accelerator, model = Accelerator(cpu=True), cast()
    if by_us:
        hf_lowprec.prepare_accelerator(accelerator)
    return accelerator.prepare(model, hf_lowprec.AdamW(model.parameters(), lr=1e-3))


SAID = {
    "sums 16-bit gradients over ranks in 16 bits. For FP32 sums, call hf_lowprec.prep": "FSDP2 sums",
    "no longer in any module": "parameters were replaced",
    "it was never cast": "never cast",
}


def report_fsdp2(name: str, model: nn.Module, optimizer=None) -> None:
    setup_warnings._searches.clear()
    messages.clear()
    optimizer = optimizer or hf_lowprec.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.ones(2, 64, dtype=next(model.parameters()).dtype)).sum().backward()
        optimizer.step()
    found = [meaning for text in messages for phrase, meaning in SAID.items() if phrase in text]
    if dist.get_rank() == 0:
        print(f"fsdp2, {name}: {', '.join(found) or 'nothing'}", flush=True)
    else:
        assert not messages


def linear(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64)).to(dtype)


def prepared_for_fsdp2(by_us: bool):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    accelerator, model = Accelerator(cpu=True, fsdp_plugin=plugin), linear()
    if by_us:
        hf_lowprec.prepare_accelerator(accelerator)
    return accelerator.prepare(model, hf_lowprec.AdamW(model.parameters(), lr=1e-3))


def all_of_fsdp2() -> None:
    report_fsdp2("plain", fully_shard(linear()))
    ours = fully_shard(linear())
    reduce_scatter_in_fp32(ours)
    report_fsdp2("reduce_scatter_in_fp32", ours)
    report_fsdp2("policy", fully_shard(linear(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)))
    model = linear()
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-3)
    report_fsdp2("built before fully_shard", fully_shard(model), optimizer)
    report_fsdp2("never cast", fully_shard(linear(torch.float32)))
    allow_fsdp_on_cpu()
    report_fsdp2("accelerate, not prepared", *prepared_for_fsdp2(False))
    report_fsdp2("accelerate, prepared", *prepared_for_fsdp2(True))
    leave()


def all_of_ddp() -> None:
    report("plain DDP", DistributedDataParallel(cast()))
    ours = DistributedDataParallel(cast())
    reduce_in_fp32(ours)
    report("reduce_in_fp32", ours)
    other = DistributedDataParallel(cast())
    other.register_comm_hook(dist.group.WORLD, allreduce_hook)
    report("another hook", other)
    report("every rank alone", cast())
    report("accelerate, not prepared", *prepared(False))
    report("accelerate, prepared", *prepared(True))
    leave()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    logging.getLogger("hf_lowprec").addHandler(Collect())
    all_of_fsdp2() if sys.argv[1:] == ["fsdp2"] else all_of_ddp()
