"""Training steps under `torch.compile`: the optimizer runs as it is, between compiled regions."""

import pytest
import torch
from torch import nn

from hf_lowprec.optim import AdamW


def training(compiled: bool, with_closure: bool = False, **arguments):
    """A function that takes one training step, its model and optimizer, and a list of the graphs that were compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).bfloat16()
    optimizer = AdamW(model.parameters(), lr=0.01, **arguments)
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph

    def loss_of(inputs):
        return model(inputs).float().pow(2).mean()

    if with_closure and compiled:
        loss_of = torch.compile(loss_of, backend=count)

    def take_step(inputs):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(inputs)
            loss.backward()
            return loss

        if with_closure:
            return optimizer.step(closure)
        loss = closure()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        return loss

    if compiled and not with_closure:
        take_step = torch.compile(take_step, backend=count)
    return take_step, model, optimizer, graphs


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("with_closure", [False, True])
def test_a_compiled_training_step_gives_the_same_bits_and_compiles_once(backend, with_closure):
    """… while the learning rate changes, which torch's optimizers compile as a constant."""
    torch.compiler.reset()
    runs = [training(compiled, with_closure, backend=backend) for compiled in (False, True)]
    counts = []
    for step in range(4):
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
        losses = []
        for take_step, _, optimizer, _ in runs:
            losses.append(take_step(inputs))
            optimizer.param_groups[0]["lr"] *= 0.5
        assert torch.equal(*losses)
        counts.append(len(runs[1][3]))
    assert counts[0] > 0 and counts[1:] == [counts[1]] * 3
    for params in zip(*(model.parameters() for _, model, _, _ in runs), strict=True):
        assert torch.equal(*params)
