"""The evidence on Muon: its FP32 runs are torch's Muon, and the variants do what their papers say."""

import dataclasses

import pytest
import torch

pytest.importorskip("scipy")

from benchmarks.evidence import harness, page
from benchmarks.evidence.experiments import muon
from benchmarks.evidence.training import text
from benchmarks.evidence.training.replicas import Replicas, Shape

SMALL = Shape(width=32, layers=1, length=8)


def stepped(way: str, steps: int = 3) -> tuple[Replicas, list[list[torch.Tensor]]]:
    """Two seeds after some steps, and the gradients of each step."""
    model, grads = Replicas([3, 4], SMALL), []
    optimizer = muon.WAYS[way].optimizer(model, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    sequences = text.Sequences(text.load(None), [3, 4], 2, SMALL.length)
    for step in range(steps):
        model.losses(sequences.of_step(step)).sum().backward()
        grads.append([param.grad.clone() for param in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return model, grads


def test_fp32_is_torchs_muon_on_the_matrices_of_each_seed():
    model, grads = stepped("muon-fp32")
    first = Replicas([3, 4], SMALL)
    for k, (name, param) in enumerate(first.named_parameters()):
        if name.startswith("blocks") and "norm" not in name:
            single = [torch.nn.Parameter(each.detach().clone()) for each in param]
            make = lambda params: torch.optim.Muon(params, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")  # noqa: E731
        else:
            single = [torch.nn.Parameter(param.detach().clone())]
            make = lambda params: torch.optim.AdamW(params, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)  # noqa: E731
        optimizer = make(single)
        for grad in grads:
            for each, own in zip(single, grad[k].unbind() if len(single) > 1 else [grad[k]], strict=True):
                each.grad = own
            optimizer.step()
        expected = torch.stack([each.detach() for each in single]).view(param.shape)
        torch.testing.assert_close(dict(model.named_parameters())[name], expected, rtol=1e-6, atol=1e-7)


def test_normuon_and_cautious_weight_decay_follow_their_papers():
    """NorMuon's first step gives all rows one length; cautious decay leaves weights that the update enlarges."""
    first = Replicas([3, 4], SMALL).blocks[0].out.weight
    ways = ("muon", "normuon", "muonplus", "cautious")
    plain, normal, same, cautious = (stepped(f"{way}-fp32", 1)[0].blocks[0].out.weight for way in ways)
    update = (first * (1 - 1e-3) - normal).detach()
    length = 1e-2 * 0.2 * 32**0.5  # of a row: the update's mean square is 0.2²
    torch.testing.assert_close(update.norm(dim=-1), torch.full((2, 32), length), rtol=1e-3, atol=0)
    torch.testing.assert_close(same, normal, rtol=0, atol=1e-6)
    update = (first * (1 - 1e-3) - plain).detach()
    decayed = first * update >= 0
    torch.testing.assert_close(cautious, first * (1 - 1e-3 * decayed) - update, rtol=1e-6, atol=1e-7)


def test_a_record_gives_a_section(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "VALIDATION_SEQUENCES", 64)
    settings = muon.Settings(rates=(1e-3, 4e-3), seeds=2, steps=4, records=(2, 4), shape=SMALL, sequences=1)
    record = harness.run(dataclasses.replace(muon.EXPERIMENT, settings={"hour": settings}), "hour", output=tmp_path)
    found = page.section(muon.EXPERIMENT, record)
    assert "| Muon, split | " in found and "| Muon: loss minus AdamW's, in FP32, each at its best rate | " in found
