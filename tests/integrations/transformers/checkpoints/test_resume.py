"""What is said of a checkpoint that is resumed with other options, and what is refused."""

import shutil
import warnings
from pathlib import Path

import pytest

from tests.support.chosen_cases import nightly_except
from tests.support.training.tiny_trainer import llama, optimizer_of, trained

SAVING = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "warmup_steps": 2, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("saved")
    trained(out, optim="adamw_bf16_kahan", **SAVING)
    return out / "checkpoint-3"


def test_a_checkpoint_of_another_algorithm_is_refused(saved):
    contents = {file: file.read_bytes() for file in sorted(saved.parent.rglob("*")) if file.is_file()}
    with pytest.raises(ValueError, match=r"the state of AdamW cannot be loaded into Lion: resume with AdamW"):
        trained(saved.parent, optim="lion_bf16_kahan", resume=str(saved), **SAVING)
    assert {file: file.read_bytes() for file in sorted(saved.parent.rglob("*")) if file.is_file()} == contents


def test_options_that_a_checkpoint_replaces_are_said(saved, tmp_path):
    changed = {
        **SAVING,
        "optim_args": "amsgrad=True,state_rounding=nearest",
        "weight_decay": 0.2,
        "learning_rate": 1e-3,
    }
    with pytest.warns(RuntimeWarning, match="replaces options of this AdamW") as caught:
        resumed = trained(tmp_path, optim="adamw_bf16_kahan", resume=str(saved), **changed)
    (said,) = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    assert "amsgrad=False (was True), state_rounding='stochastic' (was 'nearest'), weight_decay=0.1 (was 0.2); " in said
    assert "lr=" not in said
    assert optimizer_of(resumed).param_groups[0]["amsgrad"] is False


SCHEDULES = ("linear", "cosine_with_restarts", "reduce_lr_on_plateau")


@pytest.mark.parametrize("schedule", nightly_except(SCHEDULES[1:], SCHEDULES))
def test_nothing_is_said_of_what_schedules_change(tmp_path, schedule):
    extra = {"eval_strategy": "steps", "eval_steps": 3} if schedule == "reduce_lr_on_plateau" else {}
    settings = {**SAVING, **extra, "optim": "adamw_bf16_kahan", "lr_scheduler_type": schedule}
    trained(tmp_path, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        trained(tmp_path, model=llama(), resume=str(tmp_path / "checkpoint-3"), **settings)


@pytest.mark.parametrize(
    ("file", "how"), [("pytorch_model_fsdp.bin", "FSDP with FULL_STATE_DICT"), ("global_step3", "DeepSpeed")]
)
def test_a_checkpoint_of_another_engine_is_refused(saved, tmp_path, file, how):
    checkpoint = tmp_path / "checkpoint-3"
    shutil.copytree(saved, checkpoint, ignore=shutil.ignore_patterns("hf_lowprec_manifest.json"))
    (checkpoint / file).write_bytes((checkpoint / "scheduler.pt").read_bytes())
    with pytest.raises(ValueError, match=rf"saved under {how}, but .*hf-lowprec export"):
        trained(tmp_path, optim="adamw_bf16_kahan", resume=str(checkpoint), **SAVING)
