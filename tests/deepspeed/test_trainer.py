"""The stock Trainer with a DeepSpeed configuration full of "auto", in two processes."""

import ast
import functools
import shutil

import pytest

from tests.support.chosen_cases import EVERY_CASE
from tests.support.processes.ranks import run_ranks

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.distributed]

WORDS = (
    "--optim adamw_bf16_split --max_steps 4 --learning_rate 1e-2 --per_device_train_batch_size 2 "
    "--gradient_accumulation_steps 2 --max_grad_norm 0.5 --save_strategy steps --save_steps 2 --output_dir"
)


def trained(kind: str, folder, *more: str, ranks: int = 2, **options) -> dict[str, str]:
    printed = run_ranks("trainer_ranks.py", ranks, kind, *WORDS.split(), str(folder), *more, **options)
    lines = [line.split("=", 1) for line in printed.splitlines() if line.startswith(("digest=", "losses=", "norms="))]
    return {"report": printed} | dict(lines)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of each kind, and where it saved its checkpoints; each is made once."""

    @functools.cache
    def run(kind: str):
        folder = tmp_path_factory.mktemp(kind)
        return trained(kind, folder), folder

    return run


MORE = [pytest.param(kind, marks=pytest.mark.every_case) for kind in ("zero1", "zero2")]


@pytest.mark.parametrize("kind", [*MORE, "zero3"])
def test_a_resumed_run_ends_with_the_same_bits(kind, whole):
    before, folder = whole(kind)
    assert f"ZeRO {kind[-1]}: FP32 sums over 2 ranks, 16-bit gradients on the wire" in before["report"]
    flags = "bf16.enabled, bf16.bf16_master_weights_and_grads, bf16.bf16_optimizer_states"
    assert f"set in DeepSpeed's configuration: {flags}" in before["report"]
    shutil.rmtree(folder / "checkpoint-4")
    after = trained(kind, folder, "--resume_from_checkpoint", "True")
    assert [after[key] for key in ("digest", "losses", "norms")] == [
        before[key] for key in ("digest", "losses", "norms")
    ]


@pytest.mark.parametrize("kind", ["zero2", pytest.param("zero3", marks=pytest.mark.every_case)])
def test_the_best_weights_come_with_their_states(kind, tmp_path):
    """At the end, they are loaded as when resuming: remainders and all. Trained longer, this model gets better."""
    constant = ("--lr_scheduler_type", "constant")
    best = "--load_best_model_at_end True --eval_strategy steps --eval_steps 2 --metric_for_best_model loss"
    worst = trained(kind, tmp_path / "four steps", *best.split(), "--greater_is_better", "True", *constant)
    shorter = trained(kind, tmp_path / "two steps", "--max_steps", "2", *constant)
    assert worst["digest"] == shorter["digest"]
    assert "were loaded as they are stored" not in worst["report"]


def test_the_logged_norm_is_that_of_one_process(whole, tmp_path):
    """Of the first step, whose weights are the same: gradients are rounded to BF16, each to a relative 2^-8 at most
    while it is accumulated. The norm is that before clipping, and clipping to 0.5 changes it."""
    alone = trained("ddp", tmp_path, "--gradient_accumulation_steps", "4", ranks=1)
    kinds = ("zero1", "zero2", "zero3") if EVERY_CASE else ("zero2", "zero3")
    norms = {kind: ast.literal_eval(whole(kind)[0]["norms"]) for kind in kinds}
    expected = ast.literal_eval(alone["norms"])
    for kind in norms:
        assert norms[kind][0] == pytest.approx(expected[0], rel=2**-8), kind
    assert min(expected) > 0.5
