"""The stock Trainer on real text, in several processes."""

import functools

import pytest
import torch
from safetensors.torch import load_file

from tests.support.processes.ranks import Run, run_trainer

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

NOT_SAVED = "--save_strategy no --optim adamw_bf16_sr"


@functools.cache
def four_ranks(optim: str) -> Run:
    return run_trainer(4, "ddp", None, f"--optim {optim} --save_strategy no --max_steps 3")


@pytest.mark.parametrize("optim", ["adamw_bf16_kahan", pytest.param("adamw_bf16_sr", marks=pytest.mark.every_case)])
def test_four_ranks_are_one_rank_with_four_micro_batches(optim):
    """Bit for bit: sums over ranks and over micro-batches have the same order, and Trainer divides the loss by the
    number of tokens in the whole batch in both cases, so the scales differ by a power of two."""
    words = "--save_strategy no --max_steps 3 --gradient_accumulation_steps 4 --optim_args grad_accumulation=fp32"
    one = run_trainer(1, "ddp", None, f"--optim {optim} {words}")
    assert one.digest == four_ranks(optim).digest
    assert "DDP: FP32 sums over 4 ranks, 16-bit gradients on the wire" in four_ranks(optim).report


def test_a_model_that_was_evaluated_first_is_trained_together():
    """Accelerate then marks it as prepared, and would leave it without DDP, so that every process trains alone."""
    report = run_trainer(2, "ddp", None, f"{NOT_SAVED} --max_steps 6", EVALUATED_FIRST="1").report
    assert "DDP: FP32 sums over 2 ranks" in report  # the script compares replicas at its end


def test_the_last_batches_of_an_epoch_may_be_uneven():
    """13 sequences in batches of 2 on 2 ranks, two micro-batches a step: the fourth step of an epoch has but one.

    Every rank has other batches, and sharded or replicated, all end with the same bits.
    """
    words = f"{NOT_SAVED} --gradient_accumulation_steps 2 --max_steps 4"
    replicated, sharded = (run_trainer(2, kind, None, words, ROWS="13") for kind in ("ddp", "fsdp2"))
    assert replicated.digest == sharded.digest


def test_delayed_norms_clip_alike():
    """On two ranks with different batches; norms are larger than what they are clipped to.

    DDP's are those of whole gradients, FSDP2's are summed over shards.
    """
    words = "--max_steps 3 --save_strategy no --max_grad_norm 0.5 --optim adamw_bf16_kahan"
    words += " --optim_args gradient_release=True,clip=delayed"
    replicated, sharded = (run_trainer(2, kind, None, words, BUCKET_ELEMENTS="4000") for kind in ("ddp", "fsdp2"))
    assert replicated.digest == sharded.digest
    assert len(replicated.norms) == 3 and min(replicated.norms) > 0.5


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.every_case), "fsdp2"])
def test_the_best_weights_are_loaded_at_the_end(tmp_path, kind):
    words = "--optim adamw_bf16_kahan --max_steps 4 --save_strategy steps --save_steps 2 --eval_strategy steps"
    words += " --eval_steps 2 --load_best_model_at_end True --metric_for_best_model loss"
    words += " --greater_is_better True"  # so the earlier one is the "best"
    best = run_trainer(2, kind, tmp_path, words, SAVED_TO=str(tmp_path / "best"))
    assert "bfloat16" in best.report
    stored, first, last = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("best-stored", "checkpoint-2", "checkpoint-4")
    )
    assert stored.keys() == first.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor, first[name]), name
    assert any(not torch.equal(tensor, last[name]) for name, tensor in stored.items())


def test_replicas_that_part_are_found_by_name():
    words = f"{NOT_SAVED} --max_steps 6 --optim_args check_replicas_every=2"
    report = run_trainer(2, "ddp", None, words, fails=True, CHANGED_IN_STEP="3").report
    assert "replicas differ: model.layers.1.mlp.up_proj.weight on rank 1 differs from that on rank 0" in report
    assert "rank 0 of 2 failed" in report and "rank 1 of 2 failed" in report  # both say so


def test_a_rank_that_is_killed_while_it_saves_loses_nothing_that_was_complete(tmp_path):
    """Each checkpoint has a shard of the weights and one of the states per rank; the fourth is not written."""
    words, sharded = "--optim adamw_bf16_sr --max_steps 6 --save_strategy steps --save_steps 3", "SHARDED_STATE_DICT"
    train = functools.partial(run_trainer, 2, "fsdp2", STATE_DICT_TYPE=sharded)
    train(tmp_path, words, fails=True, KILLED_IN_SHARD="4")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-3", "checkpoint-6"}
    resumed = train(tmp_path, f"{words} --resume_from_checkpoint True")
    assert resumed.digest == train(tmp_path / "whole", words).digest
