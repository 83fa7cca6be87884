"""A planned run has the learning rates, the optimizer and the rounding of the run that Trainer would start."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES
from hf_lowprec.tools.doctor.advice import find_problems
from hf_lowprec.tools.doctor.planned_run import STOCK, plan_run
from hf_lowprec.tools.doctor.rounded_updates import COMPENSATION_QUANTA
from tests.support.training.tiny_trainer import arguments, counting_data, llama

SCHEDULERS = {
    "linear": None,
    "cosine": None,
    "constant": None,
    "constant_with_warmup": None,
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
    "inverse_sqrt": None,
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 3},
}


def plan(optim="adamw_torch", optim_args=None, lr=1e-3, scheduler="linear", kwargs=None, warmup=0, steps=10, wd=0.0,
         betas=(None, None)):  # fmt: skip
    return plan_run(optim, optim_args, lr, scheduler, kwargs, warmup, steps, wd, betas)


class LearningRates(TrainerCallback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.rates.append(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_learning_rates_are_those_of_trainer(tmp_path, scheduler):
    kwargs = SCHEDULERS[scheduler]
    recorded = LearningRates()
    args = arguments(
        tmp_path,
        learning_rate=1e-3,
        lr_scheduler_type=scheduler,
        lr_scheduler_kwargs=kwargs,
        warmup_steps=0.3,
        max_steps=10,
    )
    Trainer(llama(), args, train_dataset=counting_data(), callbacks=[recorded]).train()
    run = plan(scheduler=scheduler, kwargs=json.dumps(kwargs) if kwargs else None, warmup=0.3)
    assert run.learning_rates == recorded.rates
    assert run.steps == 10


def test_betas_and_rounding_come_from_the_optimizer():
    assert plan().betas == (0.9, 0.999)
    assert plan(betas=(0.8, None)).betas == (0.8, 0.999)
    assert plan("lion_bf16_sr").betas == (0.9, 0.99)
    assert plan("stableadamw_bf16_sr", "betas=0.9|0.95").betas == (0.9, 0.95)
    assert [phase.mode for phase in plan("adamw_bf16_sr").rounding.phases] == ["stochastic"]
    assert [phase.mode for phase in plan().rounding.phases] == ["nearest"]
    phases = plan("adamw_bf16_sr", "rounding=stochastic:0.8|kahan").rounding
    assert [phases.mode(step, 10) for step in (0, 7, 8)] == ["stochastic", "stochastic", "kahan"]


def test_weight_decay_is_a_step_of_its_own_only_in_torchs_unfused_adamw():
    assert [plan(name, wd=0.1).decay_is_separate for name in (*STOCK, "adamw_bf16_kahan")] == [True, False, False]
    assert plan("adamw_bf16_kahan", wd=0.1).weight_decay == 0.1
    assert plan("adam_bf16_kahan", wd=0.1).weight_decay == 0  # an L2 penalty is part of the gradient
    assert plan("adam_bf16_kahan", "decoupled_weight_decay=True", wd=0.1).weight_decay == 0.1


def test_torchs_unfused_adamw_decays_separately_and_the_fused_one_does_not():
    """The difference that `decay_is_separate` makes: decay and update are each too small for 1.25, together they are
    not."""
    results = {}
    for fused in (False, True):
        weight = torch.nn.Parameter(torch.full((64,), 1.25, dtype=torch.bfloat16))
        optimizer = torch.optim.AdamW([weight], lr=0.9 * 2.0**-8, weight_decay=0.5, fused=fused, foreach=not fused)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        results[fused] = weight[0].item()
    assert results == {False: 1.25, True: 1.25 - 2.0**-7}


def test_the_second_moment_of_stock_bf16_is_rounded_to_nearest():
    def rounds(*args):
        return plan(*args).rounds_second_moment_to_nearest

    assert rounds("adamw_torch") and rounds("adamw_torch_fused")
    assert rounds("adamw_bf16_kahan", "state_rounding=nearest")
    assert not rounds("adamw_bf16_kahan")
    assert not rounds("adamw_bf16_kahan", "state_rounding=nearest,state_dtype=exp_avg_sq:float32")
    assert not rounds("lion_bf16_sr", "state_rounding=nearest")


def test_where_updates_are_stored():
    assert plan().storage("nearest") == (((1.0, 1.0),), False)
    assert plan().storage("stochastic") == (((1.0, 1.0),), True)
    assert plan().storage("split") == (((2.0**-16, 1.0),), False)
    assert plan().storage("kahan") == (COMPENSATION_QUANTA, True)
    assert plan("adamw_bf16_kahan", "state_rounding=nearest").storage("kahan") == (COMPENSATION_QUANTA, False)
    assert plan("adamw_bf16_sr", "state_rounding=nearest").storage("kahan") == (COMPENSATION_QUANTA, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": "sgd_bf16_kahan"}, "--optim sgd_bf16_kahan: the sizes of its updates are not predicted; valid are "),
        ({"optim": "adafactor"}, "not known to be those of Adam or Lion; valid are adamw_torch, adamw_torch_fused"),
        ({"optim": "adafactor_bf16_sr", "optim_args": "scale_parameter=True"}, "leave out relative_step and scale_par"),
        ({"lr": 0.0}, "--lr 0 is not positive"),
        ({"lr": float("nan")}, "--lr nan is not positive"),
        ({"scheduler": "slow"}, "--scheduler slow is unknown; valid are linear, cosine"),
        ({"scheduler": "reduce_lr_on_plateau"}, "sets learning rates by losses, which are not known before training"),
        ({"scheduler": "warmup_stable_decay"}, "set its arguments with --scheduler-kwargs"),
        ({"kwargs": '{"bend": 2}'}, "set its arguments with --scheduler-kwargs"),
        ({"optim": "adamw_bf16_sr", "optim_args": "roundin=kahan"}, "did you mean 'rounding'"),
    ],
)
def test_what_cannot_be_planned(changes, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        plan(**changes)


def test_every_name_is_planned_or_says_why():
    for name in OPTIMIZER_NAMES:
        if name.split("_bf16_")[0] in ("adafactor", "adam", "adamw", "stableadamw", "lion"):
            assert plan(name).is_ours
        else:
            with pytest.raises(ValueError, match="are not predicted"):
                plan(name)


@pytest.mark.parametrize(("share", "is_problem"), [(0.05, False), (0.2, True)])
def test_a_weight_decay_that_does_not_arrive_in_a_tenth_of_the_steps_is_a_problem(share, is_problem):
    """`1 - lr·wd` rounds to 1 below 2^-9. The learning rate falls linearly to zero."""
    run = plan(lr=0.1, wd=2.0**-9 / 0.1 / share, steps=100)
    codes = [finding.code for finding in find_problems(SimpleNamespace(run=run, requested={}))]
    assert ("weight_decay_lost" in codes) == is_problem
