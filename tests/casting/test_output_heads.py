"""A kept module that ends the model hands out what it computed: FP32."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_lowprec.casting import cast_model
from tests.support.models import tiny_models
from tests.support.models.inspection import BF16, FP32, hook_counts

SMALL: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TOKENS = torch.arange(16).view(2, 8)


def bert(kind: str, labels: torch.Tensor) -> Callable[[], Any]:
    def build() -> Any:
        torch.manual_seed(0)
        model = getattr(transformers, f"BertFor{kind}")(
            transformers.BertConfig(**SMALL, intermediate_size=32, num_labels=3)
        )
        return model, {"input_ids": TOKENS, "labels": labels}

    return build


def resnet() -> Any:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=3)
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 2])}
    return transformers.ResNetForImageClassification(config), batch


HEADS = {
    "causal": (tiny_models.llama, "lm_head", "lm_head"),
    "causal, tied": (lambda: tiny_models.llama(tied=True), "lm_head", "lm_head"),
    "causal, tied to what is kept": (lambda: tiny_models.gpt2(tied=True), "wte", "lm_head"),
    "encoder and decoder": (tiny_models.t5, "lm_head", "lm_head"),
    "masked": (bert("MaskedLM", TOKENS), "decoder", "cls.predictions.decoder"),
    "masked, around the head": (bert("MaskedLM", TOKENS), "cls", "cls"),
    "tokens": (bert("TokenClassification", TOKENS % 3), "classifier", "classifier"),
    "sequences": (bert("SequenceClassification", torch.tensor([0, 2])), "classifier", "classifier"),
    "images": (tiny_models.vit, "classifier", "classifier"),
    "convolutions": (resnet, "classifier", "classifier"),
    "last of the last": (resnet, "classifier.1", "classifier.1"),
}


@pytest.mark.parametrize("name", HEADS)
def test_logits_are_the_heads_own(name: str) -> None:
    build, keep, head = HEADS[name]
    model, batch = build()
    model.eval()
    report = cast_model(model, keep_fp32=keep)
    assert report.heads == (head,) and head in report.boundaries
    assert "output left in float32:" in str(report)
    module = model.get_submodule(head)
    seen: list[Any] = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args))
    outputs = model(**batch)
    handle.remove()
    plain = copy.deepcopy(module)
    for part in plain.modules():
        part._forward_pre_hooks.clear()
        part._forward_hooks.clear()
    assert outputs.logits.dtype == FP32
    assert not torch.equal(outputs.logits, outputs.logits.to(BF16).float())
    # The same operation on the same FP32 numbers.
    assert torch.equal(outputs.logits, plain(*(arg.float() for arg in seen[0])))
    assert outputs.loss.dtype == FP32
    model.train()(**batch).loss.backward()
    assert all(p.grad is None or (p.grad.dtype == p.dtype and p.grad.isfinite().all()) for p in model.parameters())
    assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {FP32}


def test_embedding_returned_as_the_head() -> None:
    class Model(nn.Module):
        main_input_name = "ids"

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 4)
            self.linear = nn.Linear(4, 4)

        def get_output_embeddings(self) -> nn.Module:
            return self.embed

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.linear(self.embed(ids))

    model = Model()
    assert not cast_model(model, keep_fp32="embed").heads
    assert model(torch.arange(3)).dtype == BF16


class TestLastChild:
    def test_modules_without_tensors_may_follow(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3), nn.Softmax(-1))
        assert cast_model(model, keep_fp32="2").heads == ("2",)
        out = model(torch.randn(5, 4))
        # Four FP32 roundings of at most 2^-24; BF16 probabilities would miss by up to 2^-8.
        assert out.dtype == FP32 and (out.sum(-1) - 1).abs().max() <= 4 * 2.0**-24

    def test_written_last_but_called_first(self) -> None:
        class Backwards(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.out = nn.Linear(4, 2)
                self.encoder = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.out(self.encoder(x))

        model = Backwards()
        report = cast_model(model, keep_fp32="encoder")
        assert report.heads == ("encoder",) and set(report.inputs) == {"", "out"}
        out = model(torch.randn(3, 4))
        out.sum().backward()
        assert out.dtype == BF16
        assert not cast_model(model).changed

    def test_module_called_in_two_places(self) -> None:
        shared = nn.Linear(4, 4)
        model = nn.Sequential(shared, nn.Linear(4, 4), shared)
        assert not cast_model(model, keep_fp32="2").heads
        assert model(torch.randn(3, 4)).dtype == BF16

    def test_no_longer_the_last(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        assert cast_model(model, keep_fp32="1").heads == ("1",)
        # Cast before, so that one missing hook is all there is to do.
        cast_model(tail := nn.Linear(4, 4))
        report = cast_model(model.append(tail))
        assert not report.heads and report.changed and hook_counts(model[1]) == [(1, 1)]
        assert model(torch.randn(3, 4)).dtype == BF16
        # The part alone ends with it, but what it ends in the whole is not for a cast of the part to say.
        cast_model(model[:2], keep_fp32="1")
        assert model(torch.randn(3, 4)).dtype == BF16
