"""What `hf-lowprec doctor MODEL` computes: the planned run is Trainer's, spacings are the distances of numbers to their
neighbors, the sizes of updates are those of optimizers on noise, and losses and noise are those of rounding itself.
"""

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR
from transformers import Trainer, TrainerCallback

import hf_lowprec
from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES
from hf_lowprec.rounding.nearest import spacings_by_exponent
from hf_lowprec.tools.prediction import (
    PREDICTED_MODES,
    Directions,
    count_spacings,
    magnitudes,
    noise_directions,
    plan_run,
    round_updates,
)
from tests.support.training.tiny_trainer import arguments, counting_data, llama

BETAS = {"adamw": (0.9, 0.999), "adam": (0.8, 0.999), "stableadamw": (0.9, 0.999), "lion": (0.9, 0.99)}
CLASSES = {"adamw": "AdamW", "adam": "Adam", "stableadamw": "StableAdamW", "lion": "Lion", "adafactor": "Adafactor"}


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


@pytest.mark.parametrize(
    ("optim", "betas", "rounding", "weight_decay"),
    [
        ("adamw_torch", (0.9, 0.999), "nearest", 0),  # decays by a multiplication of its own
        ("adamw_torch_fused", (0.9, 0.999), "nearest", 0.1),
        ("adamw_bf16_kahan", (0.9, 0.999), "kahan", 0.1),
        ("lion_bf16_sr", (0.9, 0.99), "stochastic", 0.1),
        ("adam_bf16_kahan", (0.9, 0.999), "kahan", 0),  # an L2 penalty is part of the gradient
    ],
)
def test_betas_rounding_and_weight_decay_come_from_the_optimizer(optim, betas, rounding, weight_decay):
    run = plan(optim, wd=0.1)
    assert (run.betas, run.rounding, run.weight_decay) == (betas, rounding, weight_decay)


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
        ({"scheduler": "warmup_stable_decay"}, "warmup_stable_decay: .*; choose one that needs no arguments"),
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
            with pytest.raises(ValueError, match="cannot be predicted; valid are adamw_torch, adamw_torch_fused, "):
                plan(name)


def neighbor(numbers: torch.Tensor, direction: int) -> torch.Tensor:
    """The next BF16 number of larger (1) or smaller (-1) magnitude, found by counting the bit pattern."""
    pattern = numbers.view(torch.int16).int() & 0x7FFF
    return (pattern + direction).clamp(min=0).to(torch.int16).view(torch.bfloat16).double()


def test_spacings_are_the_distances_to_both_neighbors():
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.abs() < torch.finfo(torch.bfloat16).max]  # its larger neighbor is infinite
    above = neighbor(numbers, 1) - numbers.abs().double()
    below = torch.where(numbers == 0, above, numbers.abs().double() - neighbor(numbers, -1))
    expected = {
        spacing: float((above == spacing).sum() + (below == spacing).sum()) / 2
        for spacing in torch.cat((above, below)).unique().tolist()
    }
    spacings, found = spacings_by_exponent(torch.bfloat16).tolist(), {}
    for spacing, count in zip(spacings, count_spacings(numbers).tolist(), strict=True):  # two share the smallest
        found[spacing] = found.get(spacing, 0) + count
    assert {spacing: count for spacing, count in found.items() if count} == expected


def test_tensors_are_rounded_to_bf16_and_read_in_chunks(monkeypatch):
    weights = torch.randn(50, 21)
    whole = count_spacings(weights)
    assert torch.equal(whole, count_spacings(weights.bfloat16()))
    monkeypatch.setattr("hf_lowprec.tools.prediction.CHUNK", 64)
    assert torch.equal(whole, count_spacings(weights))
    assert whole.sum() == weights.numel()


def test_numbers_that_are_not_finite_are_left_out():
    assert count_spacings(torch.tensor([float("inf"), float("nan"), -float("inf"), 1.5])).sum() == 1
    assert count_spacings(torch.empty(0)).sum() == 0


def test_magnitudes_are_those_of_uniform_numbers():
    numbers = 1 + (torch.arange(10**5, dtype=torch.float64) + 0.5) / 10**5
    torch.testing.assert_close(magnitudes()[127], numbers.square().mean().sqrt())


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
    # That of StableAdamW is divided by the RMS of g²/v, which is 1 only on average.
    torch.testing.assert_close(measured, predicted, rtol=0.04 if algorithm == "stableadamw" else 0.025, atol=0)


@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
def test_persistence_is_the_variance_of_the_displacement(algorithm):
    """Over 600 steps, the first 100 left out. Sums have few correlation times, so an end effect of 100/500 is possible
    for Lion and 10/500 for Adam; 2000 elements determine a variance to √(2/2000) = 3%."""
    directions = updates_of_noise(algorithm, 2000, 600)[100:]
    measured = float(directions.sum(0).square().mean() / directions.square().mean() / len(directions))
    predicted = noise_directions(algorithm, BETAS[algorithm]).persistence
    assert measured == pytest.approx(predicted, rel=0.25 if algorithm == "lion" else 0.12)


@pytest.mark.parametrize("algorithm", CLASSES)
def test_the_momentum_that_feeds_errors_back_is_the_optimizers(algorithm):
    betas = BETAS.get(algorithm, (0.7, 0.0))
    options = {"beta1": betas[0]} if algorithm == "adafactor" else {"betas": betas}
    optimizer = getattr(hf_lowprec, CLASSES[algorithm])([torch.zeros(1, requires_grad=True)], **options)
    assert noise_directions(algorithm, betas).feedback == optimizer.momentum_decay(optimizer.param_groups[0])


@pytest.mark.parametrize("rate", [1e-3, 2e-4, 1e-5])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_nearest_loses_what_torchs_rounding_loses(rate, decay):
    """Weights of all magnitudes; without decay also powers of two, such as norms at 1.0. Decay has one direction, so
    it meets only one of their two spacings, but there are few in a decayed matrix. 3e5 weights determine a share to 1%.
    """
    torch.manual_seed(0)
    others = torch.randn(100_000) if decay else 2.0 ** torch.randint(-9, 1, (100_000,))
    weights = torch.cat((0.03 * torch.randn(200_000), others)).bfloat16()
    update = -rate * (0.23 * torch.randn(len(weights), dtype=torch.float64) + decay * weights.double())
    stored = (weights.double() + update).float().bfloat16().double() - weights.double()
    measured = 1 - float((update * stored).sum() / update.square().sum())
    normal = torch.special.ndtri((torch.arange(4096, dtype=torch.float64) + 0.5) / 4096)
    directions, storage = Directions(0.23 * normal.abs(), 0.0, 1.0), PREDICTED_MODES["nearest"]
    rounded = round_updates(count_spacings(weights)[None], directions, [rate], [100], [decay], *storage)
    assert rounded.lost == pytest.approx(measured, abs=0.02)


def trained_on_noise(
    rounding: str, lr: float, steps: int = 200, end: float = 1.0, error_feedback: bool | None = None
) -> tuple[torch.Tensor, float, float]:
    """A BF16 weight before AdamW steps on noise; the lost updates of the last step; and how far the weight, with its
    remainder, is then from its FP32 twin, relative to how far that has moved. `lr` ends at `end` times its value."""
    torch.manual_seed(0)
    elements = 20_000 if steps <= 1000 else 4000  # which determine a distance to 1%
    start = (0.02 * torch.randn(elements)).bfloat16()
    low, high = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    options = {"state_dtype": torch.float32, "rounding": rounding, "error_feedback": error_feedback}
    optimizer = hf_lowprec.AdamW([low], lr=lr, weight_decay=0.0, **options)
    twin = torch.optim.AdamW([high], lr=lr, weight_decay=0.0)
    schedules = [LinearLR(each, 1.0, end, steps) for each in (optimizer, twin)]
    master = start.double()
    for _ in range(steps):
        high.grad = torch.randn(len(start)).bfloat16().float()
        low.grad = high.grad.bfloat16()
        optimizer.step()
        twin.step()
        for schedule in schedules:
            schedule.step()
        state, before, master = optimizer.state[low], master, low.detach()
        if rounding == "split":
            master = ((master.view(torch.int16).int() << 16) + state["remainder"]).view(torch.float32)
        master = master.double()
    first, second = state["exp_avg"].double() / (1 - 0.9**steps), state["exp_avg_sq"].double() / (1 - 0.999**steps)
    update = -lr * first / (second.sqrt() + 1e-8)
    lost = 1 - float((update * (master - before)).sum() / update.square().sum())
    exact = high.detach().double()
    return start, lost, float((master - exact).norm() / (exact - start.double()).norm())


def predicted(start: torch.Tensor, lr: float, mode: str, steps: int = 200, end: float = 1.0, **changes: float):
    directions, every = noise_directions("adamw", (0.9, 0.999))._replace(**changes), [*range(1, steps + 1)]
    rates = torch.linspace(lr, end * lr, steps).tolist()
    return round_updates(count_spacings(start)[None], directions, rates, every, [0.0], *PREDICTED_MODES[mode])


# Split weights lose what FP32 weights lose: updates below about 1e-9.
@pytest.mark.parametrize(
    ("mode", "lr"), [*(("nearest", lr) for lr in (3e-4, 1e-4, 2e-5)), *(("split", lr) for lr in (1e-6, 3e-9, 1e-9))]
)
def test_lost_updates_in_an_optimizer(mode, lr):
    start, lost, _ = trained_on_noise(mode, lr)
    rounded = predicted(start, lr, mode)
    assert 1 - float((rounded.stored / rounded.square)[-1]) == pytest.approx(lost, abs=0.02)
    assert mode == "nearest" or (lost > 0.1) == (lr < 1e-8)


@pytest.mark.parametrize("lr", [3e-4, 1e-5])
def test_noise_without_error_feedback(lr):
    """The displacement of 200 steps lacks that of the ten that momentum still holds, an effect of up to 5%."""
    start, _, noise = trained_on_noise("stochastic", lr, error_feedback=False)
    rounded = predicted(start, lr, "stochastic", feedback=0.0)
    assert rounded.noise == pytest.approx(noise, rel=0.1)
    assert torch.allclose(rounded.stored, rounded.square)


@pytest.mark.parametrize(
    ("lr", "steps", "end"),
    [
        pytest.param(3e-4, 200, 1.0, id="errors of the updates"),
        pytest.param(3e-6, 1000, 1.0, id="both"),
        pytest.param(1e-7, 1000, 1.0, id="errors of the payments, weights on the grid"),
        pytest.param(2e-5, 5000, 0.0, id="what is never paid back"),
    ],
)
def test_noise_with_error_feedback(lr, steps, end):
    """Alone, each source is exact; together, updates and payments are rounded as one, so the sum is up to 9% too large:
    `√(1/6 + x)` instead of `√x` with `x = 1/6/(1-0.9²)`."""
    start, _, noise = trained_on_noise("stochastic", lr, steps, end)
    assert predicted(start, lr, "stochastic", steps, end).noise == pytest.approx(noise, rel=0.1)


def test_what_is_owed_after_a_few_steps_is_at_most_what_they_have_rounded():
    few, plain = (predicted(torch.full((8,), 0.02), 3e-4, "stochastic", 3, feedback=beta) for beta in (0.9, 0.0))
    assert few.noise == pytest.approx(plain.noise)
