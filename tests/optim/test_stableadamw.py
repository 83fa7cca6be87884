"""StableAdamW against Algorithm 2 of Wortsman et al. (arXiv:2304.13013), written out in FP64."""

import math

import pytest
import torch

from hf_lowprec.optim import StableAdamW

FP32, FP64 = torch.float32, torch.float64
HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SHAPE = (40, 25)


class Paper:
    """Algorithm 2 for one FP64 tensor; `excess` is RMS_t."""

    def __init__(self, weight: torch.Tensor, lr: float, betas: tuple[float, float], eps: float, weight_decay: float):
        self.weight, self.lr, self.betas, self.eps, self.decay = weight.double().clone(), lr, betas, eps, weight_decay
        self.mean, self.square = torch.zeros_like(self.weight), torch.zeros_like(self.weight)
        self.time, self.excess = 0, math.nan

    def step(self, grad: torch.Tensor) -> None:
        grad, self.time = grad.double(), self.time + 1
        hat = [beta * (1 - beta ** (self.time - 1)) / (1 - beta**self.time) for beta in self.betas]
        self.mean = hat[0] * self.mean + (1 - hat[0]) * grad
        self.square = hat[1] * self.square + (1 - hat[1]) * grad.square()
        self.excess = (grad.square() / self.square.clamp(min=self.eps**2)).mean().sqrt().item()
        lr = self.lr / max(1.0, self.excess)
        self.weight = self.weight - lr * self.decay * self.weight - lr * self.mean / (self.square.sqrt() + self.eps)


def gradients(steps: int, shape=SHAPE, dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    """Unit gradients, twentyfold every tenth step: what the update clipping is for."""
    generator = torch.Generator().manual_seed(3)
    scales = [20.0 if step % 10 == 9 else 1.0 for step in range(steps)]
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for scale in scales]


def parameter(dtype: torch.dtype = FP32, shape=SHAPE) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype))


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("shape", [SHAPE, (1,), (3,), ()], ids=str)
def test_fp32_parameters_get_the_papers_formula(backend, maximize, shape):
    """Per step the weight is rounded once, to half an ulp of its size.

    The change, lr · (m/√v + wd·w), is computed by fewer than 30 roundings of factors (moments three each, halved in the
    root; RMS five; products, quotient and sum six) whose errors persist for at most 1/(1-β) = 20 steps: 600 half ulps
    of a change of at most lr · √20 (for |m| <= √v · √(1/(1-β2))). Measured: a fortieth of the bound.
    """
    steps, param = 50, parameter(shape=shape)
    optimizer, paper = StableAdamW([param], backend=backend, maximize=maximize, **HYPER), Paper(param.detach(), **HYPER)
    clipped = 0
    for grad in gradients(steps, shape):
        param.grad = -grad if maximize else grad.clone()
        optimizer.step()
        paper.step(grad)
        clipped += paper.excess > 2
    assert clipped == 5 or shape != SHAPE
    bound = steps * 2**-24 * (paper.weight.abs().max().item() + 600 * HYPER["lr"] * math.sqrt(20))
    assert (param.detach().double() - paper.weight).abs().max().item() <= bound
    assert bound <= HYPER["lr"] / 20  # a twentieth of one step: a wrong term would show


@pytest.mark.parametrize("eps", [1e-24, 1e-6])
def test_rows_without_gradients_do_not_undo_the_clipping(eps):
    """0/0 would, and eps² is below FP32's numbers for the smaller eps."""
    param = torch.nn.Parameter(torch.zeros(64))
    optimizer = StableAdamW([param], lr=1.0, betas=(0.0, 0.99), eps=eps, weight_decay=0.0)
    for size in (*[0.01] * 5, 100.0):
        param.grad = torch.full((64,), size)
        param.grad[32:] = 0
        before = param.detach().clone()
        optimizer.step()
    # √v̂ is about 100·√0.01·√(1/(1-0.99⁶)) = 41: RMS √½ · 2.4 = 1.7 of an unclipped step of 2.4.
    assert (param.detach() - before).abs().max().item() < 2


@pytest.mark.parametrize("options", [{"max_grad_norm": 0.5}, {"max_grad_norm": 0.5, "skip_nonfinite": True}], ids=str)
def test_the_mean_is_of_the_clipped_gradients(options):
    """eps is large enough for the size of gradients to matter, so a mean of the unclipped ones would show."""
    hyper = {**HYPER, "eps": 1e-2}
    param = parameter()
    optimizer, paper = StableAdamW([param], **hyper, **options), Paper(param.detach(), **hyper)
    for grad in gradients(20):
        param.grad = grad.clone()
        optimizer.step()
        paper.step(grad * min(1.0, 0.5 / (grad.double().norm().item() + 1e-6)))
    assert (param.detach().double() - paper.weight).abs().max().item() <= 20 * 2**-24 * (5 + 600 * 1e-2 * math.sqrt(20))
