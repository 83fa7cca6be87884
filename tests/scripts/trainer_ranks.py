"""The stock Trainer on real text in however many processes there are; rank 0 prints what it trained.

trainer_ranks.py ddp|fsdp2|hsdp|zero1|zero2|zero3|llama:SIZES|moe:SIZES [--words of TrainingArguments]

With SIZES, arguments of `DistributedConfig` such as fsdp_size=2,tp_size=2, transformers shards the model at load.

With ROWS=n in the environment there are n sequences to train on.
With EVALUATED_FIRST in the environment the model is evaluated before it is trained.
With CHANGED_IN_STEP=n one weight of rank 1 is changed in step n.
With SEED_OF_RANK_1=n rank 1 is started with another `--seed`.
With SAVED_TO=FOLDER the trained model is saved there by `save_pretrained`, and to FOLDER-stored by the Trainer.
With STATE_DICT_TYPE in the environment FSDP2 saves checkpoints of that type.
With BUCKET_ELEMENTS=n gradient release has buckets of that size.
With HIDDEN_SIZE=n the model has that hidden size; most states can be in 8 bits if it is a multiple of 32.
With MACHINES=FOLDER in the environment every rank is a machine of its own, which works in FOLDER/RANK.
With KILLED_IN_SHARD=n in the environment rank 1 is killed while it writes its n-th shard of a checkpoint.
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.utils import ParallelismConfig
from torch.distributed.checkpoint import FileSystemWriter
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hf_lowprec
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from hf_lowprec.optim.param_groups import unwrap_optimizer
from hf_lowprec.reduction import check_replicas
from tests.distributed import test_sharded_at_load as sharded_at_load
from tests.support.processes.fsdp_on_cpu import allow_fsdp_on_cpu
from tests.support.processes.ranks import leave
from tests.support.processes.shards import digest, of_every_rank
from tests.support.training.counting_text import tokenizer

LENGTH = 32


def text(rows: int) -> list[dict[str, torch.Tensor]]:
    """The source of a module of the standard library, in bytes; ranks get different numbers of labels."""
    with open(argparse.__file__, "rb") as file:
        tokens = torch.frombuffer(bytearray(file.read(rows * LENGTH)), dtype=torch.uint8).long().view(-1, LENGTH)
    ignored = torch.arange(rows)[:, None] % 4 * 10 > torch.arange(LENGTH)
    labels = tokens.masked_fill(ignored, -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def llama(**settings) -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = {"hidden_size": 36, "intermediate_size": 70, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **size | settings))


def loaded(kind: str, folder: Path) -> torch.nn.Module:
    """A model that transformers shards while loading it from `folder`, where it is saved first."""
    name, written = kind.split(":")
    sizes = sharded_at_load.begin(written)
    if dist.get_rank() == 0:
        sharded_at_load.build(name, vocab_size=256).save_pretrained(folder)
    dist.barrier()
    return sharded_at_load.load(folder, sizes)


def digest_of_parts(optimizer: torch.optim.Optimizer) -> str:
    """Of every weight and every state that any rank steps."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return "-".join(of_every_rank(digest(params, optimizer)))


def zero(stage: int) -> list[str]:
    """Words for `TrainingArguments`: DeepSpeed, which is to take what it can from them."""
    from tests.support.processes.deepspeed_on_cpu import allow_deepspeed_on_cpu

    allow_deepspeed_on_cpu()
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
    buckets = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    config = {
        **dict.fromkeys(names, "auto"),
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage, **dict.fromkeys(buckets, "auto")},
    }
    return ["--deepspeed", json.dumps(config)]


def die_in_shard(number: int) -> None:
    original, written = FileSystemWriter.write_data, 0

    def write_data(self, *args, **kwargs):
        nonlocal written
        written += 1
        if written == number and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args, **kwargs)

    FileSystemWriter.write_data = write_data


class ChangeAWeight(TrainerCallback):
    """Changes one weight on one rank, as broken memory or a nondeterministic kernel would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step + 1 == self.step and dist.get_rank() == 1:
            model.get_parameter("model.layers.1.mlp.up_proj.weight").data[3, 5] += 1


def main(kind: str, *words: str) -> None:
    allow_fsdp_on_cpu()
    if "MACHINES" in os.environ:
        os.environ["LOCAL_RANK"] = "0"
        os.makedirs(f"{os.environ['MACHINES']}/{os.environ['RANK']}", exist_ok=True)
        os.chdir(f"{os.environ['MACHINES']}/{os.environ['RANK']}")
    die_in_shard(int(os.environ.get("KILLED_IN_SHARD", "0")))
    config = {"version": 2}
    if "STATE_DICT_TYPE" in os.environ:
        config["state_dict_type"] = os.environ["STATE_DICT_TYPE"]
    if kind.startswith("zero"):
        sharded = zero(int(kind[-1]))
    else:
        sharded = ["--use_cpu", *(["--fsdp", "--fsdp_config", json.dumps(config)] if kind in ("fsdp2", "hsdp") else [])]
    if "SEED_OF_RANK_1" in os.environ and os.environ["RANK"] == "1":
        sharded += ["--seed", os.environ["SEED_OF_RANK_1"]]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--report_to", "none", "--disable_tqdm", "True", "--logging_steps", "1", *sharded, *words]
    )
    if kind == "hsdp":
        args.parallelism_config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    gradient_buckets.BUCKET_ELEMENTS = int(os.environ.get("BUCKET_ELEMENTS", gradient_buckets.BUCKET_ELEMENTS))
    rows, change = int(os.environ.get("ROWS", "256")), ChangeAWeight(int(os.environ.get("CHANGED_IN_STEP", "0")))
    processing = tokenizer() if "SAVED_TO" in os.environ else None
    datasets = {"train_dataset": text(rows), "eval_dataset": text(8)}
    size = {"hidden_size": int(os.environ["HIDDEN_SIZE"])} if "HIDDEN_SIZE" in os.environ else {}
    model = loaded(kind, Path(f"{args.output_dir}-base")) if ":" in kind else llama(**size)
    trainer = Trainer(model, args, **datasets, callbacks=[change], processing_class=processing)
    if "EVALUATED_FIRST" in os.environ:
        trainer.evaluate()
    resume = args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if resume == "True" else resume)
    if not kind.startswith("zero"):
        check_replicas(trainer.model, trainer.optimizer)
    if "SAVED_TO" in os.environ:
        folder = os.environ["SAVED_TO"]
        hf_lowprec.save_pretrained(trainer.model, trainer.optimizer, folder, processing_class=processing)
        trainer.save_model(f"{folder}-stored")
    if kind.startswith("zero") or ":" in kind:
        found = digest_of_parts(unwrap_optimizer(trainer.optimizer))
    else:
        found = digest(trainer.model.parameters(), trainer.optimizer.optimizer)
    if trainer.accelerator.is_main_process:
        print(f"digest={found}")
        for key in ("loss", "grad_norm"):
            print(f"{key}={[entry[key] for entry in trainer.state.log_history if key in entry]}")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
