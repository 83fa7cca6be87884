"""Every algorithm with every rounding mode and option, and a small problem to train."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_lowprec.optim import ALGORITHMS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = sorted(ALGORITHMS)

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adafactor": [{"beta1": 0.9, "weight_decay": 0.1}, {}, {"relative_step": False, "scale_parameter": False}],
    "Adam": [{"amsgrad": True, "weight_decay": 0.1}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "AdamW": [{"amsgrad": True}, {"weight_decay": 0.0}, {"betas": (0.0, 0.5), "eps": 1e-4}, {"factored": True}],
    "Adan": [{"weight_decay": 0.1}, {"no_prox": True, "weight_decay": 0.1}],
    "Lion": [{"weight_decay": 0.1}, {"betas": (0.5, 0.6)}],
    "Muon": [{}, {"nesterov": False, "adjust_lr_fn": "original"}, {"ns_steps": 3, "weight_decay": 0.0}],
    "Prodigy": [
        {"weight_decay": 0.1, "use_bias_correction": True, "d0": 0.1},
        {"d_coef": 0.5, "safeguard_warmup": True, "d0": 0.1},
    ],
    "RAdam": [{"weight_decay": 0.1}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "SGD": [
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True},
        {},
    ],
    "ScheduleFreeAdamW": [{"weight_decay": 0.1, "warmup_steps": 4}, {"betas": (0.5, 0.0), "eps": 1e-4}],
    "StableAdamW": [{}, {"weight_decay": 0.0, "eps": 1e-4}],
}
"""Options of each algorithm; the first go with every mode, each of the others with the default."""

NEED_ALL_GRADIENTS = ("Prodigy",)
"""Algorithms that release no gradients."""

MODES: list[tuple[torch.dtype, dict[str, Any]]] = [
    (BF16, {"rounding": "kahan"}),
    (BF16, {"rounding": "split"}),
    (BF16, {"rounding": "stochastic"}),
    (BF16, {"rounding": "nearest"}),
    (BF16, {"rounding": "stochastic", "state_dtype": torch.int8}),
    (BF16, {"rounding": "kahan", "state_rounding": "nearest", "state_dtype": FP32}),
    (FP16, {"rounding": "kahan"}),
    (FP32, {"rounding": "kahan"}),
]


def _configurations() -> Iterable[tuple[str, torch.dtype, dict[str, Any]]]:
    for name in NAMES:
        first, *others = OPTIONS[name]
        yield from ((name, dtype, {**first, **mode}) for dtype, mode in MODES)
        yield from ((name, BF16, options) for options in [*others, {**first, "maximize": True}])


def _id(options: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in options.items()).replace("torch.", "")


CONFIGURATIONS = list(_configurations())

every_algorithm = pytest.mark.parametrize("name", NAMES)
every_mode = pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        pytest.param(name, dtype, {**OPTIONS[name][0], **mode}, id=f"{name}-{str(dtype)[6:]}-{_id(mode)}")
        for name in NAMES
        for dtype, mode in MODES
    ],
)
every_configuration = pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [pytest.param(*case, id=f"{case[0]}-{str(case[1])[6:]}-{_id(case[2])}") for case in CONFIGURATIONS],
)


def build(name: str, params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """An optimizer of `params`, tensors or pairs of name and tensor; Muon takes those of two dimensions as matrices."""
    params = list(params)
    if name == "Muon":
        tensors = [param[1] if isinstance(param, tuple) else param for param in params]
        options["matrices"] = [tensor for tensor in tensors if tensor.ndim == 2]
    return ALGORITHMS[name](params, **options)


def parameters(
    dtype: torch.dtype = BF16, shapes: Iterable[tuple[int, ...]] = ((5, 3), (2, 32), (7,), ())
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(10)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def all_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def give_gradients(params: Iterable[Tensor], seed: int) -> None:
    """Gradients that depend on the seed and on the positions alone."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: Iterable[int]) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def same(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    return all(map(torch.equal, first, second))


class Problem:
    """`|weight · input + bias|²`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.weight, self.bias = parameters(dtype, [(10, 5), (10,)])
        self.input = torch.randn(5, generator=torch.Generator().manual_seed(0))

    @property
    def params(self) -> list[nn.Parameter]:
        return [self.weight, self.bias]

    def loss(self) -> Tensor:
        return (self.weight.float().mv(self.input) + self.bias.float()).square().sum()

    def closure(self, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        return closure
