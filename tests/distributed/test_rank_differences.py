"""Ranks that differ in settings or weights get an error before they diverge."""

import pytest

from tests.support.processes.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.every_case), "fsdp2"])
def test_what_differs_is_told_on_every_rank_before_the_first_step(kind):
    """Ranks whose devices, buffers, backends or data differ get no error."""
    printed = run_ranks("rank_differences.py", 2, kind)
    assert printed.count(": told") == 20
    assert f"{kind}: compared" in printed


def test_what_replicas_of_shards_have_in_common():
    assert "hsdp: compared" in run_ranks("rank_differences.py", 4, "hsdp")


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_an_accelerator_that_has_prepared_a_model_for_training_is_refused(kind):
    assert f"{kind}: refused" in run_ranks("prepared_before.py", 2, kind)


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.every_case)])
def test_trainers_that_differ_tell(kind, tmp_path):
    words = ["--optim", "adamw_bf16_sr", "--save_strategy", "no", "--max_steps", "2", "--output_dir", tmp_path]
    printed = run_ranks("trainer_ranks.py", 2, kind, *words, SEED_OF_RANK_1="5", fails=True)
    assert printed.count("param_groups[0]['seed'] is 5 on rank 1 and 42 on rank 0; param_groups[1]['seed'] is 5") == 2
    assert "rank 0 of 2 failed" in printed and "rank 1 of 2 failed" in printed
