"""A planned run has the learning rates, the optimizer and the rounding of the run that Trainer would start."""

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES
from hf_lowprec.tools.doctor.planned_run import plan_run
from tests.support.training.tiny_trainer import arguments, counting_data, llama


def plan(optim="adamw_torch", lr=1e-3, scheduler="linear", warmup=0, wd=0.0):
    return plan_run(optim, lr, 10, scheduler, warmup, wd)


class LearningRates(TrainerCallback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.rates.append(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("scheduler", ["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"])
def test_learning_rates_are_those_of_trainer(tmp_path, scheduler):
    recorded = LearningRates()
    args = arguments(tmp_path, learning_rate=1e-3, lr_scheduler_type=scheduler, warmup_steps=0.3, max_steps=10)
    Trainer(llama(), args, train_dataset=counting_data(), callbacks=[recorded]).train()
    assert plan(scheduler=scheduler, warmup=0.3).learning_rates == recorded.rates


def test_betas_and_rounding_come_from_the_optimizer():
    assert (plan().betas, plan().rounding) == ((0.9, 0.999), "nearest")
    lion = plan("lion_bf16_sr")
    assert (lion.betas, lion.rounding) == ((0.9, 0.99), "stochastic")


def test_weight_decay_is_no_part_of_the_update_in_torchs_unfused_adamw():
    decays = [plan(name, wd=0.1).weight_decay for name in ("adamw_torch", "adamw_torch_fused", "adamw_bf16_kahan")]
    assert decays == [0, 0.1, 0.1]
    assert plan("adam_bf16_kahan", wd=0.1).weight_decay == 0  # an L2 penalty is part of the gradient


def test_torchs_unfused_adamw_decays_separately_and_the_fused_one_does_not():
    """Decay and update are each too small for 1.25, together they are not."""
    results = {}
    for fused in (False, True):
        weight = torch.nn.Parameter(torch.full((64,), 1.25, dtype=torch.bfloat16))
        optimizer = torch.optim.AdamW([weight], lr=0.9 * 2.0**-8, weight_decay=0.5, fused=fused, foreach=not fused)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        results[fused] = weight[0].item()
    assert results == {False: 1.25, True: 1.25 - 2.0**-7}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, "--lr 0 is not positive"),
        ({"lr": float("nan")}, "--lr nan is not positive"),
        ({"scheduler": "slow"}, "slow is not a valid SchedulerType"),
        ({"scheduler": "reduce_lr_on_plateau"}, "requires an eval strategy"),
        ({"scheduler": "warmup_stable_decay"}, "--scheduler warmup_stable_decay: .*; name one that needs no arguments"),
    ],
)
def test_what_cannot_be_planned(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_every_name_is_planned_or_says_why():
    for name in (*OPTIMIZER_NAMES, "adafactor"):
        if "_bf16_" in name and name.split("_bf16_")[0] in ("adafactor", "adam", "adamw", "stableadamw", "lion"):
            assert len(plan(name).learning_rates) == 10
        else:
            with pytest.raises(ValueError, match="are not predicted; valid are adamw_torch, adamw_torch_fused, "):
                plan(name)
