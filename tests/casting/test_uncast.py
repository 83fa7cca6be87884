"""`uncast_model`: an FP32 model again, without a trace of the cast."""

import torch
from torch import nn

from hf_lowprec.casting import cast_model, uncast_model
from tests.support.models.tiny_models import llama


def test_hooks_of_others_stay_and_ours_go():
    model, batch = llama(tied=True)
    calls = []
    handles = [
        model.model.norm.register_forward_pre_hook(lambda module, args: calls.append(args[0].dtype)),
        model.model.norm.register_forward_hook(lambda module, args, output: calls.append(output.dtype)),
    ]
    parameters = list(model.parameters())
    before = {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()}
    cast_model(model)
    uncast_model(model)
    assert {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()} == before
    model(**batch).loss.backward()
    assert calls == [torch.float32, torch.float32]
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for handle in handles:
        handle.remove()
    assert not model.model.norm._forward_hooks


def test_a_model_may_be_cast_again_to_another_format():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    cast_model(model)
    uncast_model(model)
    report = cast_model(model, torch.float16)
    assert not report.already_cast
    assert model(torch.ones(2, 3)).dtype == torch.float16
