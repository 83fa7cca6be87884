"""All that an optimizer holds, to compare before and after a call, and calls that must fail and change nothing."""

import copy

import pytest
import torch


def train(optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    """Take steps with random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params_of(optimizer):
            param.grad = torch.randn(param.shape, generator=generator, device="cpu").to(param)
        optimizer.step()


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def everything(optimizer: torch.optim.Optimizer) -> dict:
    """A deep copy of all that a failed call could have changed."""
    # torch's own `__setstate__`, which loading and unpickling call, adds "differentiable" to the defaults.
    defaults = {key: value for key, value in optimizer.defaults.items() if key != "differentiable"}
    params = [param.detach() for param in params_of(optimizer)]
    return copy.deepcopy({"params": params, "defaults": defaults, **optimizer.state_dict()})


def assert_equal(first, second, where: str = "") -> None:
    """Equal containers, types, dtypes and bits."""
    assert type(first) is type(second), where
    if isinstance(first, dict):
        assert first.keys() == second.keys(), where
        first, second = list(first.items()), list(second.items())
    if isinstance(first, (list, tuple)):
        assert len(first) == len(second), where
        for number, (a, b) in enumerate(zip(first, second, strict=True)):
            assert_equal(a, b, f"{where}[{number}]")
    elif isinstance(first, torch.Tensor):
        assert (first.dtype, first.shape) == (second.dtype, second.shape), where
        assert torch.equal(first, second), where
    else:
        assert first == second, where


def refuses(call, optimizer: torch.optim.Optimizer, words: list[str]) -> None:
    """Assert that `call` raises an error whose message has all `words`, and leaves an optimizer that still trains."""
    before = everything(optimizer)
    with pytest.raises((ValueError, RuntimeError)) as error:
        call()
    assert_equal(everything(optimizer), before)
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"
    train(optimizer, 1)
