"""A cast model that trains with a loss in 16 bits says so; with an FP32 loss, or without training, it says nothing."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

import hf_lowprec
from hf_lowprec import once
from hf_lowprec.casting import cast_model, uncast_model
from tests.support.models import tiny_models
from tests.support.models.inspection import BF16


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "_said", set())


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("hf_lowprec")]


class OwnLoss(nn.Module):
    """A custom model, which computes its loss by hand and returns it with the predictions."""

    def __init__(self, returns: Callable[[torch.Tensor, torch.Tensor], Any] = lambda *outputs: outputs) -> None:
        super().__init__()
        self.linear, self.returns = nn.Linear(4, 4), returns

    def forward(self, x: torch.Tensor) -> Any:
        output = self.linear(x)
        return self.returns(output.square().mean(), output)


@pytest.mark.parametrize("build", [tiny_models.bert, tiny_models.t5])
def test_a_model_that_computes_its_loss_in_forward(caplog: pytest.LogCaptureFixture, build: Any) -> None:
    model, batch = build()
    cast_model(model)
    assert model(**batch).loss.dtype == BF16
    model(**batch)
    (text,) = said(caplog)
    assert f"{type(model).__name__} computes its loss in bfloat16" in text
    assert "call hf_lowprec.return_float32(model) after cast_model(model)" in text


@pytest.mark.parametrize(
    "returns",
    [
        *(lambda *outputs: outputs, lambda loss, _: loss, lambda loss, _: {"loss": loss}),
        lambda loss, output: SimpleNamespace(logits=output, loss=loss),
    ],
)
def test_a_custom_model(caplog: pytest.LogCaptureFixture, returns: Any) -> None:
    model = OwnLoss(returns)
    cast_model(model)
    model(torch.ones(2, 4))
    assert len(said(caplog)) == 1


def prepared(model: nn.Module) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    hf_lowprec.prepare_accelerator(accelerator)
    assert accelerator.prepare(model) is model
    return accelerator


@pytest.mark.parametrize("prepare", [hf_lowprec.return_float32, prepared])
def test_what_the_warning_asks_for(caplog: pytest.LogCaptureFixture, prepare: Any) -> None:
    for build in (tiny_models.bert, lambda: (OwnLoss(), {"x": torch.ones(2, 4)})):
        assert not said(caplog)
        model, batch = build()
        cast_model(model)
        prepare(model)
        cast_model(model)
        model(**batch)
    (text,) = said(caplog)  # what its code has rounded is not exact in FP32
    assert "OwnLoss computes its loss in bfloat16. For FP32, use torch's loss functions there" in text


def test_a_loss_of_what_a_model_has_computed(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    cast_model(model)
    accelerator = prepared(model)
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    assert not said(caplog)
    accelerator.backward(model[0](torch.ones(2, 4, dtype=BF16)).square().mean())
    (text,) = said(caplog)
    assert "the training step computes its loss in bfloat16. For FP32, compute it of FP32 predictions" in text


def test_what_is_no_16_bit_loss_in_training(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = tiny_models.bert()
    cast_model(model)
    with torch.no_grad():
        model(**batch)
    model(**{name: value for name, value in batch.items() if name != "labels"})
    llama, batch = tiny_models.llama()
    cast_model(llama)
    assert llama(**batch).loss.dtype == torch.float32
    bert, batch = tiny_models.bert()
    cast_model(bert)
    uncast_model(bert)
    bert.to(BF16)(**batch)
    assert not said(caplog)
