"""FSDP2 resumes a checkpoint of another rounding mode, sharded or full, as if the mode had changed within the run."""

import re

import pytest

from tests.support.processes.ranks import many_ranks, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


ARGUMENTS = ["--max_steps", "6", "--learning_rate", "1e-2", "--per_device_train_batch_size", "2", "--save_steps", "3"]


def run(optim: str, folder, *words: str, **options) -> str:
    """The output of two ranks under FSDP2."""
    arguments = ["--output_dir", str(folder), "--optim", optim, *ARGUMENTS, *words]
    return run_ranks("trainer_ranks.py", 2, "fsdp2", *arguments, **options)


def digest(*arguments, **options) -> str:
    """A digest of all weights and states at the end."""
    return re.findall(r"^digest=(.*)$", run(*arguments, **options), re.MULTILINE)[0]


SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


@pytest.mark.parametrize(
    ("first", "then", "kind"),
    [
        ("sr", "kahan", SHARDED),
        ("kahan", "sr", SHARDED),
        ("kahan", "sr", FULL),
        pytest.param("sr", "kahan", FULL, marks=many_ranks),
    ],
)
def test_the_mode_changes_by_the_option_alone(tmp_path, first, then, kind):
    modes = {"sr": "stochastic", "kahan": "kahan"}
    schedule = ["--optim_args", f"rounding={modes[first]}:0.5|{modes[then]}"]
    resume = ["--resume_from_checkpoint", str(tmp_path / "checkpoint-3")]
    within = digest(f"adamw_bf16_{first}", tmp_path, *schedule, STATE_DICT_TYPE=kind)
    assert digest(f"adamw_bf16_{then}", tmp_path / "resumed", *resume, STATE_DICT_TYPE=kind) == within
    if kind == SHARDED:
        assert digest(f"adamw_bf16_{first}", tmp_path / "scheduled", *resume, *schedule, STATE_DICT_TYPE=kind) == within


@pytest.mark.parametrize(
    ("saver", "loader", "kind"),
    [
        ("adamw_torch", "adamw_bf16_kahan", SHARDED),
        ("adamw_bf16_kahan", "adamw_torch", FULL),
        pytest.param("adamw_torch", "adamw_bf16_kahan", FULL, marks=many_ranks),
        pytest.param("adamw_bf16_kahan", "adamw_torch", SHARDED, marks=many_ranks),
    ],
)
def test_checkpoints_of_other_optimizers_are_refused_with_the_way_out(tmp_path, saver, loader, kind):
    run(saver, tmp_path, "--max_steps", "3", STATE_DICT_TYPE=kind)
    resume = ["--resume_from_checkpoint", str(tmp_path / "checkpoint-3")]
    said = run(loader, tmp_path / "resumed", *resume, STATE_DICT_TYPE=kind, fails=True)
    assert "without resume_from_checkpoint" in said, said[-3000:]
