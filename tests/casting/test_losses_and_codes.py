"""Where a loss is FP32, and what is taken for quantized: the edges."""

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from hf_lowprec.casting import cast_model, uncast_model
from hf_lowprec.casting.losses import FloatLoss
from tests.integrations.tiny_training import llama

BF16, FP32 = torch.bfloat16, torch.float32


def test_only_a_model_that_calls_its_loss_function_is_said_to():
    """T5 computes its loss in `forward` itself."""
    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    assert cast_model(model).losses == ()
    tokens = torch.arange(1, 9)[None]
    assert model(input_ids=tokens, labels=tokens).loss.dtype == BF16
    model = llama()
    assert cast_model(model).losses == ("",)
    assert model(input_ids=tokens, labels=tokens).loss.dtype == FP32


def test_a_loss_module_that_was_assigned_is_no_obstacle():
    """nn.Module files it among its children, and transformers' property goes on to choose by itself."""
    model = llama()
    model.loss_function = nn.CrossEntropyLoss()
    cast_model(model)
    tokens = torch.arange(1, 9)[None]
    assert model(input_ids=tokens, labels=tokens).loss.dtype == FP32


def summed(logits, labels, **kwargs):
    return logits.sum()


@pytest.mark.parametrize("own", [False, True])
def test_uncast_takes_the_loss_back(own):
    model = llama()
    if own:
        model.loss_function = summed
    cast_model(model)
    assert isinstance(model.loss_function, FloatLoss)
    uncast_model(model)
    assert not isinstance(model.loss_function, FloatLoss)
    assert (model.loss_function is summed) == own
    model.loss_type = "ForSequenceClassification"
    assert (model.loss_function is summed) == own  # the class chooses again


class Gathers(nn.Module):
    """An index and a scale, neither of which is a quantizer's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("index", torch.arange(4, dtype=torch.int32))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, self.index.long()] * self.scale


def test_an_index_is_no_code():
    model = nn.Sequential(nn.Linear(4, 4), Gathers(), nn.Linear(4, 4))
    cast_model(model)
    assert (model[1].index.dtype, model[1].scale.dtype) == (torch.int32, BF16)
    assert model(torch.ones(2, 4)).dtype == BF16


class Codes(nn.Parameter):
    """Codes that are stored as if they were BF16 numbers."""


def test_uncast_leaves_codes_alone_and_takes_gradients_along():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    codes = torch.ones(4, 4, dtype=BF16)
    model[1].weight = Codes(codes, requires_grad=False)
    cast_model(model)
    model[0].weight.grad = torch.ones(4, 4, dtype=BF16)
    uncast_model(model)
    assert model[1].weight.dtype == BF16
    assert model[0].weight.dtype == model[0].weight.grad.dtype == FP32
