"""The predicted sizes and persistence of updates, against optimizers that step on noise."""

import math

import pytest
import torch

import hf_lowprec
from hf_lowprec.tools.doctor.update_sizes import noise_directions

BETAS = {"adamw": (0.9, 0.999), "adam": (0.8, 0.999), "stableadamw": (0.9, 0.999), "lion": (0.9, 0.99)}
CLASSES = {"adamw": "AdamW", "adam": "Adam", "stableadamw": "StableAdamW", "lion": "Lion"}


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
