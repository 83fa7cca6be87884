"""`prepare_accelerator` on an accelerator that has prepared models before, on two ranks.

prepared_before.py ddp|fsdp2
"""

import copy
import sys

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn

import hf_lowprec
from tests.support.processes.fsdp_on_cpu import allow_fsdp_on_cpu
from tests.support.processes.ranks import leave


def accelerator(kind: str) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    return Accelerator(cpu=True, fsdp_plugin=plugin if kind == "fsdp2" else None)


def complaint(built: Accelerator) -> str:
    try:
        hf_lowprec.prepare_accelerator(built)
    except ValueError as error:
        return str(error)
    return ""


def check(kind: str) -> None:
    reference = nn.Linear(4, 4).bfloat16()
    model, built = copy.deepcopy(reference), accelerator(kind)
    evaluated = built.prepare_model(reference, evaluation_mode=True)
    assert evaluated is reference and all(param.requires_grad for param in reference.parameters())
    assert not complaint(built), "what is only evaluated has no gradients to sum"

    built = accelerator(kind)
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=0.1)
    prepared, _ = built.prepare(model, optimizer)
    assert "call prepare_accelerator before accelerator.prepare" in complaint(built), type(prepared)

    torch.manual_seed(0)
    model = nn.Linear(4, 4).bfloat16()
    if kind == "ddp":
        built = accelerator(kind)
        prepared = built.prepare(model)  # its optimizer follows later
        assert "call prepare_accelerator before accelerator.prepare" in complaint(built), type(prepared)
        check_optimizer(accelerator(kind), model)


def check_optimizer(built: Accelerator, model: nn.Module) -> None:
    """An optimizer that was prepared before, with another learning rate on every rank, is compared all the same."""
    optimizer = built.prepare(hf_lowprec.AdamW(model.parameters(), lr=0.1 * (1 + PartialState().process_index)))
    assert not complaint(built)
    prepared = built.prepare(model)
    prepared(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        assert "lr" in str(error), error
    else:
        raise AssertionError("ranks with different learning rates were not compared")


if __name__ == "__main__":
    allow_fsdp_on_cpu()
    check(sys.argv[1])
    if PartialState().is_main_process:
        print(f"{sys.argv[1]}: refused", flush=True)
    leave()
