"""Train on the same batches in every process, and print a digest of weights and states at the end.

same_batches.py ddp|fsdp2|hsdp|cp[-VARIANT][,…] ROUNDING[-int8][,…] [save|resume full|sharded|dcp FOLDER]

It saves half-way, and resumes from there.
"""

import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import TorchDynamoPlugin
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

import hf_lowprec
from hf_lowprec.reduction import check_replicas
from tests.scripts.trainer_ranks import digest, llama, text
from tests.support.optim.simulated_copies import simulate_device
from tests.support.processes.fsdp_on_cpu import accelerator_arguments, allow_fsdp_on_cpu
from tests.support.processes.ranks import leave

HALF = 2
DDP = {name: {name: True} for name in ("static_graph", "find_unused_parameters", "gradient_as_bucket_view")}
DDP["small_buckets"] = {"bucket_cap_mb": 0.01}


def build(kind: str, format: str, rounding: str, **options):
    kind, _, variant = kind.partition("-")
    sharding = accelerator_arguments(
        kind,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="FULL_STATE_DICT" if format == "full" else "SHARDED_STATE_DICT",
        activation_checkpointing=variant == "checkpointing",
        reshard_after_forward=variant != "gathered",
        cpu_ram_efficient_loading=variant == "meta",
        cpu_offload=CPUOffloadPolicy(pin_memory=False) if variant == "offload" else OffloadPolicy(),
    )
    accelerator = Accelerator(
        cpu=True,
        **sharding,
        kwargs_handlers=[DistributedDataParallelKwargs(**DDP[variant])] if variant in DDP else [],
        dynamo_plugin=TorchDynamoPlugin(backend="aot_eager") if variant == "compiled" else None,
    )
    rounding, _, in_8_bits = rounding.partition("-")
    model = llama(hidden_size=64) if in_8_bits else llama()
    if variant == "states_on_host":
        simulate_device(pytest.MonkeyPatch(), seed=accelerator.process_index)
        options["offload_states"] = True
    if variant == "gradient_checkpointing":
        model.gradient_checkpointing_enable()
    hf_lowprec.cast_model(model)
    one_of_each = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32}
    state_dtype = torch.int8 if in_8_bits else one_of_each
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-2, rounding=rounding, state_dtype=state_dtype, **options)
    hf_lowprec.prepare_accelerator(accelerator)
    return accelerator, *accelerator.prepare(model, optimizer)


def train(accelerator, model, optimizer, steps: range) -> None:
    rows = text(64)
    for step in steps:
        tokens = torch.stack([row["input_ids"] for row in rows[2 * step : 2 * step + 2]])
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def save(accelerator, model, optimizer, format: str, folder: Path) -> None:
    if format == "dcp":
        weights, states = get_state_dict(model, optimizer.optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    else:
        accelerator.save_state(str(folder))


def load(accelerator, model, optimizer, format: str, folder: Path) -> None:
    if format == "dcp":
        weights, states = get_state_dict(model, optimizer.optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
        set_state_dict(model, optimizer.optimizer, model_state_dict=weights, optim_state_dict=states)
    else:
        accelerator.load_state(str(folder))


def run(kind: str, rounding: str, task: str, format: str, folder: str) -> None:
    accelerator, model, optimizer = build(kind, format, rounding)
    if task == "resume":
        load(accelerator, model, optimizer, format, Path(folder))
    else:
        train(accelerator, model, optimizer, range(HALF))
    if task == "save":
        save(accelerator, model, optimizer, format, Path(folder))
    train(accelerator, model, optimizer, range(HALF, 2 * HALF))
    found = digest(model, optimizer.optimizer)
    in_8_bits = any("exp_avg_code" in state for state in optimizer.optimizer.state.values())
    assert in_8_bits == rounding.endswith("-int8")
    check_replicas(model, optimizer)
    if accelerator.is_main_process:
        print(f"{kind} {rounding} {found}")


def main(kinds: str, roundings: str, task: str = "", format: str = "full", folder: str = "") -> None:
    allow_fsdp_on_cpu()
    for kind, rounding in product(kinds.split(","), roundings.split(",")):
        run(kind, rounding, task, format, folder)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
