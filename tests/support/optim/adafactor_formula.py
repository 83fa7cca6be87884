"""Adafactor of Shazeer and Stern (arXiv:1804.04235) in FP64, with the largest error of the same steps in FP32."""

import inspect

import torch
from torch import Tensor, nn

from hf_lowprec.optim import Adafactor

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = [
    (),
    (1,),
    (7,),
    (6, 5),
    (1, 5),
    (6, 1),
    (1, 1),
    (2, 3, 4),
    (2, 1, 3, 2),
    (2, 1, 3, 2, 3),
    (0,),
    (0, 4),
    (3, 0),
]
STEPS = 25
TRAINER = {"eps": (0.0, 1e-3), "square_eps": 1e-30, "relative_step": False, "scale_parameter": False}
"""What Trainer's `optim="adafactor"` passes."""


class Paper:
    """Algorithms 4 to 6 for one tensor in FP64; `weight` is the result.

    `bound` is the largest error of the same steps in FP32. A step rounds the decayed weight and its sum with the
    update. Roundings of an update, in half ulps: in step t, a mean of positive squares has three of its terms and three
    of each earlier step; the estimate has those of both means and of the mean of one of them, 3·(3t + 3), halved by the
    root; RMS(n) as many again; β₂ one a step; RMS(w), quotients, products and step size 10, a clip factor 6: at most
    10t + 30. A momentum adds three a step, as 1 - β1 is exact or β1 has half an ulp's error.
    """

    def __init__(self, weight: Tensor, **options) -> None:
        self.weight, self.time = weight.detach().double(), 0
        self.options = {
            name: value.default for name, value in inspect.signature(Adafactor).parameters.items()
        } | options
        self.means: list = [0.0, 0.0]
        self.momentum = self.size = self.weights = self.updates = torch.zeros_like(self.weight)

    def step(self, grad: Tensor, **changed) -> None:
        self.options |= changed
        option = {key: float(value) if isinstance(value, Tensor) else value for key, value in self.options.items()}
        lr, (eps1, eps2), beta1 = option["lr"], option["eps"], option["beta1"]
        eps1 = torch.finfo(FP32).eps if eps1 is None else eps1
        grad, self.time = grad.double() * (-1 if option["maximize"] else 1), self.time + 1
        beta2 = 1 - self.time ** option["beta2_decay"]
        dims = (-1, -2) if grad.ndim > 1 else ()
        square = grad.square() + option["square_eps"]
        squares = [square.mean(dim, keepdim=True) for dim in dims] or [square]
        self.means = [beta2 * mean + (1 - beta2) * square for mean, square in zip(self.means, squares, strict=False)]
        variance = self.means[0]
        if dims:
            variance = variance / variance.mean(-2, keepdim=True).clamp(min=eps1) * self.means[1]
        update = grad / variance.sqrt().clamp(min=eps1)
        update = update / max(1.0, rms(update) / option["d"])
        step_size = min(lr, self.time**-0.5) if option["relative_step"] else lr
        update = update * step_size * (max(eps2, rms(self.weight)) if option["scale_parameter"] else 1)
        size = update.abs()
        if beta1 is None:
            self.momentum = self.size = torch.zeros_like(update)
        else:
            self.size = size = beta1 * self.size + (1 - beta1) * size
            self.momentum = update = beta1 * self.momentum + (1 - beta1) * update
        self.weights, self.updates = self.weights + self.weight.abs() + update.abs(), self.updates + size
        self.weight = self.weight * (1 - lr * option["weight_decay"]) - update

    def bound(self, sums: int = 0) -> Tensor:
        """With FP32 `sums` of that many terms, of which an update has four."""
        return 2.0**-24 * (2 * self.weights + (13 * self.time + 30 + 4 * sums) * self.updates)


def rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item() if values.numel() else 0.0


def weights(dtype=FP32, shapes=SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(4)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients(step: int, params, scale: float = 1.0) -> list[Tensor]:
    """BF16 numbers; the first row is always zero, every seventh gradient too, every tenth is twentyfold."""
    generator = torch.Generator().manual_seed(100 + step)
    scale *= 0 if step % 7 == 6 else 20 if step % 10 == 9 else 1
    grads = [(torch.randn(param.shape, generator=generator) * scale).to(BF16) for param in params]
    for grad in grads:
        grad[:1].zero_() if grad.ndim and len(grad) > 1 else None
    return grads


def train(optimizer, params, steps=range(STEPS), scale: float = 1.0, dtype: torch.dtype | None = None) -> None:
    for step in steps:
        for param, grad in zip(params, gradients(step, params, scale), strict=True):
            param.grad = grad.to(dtype or param.dtype)
        optimizer.step()


def papers(params, steps=range(STEPS), scale: float = 1.0, **options) -> list[Paper]:
    found = [Paper(param, **options) for param in params]
    for step in steps:
        for paper, grad in zip(found, gradients(step, params, scale), strict=True):
            paper.step(grad)
    return found


def assert_near(params, expected: list[Paper], sums: bool = False) -> None:
    for param, paper in zip(params, expected, strict=True):
        error = (param.detach().double() - paper.weight).abs()
        assert (error <= paper.bound(param.numel() if sums else 0)).all(), (tuple(param.shape), error.max())
