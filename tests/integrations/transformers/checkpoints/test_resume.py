"""Resuming continues bit for bit, in every mode; other checkpoints are refused."""

import re
import runpy
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests.support.chosen_cases import nightly_except
from tests.support.optim.optimizer_contents import assert_equal
from tests.support.training.tiny_trainer import llama, optimizer_of, trained

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


def options(out: Path, mode: str, algorithm: str = "adamw", **extra: object) -> list[str]:
    settings = {
        "output_dir": out,
        "optim": f"{algorithm}_bf16_kahan",
        "optim_args": f"rounding={mode}" + (",momentum=0.9" if algorithm == "sgd" else ""),
        "max_steps": 9,
        "save_steps": 3,
        "learning_rate": 3e-3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "disable_tqdm": True,
        "use_cpu": True,
        "report_to": "none",
        **extra,
    }
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def summary(output: str) -> str:
    (line,) = re.findall(r"^steps=.*$", output, re.MULTILINE)
    return line


def optimizer_file(checkpoint: Path) -> dict:
    return torch.load(checkpoint / "optimizer.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "algorithm"),
    nightly_except(
        {("stochastic,state_dtype=int8", "adamw")},
        [("kahan", "adamw"), ("split", "adamw"), ("stochastic,state_dtype=int8", "adamw"), ("nearest", "sgd")],
    ),
)
def test_resume_continues_bit_for_bit(tmp_path, monkeypatch, capsys, mode, algorithm):
    def train_here(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["train_tiny.py", *map(str, words)])
        runpy.run_path(str(SCRIPTS / "train_tiny.py"), run_name="__main__")
        return summary(capsys.readouterr().out)

    whole, halves = tmp_path / "whole", tmp_path / "halves"
    expected = train_here(*options(whole, mode, algorithm))
    # The schedule must be that of nine steps, so the first half is a whole run whose later saves are taken away.
    train_here(*options(halves, mode, algorithm))
    for step in (6, 9):
        shutil.rmtree(halves / f"checkpoint-{step}")
    assert train_here(*options(halves, mode, algorithm), "--resume", "True") == expected
    assert "steps=9 dtype=torch.bfloat16" in expected
    assert_equal(optimizer_file(halves / "checkpoint-9"), optimizer_file(whole / "checkpoint-9"))
    assert (halves / "checkpoint-9/model.safetensors").read_bytes() == (
        whole / "checkpoint-9/model.safetensors"
    ).read_bytes()


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
