"""The stock Trainer on real text, in several processes."""

import functools
import json
import re
import shutil
import tempfile

import pytest
import torch
from safetensors.torch import load_file

from tests.support.processes.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def trained(ranks: int, kind: str, *words: str, folder: str | None = None, **options) -> dict[str, str]:
    fixed = "--max_steps 6 --learning_rate 1e-2 --per_device_train_batch_size 2"
    with tempfile.TemporaryDirectory() as unused:
        out = folder or unused
        printed = run_ranks("trainer_ranks.py", ranks, kind, "--output_dir", out, *fixed.split(), *words, **options)
    return {"report": printed} | dict(line.split("=", 1) for line in printed.splitlines() if line.startswith("digest="))


@functools.cache
def four_ranks(optim: str) -> dict[str, str]:
    return trained(4, "ddp", "--optim", optim, "--save_strategy", "no", "--max_steps", "3")


@pytest.mark.parametrize("optim", ["adamw_bf16_kahan", pytest.param("adamw_bf16_sr", marks=pytest.mark.every_case)])
def test_four_ranks_are_one_rank_with_four_micro_batches(optim):
    """Bit for bit: sums over ranks and over micro-batches have the same order, and Trainer divides the loss by the
    number of tokens in the whole batch in both cases, so the scales differ by a power of two."""
    words = "--save_strategy no --max_steps 3 --gradient_accumulation_steps 4 --optim_args grad_accumulation=fp32"
    one = trained(1, "ddp", "--optim", optim, *words.split())
    assert one["digest"] == four_ranks(optim)["digest"]
    assert "DDP: FP32 sums over 4 ranks, 16-bit gradients on the wire" in four_ranks(optim)["report"]


@pytest.mark.every_case
def test_sharded_is_replicated():
    """Every rank has different batches, and all end with the same bits."""
    sharded = trained(4, "fsdp2", "--optim", "adamw_bf16_sr", "--save_strategy", "no", "--max_steps", "3")
    assert sharded["digest"] == four_ranks("adamw_bf16_sr")["digest"]


def test_a_model_that_was_evaluated_first_is_trained_together():
    """Accelerate then marks it as prepared, and would leave it without DDP, so that every process trains alone."""
    words = ["--optim", "adamw_bf16_sr", "--save_strategy", "no"]
    report = trained(2, "ddp", *words, EVALUATED_FIRST="1")["report"]  # the script compares replicas at its end
    assert "DDP: FP32 sums over 2 ranks" in report


def test_the_last_batches_of_an_epoch_may_be_uneven():
    """13 sequences in batches of 2 on 2 ranks, two micro-batches a step: the fourth step of an epoch has but one."""
    words = "--optim adamw_bf16_sr --save_strategy no --gradient_accumulation_steps 2 --max_steps 4"
    found = [trained(2, kind, *words.split(), ROWS="13")["digest"] for kind in ("ddp", "fsdp2")]
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.every_case), "fsdp2"])
def test_the_best_weights_are_loaded_at_the_end(tmp_path, kind):
    words = "--optim adamw_bf16_kahan --max_steps 4 --save_strategy steps --save_steps 2 --eval_strategy steps"
    words += " --eval_steps 2 --load_best_model_at_end True --metric_for_best_model loss"
    words += " --greater_is_better True"  # so the earlier one is the "best"
    best = trained(2, kind, *words.split(), folder=str(tmp_path), SAVED_TO=str(tmp_path / "best"))
    assert "bfloat16" in best["report"]
    stored, first, last = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("best-stored", "checkpoint-2", "checkpoint-4")
    )
    assert stored.keys() == first.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor, first[name]), name
    assert any(not torch.equal(tensor, last[name]) for name, tensor in stored.items())


def test_replicas_that_part_are_found_by_name():
    words = ["--optim", "adamw_bf16_sr", "--save_strategy", "no", "--optim_args", "check_replicas_every=2"]
    printed = trained(2, "ddp", *words, CHANGED_IN_STEP="3", fails=True)["report"]
    assert "replicas differ: model.layers.1.mlp.up_proj.weight on rank 1 differs from that on rank 0" in printed
    assert "rank 0 of 2 failed" in printed and "rank 1 of 2 failed" in printed  # both say so


def test_a_rank_that_is_killed_while_it_saves_loses_nothing_that_was_complete(tmp_path):
    """Each checkpoint has a shard of the weights and one of the states per rank; the fourth is not written."""
    sharded = json.dumps({"version": 2, "state_dict_type": "SHARDED_STATE_DICT"})
    words = ["--optim", "adamw_bf16_sr", "--save_strategy", "steps", "--save_steps", "3", "--fsdp_config", sharded]
    trained(2, "fsdp2", *words, folder=str(tmp_path), KILLED_IN_SHARD="4", fails=True)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-3", "checkpoint-6"}
    resumed = trained(2, "fsdp2", *words, "--resume_from_checkpoint", "True", folder=str(tmp_path))
    assert resumed["digest"] == trained(2, "fsdp2", *words, folder=str(tmp_path / "whole"))["digest"]


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_resume_is_bit_exact(tmp_path, kind):
    words = ["--optim", "adamw_bf16_kahan", "--save_strategy", "steps", "--save_steps", "3"]
    whole = trained(2, kind, *words, folder=str(tmp_path))
    assert re.search(r"compensation +starts with low bits", whole["report"])
    shutil.rmtree(tmp_path / "checkpoint-6")
    resumed = trained(2, kind, *words, "--resume_from_checkpoint", str(tmp_path / "checkpoint-3"), folder=str(tmp_path))
    assert resumed["digest"] == whole["digest"]
    history = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "lost_updates" in entry] == [1, 2, 3, 4, 5, 6]
