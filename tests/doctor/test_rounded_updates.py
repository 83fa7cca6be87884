"""Predicted losses and noise, against a closed form, torch's own rounding and optimizers that step on noise."""

import math

import pytest
import torch

import hf_lowprec
from hf_lowprec.tools.prediction import PREDICTED_MODES, Directions, count_spacings, noise_directions, round_updates

SPACING = 2.0**-13
"""Of weights from 2^-6 to 2^-5."""


def lost_of_gaussian(sigma: float, spacing: float) -> float:
    """The closed form of the module's docstring."""
    ratio = spacing / sigma
    terms = (math.exp(-(((j + 0.5) * ratio) ** 2) / 2) for j in range(1000))
    return 1 - ratio * math.sqrt(2 / math.pi) * sum(terms)


def normal_directions(size: float = 1.0, count: int = 4096) -> Directions:
    quantiles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return Directions(size * math.sqrt(2) * torch.erfinv(quantiles), 0.0, 1.0)


@pytest.mark.parametrize("sigma_in_spacings", [0.15, 0.26, 0.5, 1, 3, 40])
def test_nearest_loses_what_the_closed_form_says(sigma_in_spacings):
    """To what one element of 4096 contributes that is just above or below half a spacing, `½ / sigma_in_spacings²`."""
    sigma = sigma_in_spacings * SPACING
    counts = count_spacings(torch.full((1,), 1.5 * 2**-6))
    rounded = round_updates(counts, normal_directions(), [sigma], [100], 0.0, *PREDICTED_MODES["nearest"])
    assert rounded.lost == pytest.approx(lost_of_gaussian(sigma, SPACING), abs=0.5 / sigma_in_spacings**2 / 4096 + 1e-4)


def test_half_is_lost_where_the_docstring_says():
    assert lost_of_gaussian(SPACING / 3.8, SPACING) == pytest.approx(0.5, abs=0.01)


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
    rounded = round_updates(
        count_spacings(weights), normal_directions(0.23), [rate], [100], decay, *PREDICTED_MODES["nearest"]
    )
    assert rounded.lost == pytest.approx(measured, abs=0.02)


class TrainedOnNoise:
    """A BF16 weight and its FP32 twin, after AdamW steps on the same noise.

    Attributes:
        start: the weights before.
        error: the stored weights, with the remainder, minus the twin's.
        displacement: how far the twin has moved.
        lost: the lost updates of the last step.
    """

    def __init__(self, rounding: str, lr: float, steps: int = 200) -> None:
        torch.manual_seed(0)
        self.start = (0.02 * torch.randn(20_000)).bfloat16()
        low, high = torch.nn.Parameter(self.start.clone()), torch.nn.Parameter(self.start.float())
        options = {"weight_decay": 0.0, "state_dtype": torch.float32, "rounding": rounding}
        optimizer, twin = hf_lowprec.AdamW([low], lr=lr, **options), torch.optim.AdamW([high], lr=lr, weight_decay=0.0)
        errors: list[torch.Tensor] = []
        stored: list[torch.Tensor] = []
        for _ in range(steps):
            high.grad = torch.randn(len(self.start)).bfloat16().float()
            low.grad = high.grad.bfloat16()
            optimizer.step()
            twin.step()
            state = optimizer.state[low]
            master = low.detach()
            if rounding == "split":
                master = ((master.view(torch.int16).int() << 16) + state["remainder"]).view(torch.float32)
            stored.append(master.double())
            errors.append(stored[-1] - high.detach().double())
        self.error = errors[-1]
        self.displacement = high.detach().double() - self.start.double()
        first, second = state["exp_avg"].double() / (1 - 0.9**steps), state["exp_avg_sq"].double() / (1 - 0.999**steps)
        update = -lr * first / (second.sqrt() + 1e-8)
        self.lost = 1 - float((update * (stored[-1] - stored[-2])).sum() / update.square().sum())


def predicted(start: torch.Tensor, lr: float, mode: str, steps: int = 200):
    directions = noise_directions("adamw", (0.9, 0.999))
    return round_updates(
        count_spacings(start), directions, [lr] * steps, [*range(1, steps + 1)], 0.0, *PREDICTED_MODES[mode]
    )


@pytest.mark.parametrize("lr", [3e-4, 1e-4, 2e-5])
def test_nearest_in_an_optimizer(lr):
    trained = TrainedOnNoise("nearest", lr)
    rounded = predicted(trained.start, lr, "nearest")
    assert 1 - float((rounded.stored / rounded.square)[-1]) == pytest.approx(trained.lost, abs=0.02)


@pytest.mark.parametrize("lr", [1e-6, 3e-9, 1e-9])
def test_split_weights_in_an_optimizer(lr):
    """They lose what FP32 weights lose: updates below about 1e-9."""
    trained = TrainedOnNoise("split", lr)
    rounded = predicted(trained.start, lr, "split")
    assert 1 - float((rounded.stored / rounded.square)[-1]) == pytest.approx(trained.lost, abs=0.02)
    assert (trained.lost > 0.1) == (lr < 1e-8)


@pytest.mark.parametrize("lr", [3e-4, 1e-5])
def test_noise_in_an_optimizer(lr):
    """The distance from the FP32 twin, relative to the twin's displacement.

    The displacement of 200 steps lacks that of the ten that momentum still holds, an effect of up to 5% on its root.
    """
    trained = TrainedOnNoise("stochastic", lr)
    measured = float((trained.error.square().mean() / trained.displacement.square().mean()).sqrt())
    rounded = predicted(trained.start, lr, "stochastic")
    assert rounded.noise == pytest.approx(measured, rel=0.1)
    assert torch.allclose(rounded.stored, rounded.square)
