"""What rank 0 says of 16-bit sums when an optimizer steps, in several loops on two ranks; rank 1 says nothing."""

import logging

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import hf_lowprec
from hf_lowprec.integrations import first_step_warnings
from hf_lowprec.reduction import reduce_in_fp32
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
    first_step_warnings._searches_left.update(dict.fromkeys(first_step_warnings._searches_left, 1))
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


def main() -> None:
    dist.init_process_group("gloo")
    logging.getLogger("hf_lowprec").addHandler(Collect())
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
    main()
