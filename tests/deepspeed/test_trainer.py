"""The stock Trainer with a DeepSpeed configuration full of "auto", in two processes."""

import functools
import shutil

import pytest

from tests.support.chosen_cases import EVERY_CASE
from tests.support.processes.ranks import run_trainer

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

WORDS = (
    "--optim adamw_bf16_split --max_steps 4 --gradient_accumulation_steps 2 --max_grad_norm 0.5 "
    "--save_strategy steps --save_steps 2 "
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of each kind, and where it saved its checkpoints; each is made once."""

    @functools.cache
    def run(kind: str):
        folder = tmp_path_factory.mktemp(kind)
        return run_trainer(2, kind, folder, WORDS), folder

    return run


MORE = [pytest.param(kind, marks=pytest.mark.every_case) for kind in ("zero1", "zero2")]


@pytest.mark.parametrize("kind", [*MORE, "zero3"])
def test_a_resumed_run_ends_with_the_same_bits(kind, whole):
    before, folder = whole(kind)
    assert f"ZeRO {kind[-1]}: FP32 sums over 2 ranks, 16-bit gradients on the wire" in before.report
    flags = "bf16.enabled, bf16.bf16_master_weights_and_grads, bf16.bf16_optimizer_states"
    assert f"set in DeepSpeed's configuration: {flags}" in before.report
    shutil.rmtree(folder / "checkpoint-4")
    after = run_trainer(2, kind, folder, f"{WORDS} --resume_from_checkpoint True")
    assert after[1:] == before[1:]


@pytest.mark.parametrize("kind", ["zero2", pytest.param("zero3", marks=pytest.mark.every_case)])
def test_the_best_weights_come_with_their_states(kind, tmp_path):
    """At the end, they are loaded as when resuming: remainders and all. Trained longer, this model gets better."""
    words = f"{WORDS} --lr_scheduler_type constant "
    best = "--load_best_model_at_end True --eval_strategy steps --eval_steps 2 --metric_for_best_model loss"
    worst = run_trainer(2, kind, tmp_path / "four steps", f"{words} {best} --greater_is_better True")
    shorter = run_trainer(2, kind, tmp_path / "two steps", f"{words} --max_steps 2")
    assert worst.digest == shorter.digest
    assert "were loaded in 16 bits, as stored" not in worst.report


def test_the_logged_norm_is_that_of_one_process(whole, tmp_path):
    """Of the first step, whose weights are the same: gradients are rounded to BF16, each to a relative 2^-8 at most
    while it is accumulated. The norm is that before clipping, and clipping to 0.5 changes it."""
    alone = run_trainer(1, "ddp", tmp_path, f"{WORDS} --gradient_accumulation_steps 4")
    kinds = ("zero1", "zero2", "zero3") if EVERY_CASE else ("zero2", "zero3")
    for kind in kinds:
        assert whole(kind)[0].norms[0] == pytest.approx(alone.norms[0], rel=2**-8), kind
    assert min(alone.norms) > 0.5
