"""A real Trainer resumes checkpoints of torch's optimizers and of other rounding modes."""

import copy
import logging
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_lowprec import AdamW, fp32_state_dict
from tests.support.optim.optimizer_contents import assert_equal
from tests.support.training.tiny_trainer import llama, losses, optimizer_of, trained

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
    return trained(tmp_path, model=model, optim=optim, resume=str(checkpoint), **SAVING, **settings)


def displacement(trainer) -> dict[str, torch.Tensor]:
    """How far each weight is from its initial value, FP64, by the FP32 estimates of our optimizers."""
    optimizer = optimizer_of(trainer)
    ours = "rounding" in optimizer.param_groups[0]
    weights = fp32_state_dict(trainer.model, optimizer) if ours else trainer.model.state_dict()
    return {name: weights[name].double() - value.double() for name, value in llama().state_dict().items()}


def distance(trainer, reference) -> float:
    """Root mean square distance of the weights, in units of the reference's displacement."""
    ours, theirs = (torch.cat([d.flatten() for d in displacement(one).values()]) for one in (trainer, reference))
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("optim", ["adamw_torch", pytest.param("adamw_torch_fused", marks=pytest.mark.every_case)])
def test_a_checkpoint_of_torch_in_fp32_continues(runs, tmp_path, optim):
    """As close to FP32 as a run of ours is from the beginning, since BF16 activations make most of the difference."""
    source = runs(optim)
    with pytest.warns(RuntimeWarning, match="the state of torch.optim.Adam or torch.optim.AdamW was converted"):
        resumed = resume(source, tmp_path, "adamw_bf16_kahan")
    whole = distance(runs("adamw_bf16_kahan"), source)
    assert distance(resumed, source) < whole < 0.2
    assert abs(losses(resumed)[-1] - losses(source)[-1]) < 0.005 * losses(source)[0]


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


@pytest.mark.parametrize("mode", ["adamw_bf16_kahan", pytest.param("adamw_bf16_sr", marks=pytest.mark.every_case)])
def test_a_bf16_checkpoint_of_torch_continues(runs, tmp_path, mode):
    """The weights are BF16 there, so nothing is below them; training goes on, and resumes bit for bit."""
    source = trained(tmp_path / "source", model=llama().bfloat16(), optim="adamw_torch", **SAVING)
    resumed = resume(source, tmp_path, mode)
    assert losses(resumed)[-1] < losses(source)[0]
    again = trained(tmp_path, optim=mode, resume=str(tmp_path / "checkpoint-12"), max_steps=15, **SAVING)
    whole = resume(source, tmp_path / "whole", mode, max_steps=15)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


@pytest.mark.parametrize("optim", ["adafactor", "sgd"])
def test_a_checkpoint_of_another_algorithm_is_refused(runs, tmp_path, optim):
    with pytest.raises(ValueError, match="without resume_from_checkpoint"):
        resume(runs(optim), tmp_path, "adamw_bf16_kahan")


def test_sgd_continues_in_sgd(runs, tmp_path):
    source = runs("sgd")
    assert distance(resume(source, tmp_path, "sgd_bf16_kahan"), source) < 0.2


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
    for name, value in within.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


@pytest.mark.parametrize(
    "after", [torch.int8, pytest.param(torch.float32, marks=pytest.mark.every_case), {"exp_avg": torch.int8}]
)
def test_the_dtype_of_states_changes_by_the_option_alone(runs, tmp_path, after):
    """Before the first step, states are what an optimizer of its own makes of the checkpoint's file."""
    source = runs("adamw_bf16_kahan", optim_args="state_dtype=bf16")
    text = "exp_avg:int8" if isinstance(after, dict) else str(after).removeprefix("torch.")
    settings = {"optim_args": f"state_dtype={text}", "callbacks": [(start := AtTheFirstStep())]}
    with pytest.warns(RuntimeWarning, match="saved states were converted to the state_dtype that this AdamW was given"):
        resumed = resume(source, tmp_path, "adamw_bf16_kahan", **settings)
    groups = optimizer_of(resumed).param_groups
    assert [group["state_dtype"] for group in groups] == [after, after]
    reference = AdamW([{"params": group["params"]} for group in groups], lr=1e-3, state_dtype=after)
    with pytest.warns(RuntimeWarning, match="saved states were converted"):
        reference.load_state_dict(torch.load(tmp_path / "checkpoint-6" / "optimizer.pt", weights_only=True))
    assert_equal(start.states, list(reference.state.values()))
    assert any("exp_avg_code" in state for state in start.states) or after == torch.float32
    dtypes = [{name: value.dtype for name, value in state.items()} for state in start.states]
    after_training = optimizer_of(resumed).state.values()
    assert dtypes == [{name: value.dtype for name, value in state.items()} for state in after_training]


class AtTheFirstStep(TrainerCallback):
    """Copies the optimizer's states before the first step."""

    def __init__(self) -> None:
        self.states: list[dict] = []

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        self.states = copy.deepcopy([*optimizer.state.values()])


def test_a_schedule_survives_resuming_on_either_side(tmp_path):
    settings = {"optim": "adamw_bf16_sr", "optim_args": "rounding=stochastic:0.5|kahan", "learning_rate": 1e-3}
    settings |= {"save_strategy": "steps", "save_steps": 3}
    whole = trained(tmp_path, **settings)
    for step in (3, 6):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "the rounding mode changes")  # the schedule's own changes are no news
            resumed = trained(tmp_path / str(step), resume=str(tmp_path / f"checkpoint-{step}"), **settings)
        for name, value in whole.model.state_dict().items():
            assert torch.equal(resumed.model.state_dict()[name], value), (step, name)


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
