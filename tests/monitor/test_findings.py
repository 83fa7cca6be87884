"""Planted defects are found by name, and healthy runs raise nothing."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hf_lowprec
from tests.support.training.tiny_trainer import counting_data, llama

STEPS = 24


def model_of(dtype: torch.dtype | None, seed: int = 0) -> nn.Module:
    """A tiny Llama, cast as a whole to `dtype`, or by `cast_model` if that is None."""
    model = llama(seed)
    if dtype is None:
        hf_lowprec.cast_model(model)
        return model
    return model.to(dtype)


def train(model: nn.Module, make: Callable, every: int = 4, steps: int = STEPS) -> list:
    """All findings of a short run."""
    optimizer = make([param for param in model.parameters() if param.requires_grad])
    monitor = hf_lowprec.PrecisionMonitor(optimizer, model, every=every)
    rows = counting_data()
    found = {}
    for k in range(steps):
        batch = [rows[(8 * k + i) % len(rows)]["input_ids"] for i in range(8)]
        ids = torch.stack(batch)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found |= {finding.code: finding for finding in monitor.findings()}
    return list(found.values())


def adamw(lr: float = 1e-3, **options) -> Callable:
    return lambda params: hf_lowprec.AdamW(params, lr=lr, **options)


def only(findings: list, code: str):
    (finding,) = [finding for finding in findings if finding.code == code]
    return finding


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("way", ["fp32", "kahan", "stochastic"])
def test_healthy_runs_raise_nothing(way, seed):
    if way == "fp32":
        findings = train(model_of(torch.float32, seed), lambda p: torch.optim.AdamW(p, lr=1e-3), steps=12)
    else:
        lr = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)[seed % 5]
        options = {"rounding": way, "weight_decay": 0.1 * (seed % 2), "seed": seed}
        findings = train(model_of(None, seed), adamw(lr, **options), steps=12)
    assert findings == []


def test_a_stock_optimizer_on_bf16_weights():
    findings = train(model_of(torch.bfloat16), lambda p: torch.optim.AdamW(p, lr=1e-6), steps=1, every=1)
    message = only(findings, "updates_vanish").message
    assert re.match("9[5-9]% of the weight updates of step 1 were lost in rounding", message)
    assert "(torch.optim.AdamW, learning rate 1e-06)" in message
    assert "optim='adamw_bf16_kahan' or hf_lowprec.AdamW" in message
    norms = only(findings, "norms_stand_still")
    assert "model.norm.weight" in norms.tensors
    assert "cast_model, which keeps norms in FP32" in norms.message


def test_other_algorithms_are_told_of_their_own_counterpart():
    findings = train(model_of(torch.bfloat16), lambda p: torch.optim.SGD(p, lr=1e-5), steps=1, every=1)
    assert "optim='sgd_bf16_kahan' or hf_lowprec.SGD" in only(findings, "updates_vanish").message


def test_an_optimizer_whose_updates_are_unknown():
    findings = train(model_of(torch.bfloat16), lambda p: torch.optim.Adafactor(p, lr=1e-6), steps=1, every=1)
    message = only(findings, "updates_vanish").message
    assert "of the 16-bit weights changed in step 1 (torch.optim.Adafactor" in message


def test_rounding_to_nearest_says_so():
    findings = train(model_of(None), adamw(1e-6, rounding="nearest"), steps=1, every=1)
    finding = only(findings, "updates_vanish")
    assert "rounding='nearest', learning rate 1e-06" in finding.message
    assert "Use rounding='split' or 'kahan'" in finding.message


def test_a_frozen_second_moment():
    (finding,) = train(model_of(None), adamw(state_rounding="nearest"))
    assert finding.code == "second_moment_frozen"
    assert "Remove state_rounding='nearest'" in finding.message


def test_a_frozen_norm():
    """Norms cast with the rest, at a learning rate that moves all other weights."""
    model = model_of(torch.bfloat16)
    (finding,) = train(model, adamw(1e-3, rounding="nearest", weight_decay=0), every=1, steps=1)
    assert finding.code == "norms_stand_still"
    norms = {name for name, _ in model.named_parameters() if "norm" in name}
    assert set(finding.tensors) == norms


def test_a_decay_that_does_not_arrive():
    """torch multiplies BF16 weights by `1 - lr·weight_decay`, which changes none of them."""
    (finding,) = [
        finding
        for finding in train(model_of(None), lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1), every=8)
        if finding.code == "weight_decay_lost"
    ]
    assert "weight_decay=0.1" in finding.message


def test_a_tensor_that_nothing_moves():
    model = model_of(None)
    model.register_parameter("unused", nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16)))
    finding = only(train(model, adamw()), "never_stepped")
    assert finding.tensors == ("unused",)


def test_a_tensor_with_gradients_of_zero():
    model = model_of(None)
    up = model.model.layers[0].mlp.up_proj.weight
    up.register_hook(torch.zeros_like)
    assert only(train(model, adamw()), "never_stepped").tensors == ("model.layers.0.mlp.up_proj.weight",)


def test_embeddings_of_few_words_have_a_gradient():
    """Only one row of many has a gradient, and the sample may miss it."""
    embedding = nn.Embedding(100_000, 8, dtype=torch.bfloat16)
    optimizer = hf_lowprec.AdamW(embedding.parameters())
    monitor = hf_lowprec.PrecisionMonitor(optimizer, embedding, every=1)
    for _ in range(4):
        embedding(torch.tensor([4321])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert monitor.findings() == []


def test_a_tensor_that_the_optimizer_does_not_have():
    model = model_of(None)
    norm = model.model.norm
    findings = train(model, lambda params: hf_lowprec.AdamW([p for p in params if p is not norm.weight]))
    assert only(findings, "never_stepped").tensors == ("model.norm.weight",)


def test_a_head_added_after_the_cast():
    model = model_of(None)
    model.lm_head = nn.Linear(32, 64, bias=False)
    model.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
    finding = only(train(model, adamw()), "left_in_fp32")
    assert finding.tensors == ("lm_head.weight",)


def test_a_head_kept_in_fp32_on_request():
    model = llama()
    hf_lowprec.cast_model(model, keep_fp32=["lm_head"])
    assert train(model, adamw(), steps=12) == []
