"""How much of FP32's displacement do the stored weights show after a few steps?

Stored weights are what the model computes with. Gradients are unit noise around a mean that each weight keeps, of unit
size too, and the same for all optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from first_steps.optimizers import FP32, OURS, prepare

DEVIATION = 0.02
"""Standard deviation of the weights."""


def shares(lr: float, steps: Sequence[int], elements: int, seed: int) -> dict[str, dict[int, float]]:
    """The displacement of the stored weights along FP32's, divided by FP32's.

    Args:
        lr: AdamW's learning rate.
        steps: after which it is measured.
        elements: number of weights.
        seed: of weights and gradients.

    Returns:
        Optimizer → step → share.
    """
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(1, elements, generator=generator).mul_(DEVIATION)
    mean = torch.randn(1, elements, generator=generator)
    models, optimizers, starts = {}, {}, {}
    for name in (FP32, *OURS):
        models[name] = nn.Linear(elements, 1, bias=False)
        models[name].weight.data.copy_(exact)
        optimizers[name] = prepare(models[name], name, lr, seed, weight_decay=0.0)
        starts[name] = models[name].weight.detach().double()
    found: dict[str, dict[int, float]] = {name: {} for name in OURS}
    for step in range(1, max(steps) + 1):
        grad = (mean + torch.randn(1, elements, generator=generator)).to(torch.bfloat16)
        for name, optimizer in optimizers.items():
            weight = models[name].weight
            weight.grad = grad.to(weight.dtype)
            optimizer.step()
        if step in steps:
            moved = {name: (models[name].weight.detach().double() - starts[name]).flatten() for name in models}
            exact_move = moved[FP32]
            for name in OURS:
                found[name][step] = float(moved[name] @ exact_move / (exact_move @ exact_move))
    return found
