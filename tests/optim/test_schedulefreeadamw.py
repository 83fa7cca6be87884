"""Schedule-Free AdamW against Algorithm 1 of Defazio et al. (arXiv:2405.15682), written out in FP64."""

import copy
import math

import pytest
import torch

from hf_lowprec.optim import ScheduleFreeAdamW
from tests.support.optim.against_formula import BF16, FP16, FP32, gradients, parameter

HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
MODES = [(FP32, "split"), (BF16, "split"), (BF16, "kahan"), (FP16, "kahan")]


class Paper:
    """Algorithm 1 for one FP64 tensor, with x, y and z."""

    def __init__(self, weight, lr, betas, eps, weight_decay, warmup_steps=0):
        self.x = self.y = self.z = weight.detach().double().clone()
        self.square, self.time, self.total = torch.zeros_like(self.x), 0, 0.0
        self.lr, self.betas, self.eps, self.decay, self.warmup = lr, betas, eps, weight_decay, warmup_steps

    def step(self, grad):
        beta1, beta2 = self.betas
        self.time += 1
        lr = self.lr * math.sqrt(1 - beta2**self.time) * min(1.0, self.time / max(self.warmup, 1))
        self.total += lr**2
        share = lr**2 / self.total
        self.square = beta2 * self.square + (1 - beta2) * grad.double().square()
        self.z = self.z - lr * grad.double() / (self.square.sqrt() + self.eps) - lr * self.decay * self.y
        self.x = (1 - share) * self.x + share * self.z
        self.y = (1 - beta1) * self.z + beta1 * self.x


def train(optimizer, paper, grads):
    (param,) = optimizer.param_groups[0]["params"]
    for grad in grads:
        param.grad = grad.to(param.dtype, copy=True)
        optimizer.step()
        if paper is not None:
            paper.step(grad)


def distance(param, expected):
    return (param.detach().double() - expected).abs().max().item()


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("warmup", [0, 1, 7, 100])
@pytest.mark.parametrize("maximize", [False, True])
def test_fp32_parameters_get_the_papers_formula(backend, warmup, maximize):
    """A step rounds y to half an ulp of its size, and z - y in fewer than 20 operations, each to half an ulp.

    |z - y| is at most the way of z, 50 steps of at most 10 lr (|g| <= √v · √(1/(1-β2))) and their weight decay.
    """
    steps, param = 50, parameter()
    optimizer = ScheduleFreeAdamW([param], warmup_steps=warmup, maximize=maximize, backend=backend, **HYPER)
    paper = Paper(param, warmup_steps=warmup, **HYPER)
    for grad in gradients(steps):
        param.grad = -grad if maximize else grad.clone()
        optimizer.step()
        paper.step(grad)
    bound = steps * 2**-24 * (paper.y.abs().max().item() + 20 * HYPER["lr"] * 10)
    assert bound <= HYPER["lr"] / 20  # a twentieth of one step: a wrong term would show
    assert distance(param, paper.y) <= bound
    optimizer.eval()
    assert distance(param, paper.x) <= 2 * bound
    assert (paper.x - paper.y).abs().max() > 20 * bound


@pytest.mark.parametrize(("dtype", "rounding"), MODES)
def test_the_average_follows_the_paper(dtype, rounding):
    """With FP32 states, y is exact to the bits that weight and low bits hold: 16 at least, rounded once a step.

    The stored average is rounded to nearest.
    """
    steps, param = 30, parameter(dtype)
    optimizer = ScheduleFreeAdamW([param], rounding=rounding, state_dtype=FP32, warmup_steps=5, **HYPER)
    paper = Paper(param, warmup_steps=5, **HYPER)
    train(optimizer, paper, gradients(steps, dtype))
    optimizer.eval()
    largest = paper.x.abs().max().item()
    half_ulp = {FP32: 2**-24, BF16: 2**-8, FP16: 2**-11}[dtype]
    assert distance(param, paper.x) <= largest * (half_ulp + steps * 2**-15)


@pytest.mark.parametrize(("dtype", "rounding"), [*MODES, (BF16, "stochastic"), (BF16, "nearest")])
@pytest.mark.parametrize("state_dtype", [None, torch.int8])
def test_evaluation_hardly_changes_training(dtype, rounding, state_dtype):
    """From y to x and back: rounded twice, to what weight and low bits hold. Most elements come back exactly."""
    if dtype == FP16 and state_dtype == torch.int8:
        pytest.skip("one dtype is enough")
    param = parameter(dtype, shape=(40, 32))
    optimizer = ScheduleFreeAdamW([param], rounding=rounding, state_dtype=state_dtype, **HYPER)
    train(optimizer, None, gradients(20, dtype, (40, 32)))
    before = param.detach().clone()
    optimizer.eval()
    optimizer.eval()  # nothing happens
    assert not torch.equal(param, before)
    optimizer.train()
    optimizer.train()
    changed = param.detach() != before
    assert changed.double().mean() < (0.5 if dtype == FP32 else 0.1)
    ulp = {FP32: 2**-23, BF16: 2**-7, FP16: 2**-10}[dtype]
    assert (param.detach() - before).abs().max() <= 2 * ulp * before.abs().max()


def test_no_step_is_taken_from_averages():
    param = parameter(BF16)
    optimizer = ScheduleFreeAdamW([param], **HYPER)
    optimizer.eval()
    param.grad = torch.ones_like(param)
    before = param.detach().clone()
    with pytest.raises(RuntimeError, match=r"call optimizer\.train\(\) before the forward pass"):
        optimizer.step()
    assert torch.equal(param, before)
    optimizer.train()
    optimizer.step()
    assert not torch.equal(param, before)


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_state_dict_says_whether_weights_are_averages(evaluated):
    param = parameter(BF16)
    optimizer = ScheduleFreeAdamW([param], rounding="split", **HYPER)
    train(optimizer, None, gradients(10, BF16))
    if evaluated:
        optimizer.eval()
    other = torch.nn.Parameter(param.detach().clone())
    resumed = ScheduleFreeAdamW([other], rounding="split", **HYPER)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, resumed):
        each.train()
        train(each, None, gradients(5, BF16))
    assert torch.equal(param, other)
    for each in (optimizer, resumed):
        each.eval()
    assert torch.equal(param, other)


@pytest.mark.parametrize("on_device", [False, True])
def test_shares_of_the_average_from_counts_on_the_device_are_the_same(on_device):
    """The average of 300 steps with the paper's weights, also after a warm-up of 100 steps."""
    for warmup in (0, 100):
        param = torch.nn.Parameter(torch.zeros(4))
        optimizer = ScheduleFreeAdamW([param], lr=1.0, eps=0.0, warmup_steps=warmup, skip_nonfinite=on_device)
        paper = Paper(param, 1.0, (0.9, 0.999), 0.0, 0.0, warmup)
        train(optimizer, paper, [torch.ones(4)] * 300)
        optimizer.eval()
        assert distance(param, paper.x) <= 300 * 2**-23 * paper.z.abs().max().item()  # two roundings of each sum
