"""What is loaded from checkpoints: weights into the parameters that are there, states of other optimizers and modes."""

import logging
import operator
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_lowprec import fp32_state_dict
from hf_lowprec.integrations.transformers.checkpoints.load import keep_low_bits_of_checkpoint, load_in_place
from hf_lowprec.rounding import fp32_value
from hf_lowprec.rounding.attached_low_bits import attached_low_bits
from tests.support.chosen_cases import nightly_except
from tests.support.training.tiny_trainer import (
    assert_same_weights,
    llama,
    optimizer_of,
    trained,
)

SAVING = {"save_strategy": "steps", "save_steps": 6, "lr_scheduler_type": "constant", "learning_rate": 1e-3}
"""Twelve steps in all, with a checkpoint in the middle."""
pytestmark = pytest.mark.filterwarnings(
    "ignore:the state of .* was converted:RuntimeWarning",
    "ignore:the state dict that was loaded replaces:RuntimeWarning",
    "ignore:the rounding mode changes:RuntimeWarning",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Trainers of complete runs by `optim`, in folders with a checkpoint of step 6. Do not train them further."""
    made = {}

    def run(optim: str, **settings):
        key = (optim, *settings.items())
        if key not in made:
            made[key] = trained(tmp_path_factory.mktemp(optim), optim=optim, **SAVING, **settings)
        return made[key]

    return run


def resume(source, tmp_path, optim: str, model=None, **settings):
    """A run of `optim` that resumes from a copy of `source`'s checkpoint of step 6."""
    checkpoint = tmp_path / "checkpoint-6"
    shutil.copytree(Path(source.args.output_dir) / checkpoint.name, checkpoint)
    return trained(tmp_path, model=model, optim=optim, resume=str(checkpoint), **{**SAVING, **settings})


def test_the_low_digits_of_an_fp32_checkpoint_arrive(runs, tmp_path):
    """A run of no further steps returns the FP32 weights, to 2^-16 of each: half a spacing, rounded to BF16.

    Its only step has a learning rate of zero.
    """
    source = runs("adamw_torch")
    saved = load_file(Path(source.args.output_dir) / "checkpoint-6" / "model.safetensors")
    settings = {**SAVING, "learning_rate": 0.0}
    checkpoint = tmp_path / "checkpoint-6"
    shutil.copytree(Path(source.args.output_dir) / checkpoint.name, checkpoint)
    for path in (checkpoint / "optimizer.pt", checkpoint / "scheduler.pt"):
        content = torch.load(path, weights_only=True)
        for group in content.get("param_groups", []):
            group["lr"] = group["initial_lr"] = 0.0
        for key in ("base_lrs", "_last_lr"):
            if key in content:
                content[key] = [0.0 for _ in content[key]]
        torch.save(content, path)
    resumed = trained(tmp_path, optim="adamw_bf16_kahan", resume=str(checkpoint), max_steps=7, **settings)
    found = fp32_state_dict(resumed.model, optimizer_of(resumed))
    assert found.keys() >= saved.keys()
    for name, exact in saved.items():
        assert ((found[name] - exact).abs() <= exact.abs() * 2**-16).all(), name
        if "norm" not in name:
            assert not torch.equal(exact.bfloat16().float(), exact)  # there are digits to lose


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor"])
def test_other_optimizers_refuse_our_state(runs, tmp_path, optim):
    """They would ignore the compensation."""
    with pytest.raises(ValueError, match=r"is not converted for Ada.*hf-lowprec export"):
        resume(runs("adamw_bf16_kahan"), tmp_path, optim)


@pytest.mark.parametrize(
    ("first", "then"), [("sr", "kahan"), pytest.param("kahan", "sr", marks=pytest.mark.every_case), ("kahan", "split")]
)
def test_the_mode_changes_by_the_option_alone(runs, tmp_path, first, then):
    """Bit for bit what changing the group's mode within the run gives."""
    source = runs(f"adamw_bf16_{first}")
    with pytest.warns(RuntimeWarning, match="the rounding mode changes from"):
        resumed = resume(source, tmp_path, f"adamw_bf16_{then}")
    modes = {"sr": "stochastic", "kahan": "kahan", "split": "split"}
    schedule = f"rounding={modes[first]}:0.5|{modes[then]}"
    within = runs(f"adamw_bf16_{first}", optim_args=schedule)
    assert {group["rounding"] for group in optimizer_of(resumed).param_groups} == {modes[then]}
    assert_same_weights(resumed, within)


def test_the_dtype_of_states_changes_by_the_option_alone(runs, tmp_path):
    """`tests/distributed/test_mode_change.py` compares the bits."""
    with pytest.warns(RuntimeWarning, match="saved states were converted to the settings of this AdamW"):
        resumed = resume(runs("adamw_bf16_kahan"), tmp_path, "adamw_bf16_kahan", optim_args="state_dtype=int8")
    assert {group["state_dtype"] for group in optimizer_of(resumed).param_groups} == {torch.int8}


def test_a_schedule_survives_resuming_on_either_side(tmp_path):
    settings = {"optim": "adamw_bf16_sr", "optim_args": "rounding=stochastic:0.5|kahan", "learning_rate": 1e-3}
    settings |= {"save_strategy": "steps", "save_steps": 3}
    whole = trained(tmp_path, **settings)
    for step in (3, 6):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "the rounding mode changes")  # the schedule's own changes are no news
            resumed = trained(tmp_path / str(step), resume=str(tmp_path / f"checkpoint-{step}"), **settings)
        assert_same_weights(resumed, whole)


def test_a_schedule_follows_another_number_of_steps(tmp_path, caplog):
    """Resumed with twice the steps, a run that was already in its second phase goes back to the first."""
    settings = {"optim": "adamw_bf16_sr", "optim_args": "rounding=stochastic:0.5|kahan", "learning_rate": 1e-3}
    settings |= {"save_strategy": "steps", "save_steps": 3, "max_steps": 9}
    trained(tmp_path, **settings)
    with caplog.at_level(logging.INFO, logger="hf_lowprec"):
        longer = {**settings, "max_steps": 24}
        resumed = trained(tmp_path / "longer", resume=str(tmp_path / "checkpoint-6"), **longer)
    said = [line for line in caplog.text.splitlines() if "rounding=" in line]
    assert ["'stochastic' from step 7" in said[0], "'kahan' from step 13" in said[1]] == [True, True]
    assert {group["rounding"] for group in optimizer_of(resumed).param_groups} == {"kahan"}


SCHEDULES = ("linear", "cosine_with_restarts", "reduce_lr_on_plateau")


@pytest.mark.parametrize("schedule", nightly_except(SCHEDULES[1:], SCHEDULES))
def test_nothing_is_said_of_what_schedules_change(tmp_path, schedule):
    extra = {"eval_strategy": "steps", "eval_steps": 3} if schedule == "reduce_lr_on_plateau" else {}
    settings = {**SAVING, **extra, "optim": "adamw_bf16_kahan", "lr_scheduler_type": schedule}
    settings |= {"max_steps": 6, "save_steps": 3, "warmup_steps": 2}
    trained(tmp_path, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        trained(tmp_path, model=llama(), resume=str(tmp_path / "checkpoint-3"), **settings)


@pytest.mark.parametrize(
    ("file", "how"), [("pytorch_model_fsdp.bin", "FSDP with FULL_STATE_DICT"), ("global_step3", "DeepSpeed")]
)
def test_a_checkpoint_of_another_engine_is_refused(runs, tmp_path, file, how):
    saved = Path(runs("adamw_bf16_kahan").args.output_dir) / "checkpoint-6"
    shutil.copytree(saved, tmp_path / "saved", ignore=shutil.ignore_patterns("hf_lowprec_manifest.json"))
    (tmp_path / "saved" / file).write_bytes((saved / "scheduler.pt").read_bytes())
    with pytest.raises(ValueError, match=rf"saved under {how}, but .*hf-lowprec export"):
        trained(tmp_path, optim="adamw_bf16_kahan", resume=str(tmp_path / "saved"), **SAVING)


# Weights.


@pytest.mark.parametrize("keeping", [False, True])
def test_low_bits_are_kept_if_asked_for_and_if_there_are_any(keeping):
    dtypes = [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]
    model = nn.ParameterList(torch.zeros(3, dtype=before) for before, _ in dtypes)
    old, exact = list(model), 1 + 2**-12
    with load_in_place(model, keeping_low_bits=keeping):
        for k, (_, after) in enumerate(dtypes):
            model[k] = nn.Parameter(torch.full((3,), exact, dtype=after))
    assert all(map(operator.is_, model, old))
    assert [attached_low_bits(param) is not None for param in model] == [keeping, False, False]
    if keeping:
        assert torch.equal(fp32_value(model[0].detach(), attached_low_bits(model[0])), torch.full((3,), exact))


def test_weights_that_are_not_those_of_the_file_have_none(tmp_path):
    model, exact = nn.ParameterDict({"loaded": torch.ones(3), "changed": torch.zeros(3)}).bfloat16(), 1 + 2**-12
    save_file({name: torch.full((3,), exact) for name in model}, tmp_path / "model.safetensors")
    assert keep_low_bits_of_checkpoint(model, tmp_path) == 1
    loaded = model["loaded"]
    assert torch.equal(fp32_value(loaded.detach(), attached_low_bits(loaded)), torch.full((3,), exact))
    assert attached_low_bits(model["changed"]) is None
