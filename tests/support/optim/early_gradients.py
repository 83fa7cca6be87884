"""Training with gradients that are taken during the backward pass: released, or moved to a host that is simulated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_lowprec.optim import AdamW, host_steps
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from tests.support.optim.optimizer_contents import everything
from tests.support.optim.simulated_copies import simulate_device
from tests.support.random_numbers import randn

BF16 = torch.bfloat16
BUCKET = 300
"""Elements: the gradients of the model below are in several buckets, of which the table's is the last."""
OFFLOADED = {"offload_states": True, "offload_gradients": True}
KINDS = {"released": {"gradient_release": True}, "states": {"offload_states": True}, "offloaded": OFFLOADED}


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_steps, "BUCKET_ELEMENTS", BUCKET)
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", BUCKET)


class Tied(nn.Module):
    """A table that is also the head, a layer that is used twice, a norm in FP32, frozen and unused parameters."""

    def __init__(self, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(24, 32) / 5)
        self.layer, self.second, self.frozen = (nn.Linear(32, 32) for _ in range(3))
        self.sometimes, self.unused = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(0, 3))
        self.frozen.requires_grad_(False)
        self.to(dtype)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor, shift: bool = False) -> torch.Tensor:
        hidden = self.layer(self.layer(x @ self.table).tanh())
        hidden = self.norm(hidden.to(self.norm.weight.dtype)).to(x.dtype)
        hidden = self.second(hidden) + (self.sometimes.sum() if shift else 0)
        return self.frozen(hidden) @ self.table.T


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return model(randn(8, 24, seed=seed).to(dtype), shift=seed % 3 == 0).float().square().mean()


def backward(model: nn.Module, *seeds: int) -> None:
    for seed in seeds:
        loss_of(model, seed).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int, passes: int = 1) -> None:
    for step in steps:
        backward(model, *range(10 * step, 10 * step + passes))
        optimizer.step()
        optimizer.zero_grad()


def both(monkeypatch, run, kind, make=AdamW, dtype=BF16, share=0.3, seed=0, **options) -> list:
    """What `run` returns, weights and states: of the ordinary optimizer, and of one whose gradients are taken early."""
    found = []
    for early in ({}, KINDS[kind]):
        with monkeypatch.context() as patch:
            if "offload_states" in early:
                simulate_device(patch, share, seed)
            model = Tied(dtype)
            optimizer = make(model.named_parameters(), lr=0.01, **options, **early)
            found.append([run(model, optimizer), everything(optimizer)])
            found[-1][1]["state"] = dict(sorted(found[-1][1]["state"].items()))  # in the order of the first step
    return found


def gradients_alive(model: nn.Module, train_step) -> list[int]:
    """The elements of gradients that exist whenever one is computed, before the optimizer gets it, and at the end."""
    alive = []

    def count(grad: torch.Tensor) -> None:
        alive.append(grad.numel() + sum(param.grad.numel() for param in model.parameters() if param.grad is not None))

    handles = [param.register_hook(count) for param in model.parameters() if param.requires_grad]
    train_step()
    count(torch.empty(0))
    for handle in handles:
        handle.remove()
    return alive


def hooks_of(model: nn.Module) -> int:
    return sum(len(param._post_accumulate_grad_hooks or ()) for param in model.parameters())
