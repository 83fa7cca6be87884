"""A planned run is that which Trainer would start, and the sizes of its updates are those of optimizers on noise."""

import math

import pytest
import torch
from transformers import Trainer, TrainerCallback

import hf_lowprec
from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES
from hf_lowprec.tools.prediction import noise_directions, plan_run
from tests.support.training.tiny_trainer import arguments, counting_data, llama

BETAS = {"adamw": (0.9, 0.999), "adam": (0.8, 0.999), "stableadamw": (0.9, 0.999), "lion": (0.9, 0.99)}
CLASSES = {"adamw": "AdamW", "adam": "Adam", "stableadamw": "StableAdamW", "lion": "Lion"}


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


def updates_of_noise(algorithm: str, elements: int, steps: int) -> torch.Tensor:
    """The directions of all steps, `(steps, elements)`: changes of FP32 weights at a learning rate of 1."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(elements))
    cls = getattr(hf_lowprec, CLASSES[algorithm])
    optimizer = cls([weight], lr=1.0, betas=BETAS[algorithm], weight_decay=0.0)
    directions = []
    for _ in range(steps):
        weight.data.zero_()
        weight.grad = torch.randn(elements)
        optimizer.step()
        directions.append(weight.detach().clone())
    return torch.stack(directions).double()


@pytest.mark.parametrize("algorithm", BETAS)
def test_sizes_in_every_step(algorithm):
    """The mean of 20000 squares of about normal numbers is known to √(2/20000) = 1%, its root to 0.5%; five times."""
    steps = torch.arange(1, 61)
    directions = noise_directions(algorithm, BETAS[algorithm])
    predicted = directions.sample.square().mean().sqrt() * directions.growth(steps.double())
    measured = updates_of_noise(algorithm, 20000, 60).square().mean(1).sqrt()
    if algorithm == "stableadamw":  # divided by the RMS of g²/v, which is 1 only on average
        torch.testing.assert_close(measured, predicted, rtol=0.04, atol=0)
    else:
        torch.testing.assert_close(measured, predicted, rtol=0.025, atol=0)


@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
def test_persistence_is_the_variance_of_the_displacement(algorithm):
    """Over 600 steps, the first 100 left out. Sums have few correlation times, so an end effect of 100/500 is possible
    for Lion and 10/500 for Adam; 2000 elements determine a variance to √(2/2000) = 3%."""
    directions = updates_of_noise(algorithm, 2000, 600)[100:]
    measured = float(directions.sum(0).square().mean() / directions.square().mean() / len(directions))
    predicted = noise_directions(algorithm, BETAS[algorithm]).persistence
    assert measured == pytest.approx(predicted, rel=0.25 if algorithm == "lion" else 0.12)


def test_the_first_step_of_adam_moves_every_weight_by_the_learning_rate():
    directions = noise_directions("adamw", (0.9, 0.999))
    size = directions.sample.square().mean().sqrt() * directions.growth(torch.tensor([1.0, 1e6]).double())
    assert size.tolist() == pytest.approx([1, math.sqrt(0.1 / 1.9)])
