"""Low bits of an FP32 model, through `prepare` on several ranks; rank 0 prints digests of what is trained.

low_bits_on_ranks.py ddp|fsdp2|fsdp2-ram_efficient|hsdp[,…]

With `fsdp2-ram_efficient` (`cpu_ram_efficient_loading`) only rank 0 has weights before `prepare`, as transformers then
loads a model.
"""

import os
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator

import hf_lowprec
from hf_lowprec.rounding.attached_low_bits import attached_low_bits
from tests.scripts.trainer_ranks import digest, llama, text
from tests.support.processes.fsdp_on_cpu import accelerator_arguments, allow_fsdp_on_cpu
from tests.support.processes.ranks import leave

STEPS = 3


def full_estimates(model, optimizer) -> dict[str, torch.Tensor]:
    """The result of `fp32_state_dict` with full tensors, by parameter's name."""
    found = hf_lowprec.fp32_state_dict(model, optimizer)
    return {
        name.removeprefix("module."): value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in found.items()
    }


def check_arrived(model, optimizer, exact: dict[str, torch.Tensor]) -> None:
    """Every trainable 16-bit parameter, or shard of one, has its low bits: FP32's weights are there to 2**-16."""
    for name, param in model.named_parameters():
        assert (attached_low_bits(param) is not None) == (param.dtype == torch.bfloat16), name
    estimates = full_estimates(model, optimizer)
    for name, weights in exact.items():
        assert ((estimates[name] - weights).abs() <= 2.0**-16 * weights.abs()).all(), name


def check_next_optimizer(model, optimizer) -> None:
    """An optimizer that is built after the training begins with the FP32 weights at its end, in the same shards."""
    expected = full_estimates(model, optimizer)
    hf_lowprec.keep_low_bits(optimizer)
    following = hf_lowprec.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, rounding="split", seed=5)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    following.step()
    found = full_estimates(model, following)
    assert all(torch.equal(found[name], weights) for name, weights in expected.items())


def run(kind: str) -> str:
    kind, _, variant = kind.partition("-")
    sharding = accelerator_arguments(
        kind,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="FULL_STATE_DICT",
        cpu_ram_efficient_loading=variant == "ram_efficient",
    )
    accelerator = Accelerator(cpu=True, **sharding)
    model = llama()
    exact = {name: param.detach().clone() for name, param in model.named_parameters()}
    if (kind == "ddp" or variant == "ram_efficient") and not accelerator.is_main_process:  # rank 0's replace them
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.25 if kind == "ddp" else 0)
    hf_lowprec.cast_model(model)
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    hf_lowprec.prepare_accelerator(accelerator)
    model, wrapped = accelerator.prepare(model, optimizer)
    optimizer = wrapped.optimizer
    check_arrived(model, optimizer, exact)
    rows = text(2 * STEPS)
    for step in range(STEPS):
        tokens = torch.stack([row["input_ids"] for row in rows[2 * step : 2 * step + 2]])
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        wrapped.step()
        wrapped.zero_grad()
    assert not any(hasattr(param, "_low_bits") for param in model.parameters())
    found = digest(model, optimizer)
    check_next_optimizer(model, optimizer)
    return found


def main(kinds: str) -> None:
    allow_fsdp_on_cpu()
    for kind in kinds.split(","):
        found = run(kind)
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"{kind} {found}", flush=True)
    if dist.is_initialized():
        leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
