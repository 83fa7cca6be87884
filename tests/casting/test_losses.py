"""Loss modules and loss functions of a cast model compute in FP32; a loss in 16 bits causes a warning in training."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.loss.loss_utils import LOSS_MAPPING

import hf_lowprec
from hf_lowprec import once
from hf_lowprec.casting import cast_model, uncast_model
from tests.support.models import tiny_models
from tests.support.models.inspection import BF16, COPIES, FP32, copy_of, gradient_dtypes
from tests.support.training.tiny_trainer import llama

X, LABELS, TOKENS = torch.ones(4, 4), torch.tensor([0, 1, 2, 1]), torch.arange(1, 9)[None]


class Weighted(nn.Module):
    """A model that ends in a loss module."""

    def __init__(self, criterion: nn.Module) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.classifier = nn.Linear(8, 3)
        self.criterion = criterion

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.classifier(self.body(x))
        return self.criterion(logits, labels), logits


class ContrastiveLoss(nn.Module):
    def __init__(self, scale: list[float] | float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits * self.scale.sum(), labels)


class PerceptualLoss(nn.Linear):
    """A network by the name of a loss."""


class PairwiseMatchLoss(nn.Module):
    """Compute distances as DETR does: `cdist` takes neither BF16 nor different dtypes."""

    def forward(self, boxes: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
        return torch.cdist(boxes, targets[0]["boxes"], p=1).mean()


WEIGHT = torch.tensor([0.1, 0.3, 0.7])
LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor]]] = {
    "class weights": (lambda: nn.CrossEntropyLoss(WEIGHT.clone()), lambda p: cross_entropy(p, LABELS, WEIGHT)),
    "without tensors": (nn.CrossEntropyLoss, lambda p: cross_entropy(p, LABELS)),
    "a temperature": (lambda: ContrastiveLoss(2.659), lambda p: cross_entropy(p * 2.659, LABELS)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_modules_compute_in_fp32(name: str) -> None:
    torch.manual_seed(0)
    make, expected = LOSSES[name]
    model = Weighted(make())
    report = cast_model(model, keep_fp32="classifier" if name == "without tensors" else ())
    assert report.losses == ("criterion",) and "criterion" in report.kept and "loss in float32" in str(report)
    assert report.heads == (("classifier",) if name == "without tensors" else ())  # which the loss does not hide
    loss, logits = model(X, LABELS)
    assert logits.dtype == (FP32 if report.heads else BF16) and loss.dtype == FP32
    assert torch.equal(loss, expected(logits.float()))  # the same operation on the same numbers
    loss.backward()
    assert gradient_dtypes(model.body) == {BF16} and gradient_dtypes(model.criterion) <= {FP32}
    assert not cast_model(model).changed


def test_networks_by_the_name_of_a_loss_are_parts_of_the_model() -> None:
    model = nn.ModuleList([PerceptualLoss(4, 4), ContrastiveLoss([1.0, 2.0])])
    assert not cast_model(model).kept and model[0].weight.dtype == model[1].scale.dtype == BF16


def test_labels_of_any_depth() -> None:
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "match": PairwiseMatchLoss()})
    cast_model(model)
    boxes = model["body"](torch.rand(5, 4, dtype=BF16))
    with pytest.raises((RuntimeError, NotImplementedError)):
        PairwiseMatchLoss()(boxes, [{"boxes": torch.rand(2, 4)}])
    loss = model["match"](boxes, [{"boxes": torch.rand(2, 4)}])
    loss.backward()
    assert loss.dtype == FP32 and model["body"].weight.grad.any()


def test_the_loss_function_of_a_classifier() -> None:
    model, batch = tiny_models.vit()
    assert cast_model(model).losses == ("",)
    outputs = model(**batch)
    assert outputs.logits.dtype == BF16 and outputs.loss.dtype == FP32
    assert torch.equal(outputs.loss, cross_entropy(outputs.logits.float(), batch["labels"]))


def test_a_loss_module_that_was_assigned_is_no_obstacle() -> None:
    """nn.Module files it among its children, and transformers' property goes on to choose by itself."""
    model = llama()
    model.loss_function = nn.CrossEntropyLoss()
    cast_model(model)
    assert model(input_ids=TOKENS, labels=TOKENS).loss.dtype == FP32


def summed(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    assert logits.dtype == FP32
    return logits.sum()


@pytest.mark.parametrize("through", [None, *COPIES])
def test_a_loss_function_that_is_chosen_after_the_cast(through: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    cast_model(model)
    model = model if through is None else copy_of(model, through)
    logits = model(input_ids=TOKENS).logits.float()
    monkeypatch.setitem(LOSS_MAPPING, "Sum", summed)
    model.loss_type = "Sum"
    assert torch.equal(model(input_ids=TOKENS, labels=TOKENS).loss, logits.sum())
    monkeypatch.setitem(LOSS_MAPPING, "Sum", lambda logits, labels, **kwargs: 2 * summed(logits, labels))
    assert torch.equal(model(input_ids=TOKENS, labels=TOKENS).loss, 2 * logits.sum())
    model.loss_function = summed
    assert torch.equal(model(input_ids=TOKENS, labels=TOKENS).loss, logits.sum())


@pytest.mark.parametrize("own", [False, True])
def test_uncast_takes_the_loss_back(own: bool) -> None:
    model = llama()
    if own:
        model.loss_function = summed
    before = model.loss_function
    cast_model(model)
    assert model.loss_function is not before and "_loss_function" not in vars(model.model)
    uncast_model(model)
    assert model.loss_function is before


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Returns the warnings of hf_lowprec so far."""
    monkeypatch.setattr(once, "_said", set())
    return lambda: [
        r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("hf_lowprec")
    ]


class OwnLoss(nn.Module):
    """A custom model, which computes its loss by hand and returns it with the predictions."""

    def __init__(self, returns: Callable[[Tensor, Tensor], Any] = lambda *outputs: outputs) -> None:
        super().__init__()
        self.linear, self.returns = nn.Linear(4, 4), returns

    def forward(self, x: Tensor) -> Any:
        output = self.linear(x)
        return self.returns(output.square().mean(), output)


def own_loss() -> Any:
    return OwnLoss(), {"x": X}


@pytest.mark.parametrize("build", [tiny_models.bert, tiny_models.t5])
def test_a_model_that_computes_its_loss_in_16_bits_says_so_once(said: Any, build: Any) -> None:
    model, batch = build()
    cast_model(model)
    assert model(**batch).loss.dtype == BF16
    model(**batch)
    (text,) = said()
    assert f"{type(model).__name__} computes its loss in bfloat16" in text
    assert "call hf_lowprec.return_float32(model) after cast_model(model)" in text


@pytest.mark.parametrize(
    "returns",
    [
        *(lambda *outputs: outputs, lambda loss, _: loss, lambda loss, _: {"loss": loss}),
        lambda loss, output: SimpleNamespace(logits=output, loss=loss),
    ],
)
def test_a_custom_model_says_so(said: Any, returns: Any) -> None:
    model = OwnLoss(returns)
    cast_model(model)
    model(X)
    assert len(said()) == 1


def prepared(model: nn.Module) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    hf_lowprec.prepare_accelerator(accelerator)
    assert accelerator.prepare(model) is model
    return accelerator


@pytest.mark.parametrize("prepare", [hf_lowprec.return_float32, prepared])
def test_what_the_warning_asks_for(said: Any, prepare: Any) -> None:
    for build in (tiny_models.bert, own_loss):
        assert not said()
        model, batch = build()
        cast_model(model)
        prepare(model)
        cast_model(model)
        model(**batch)
    (text,) = said()  # what its code has rounded is not exact in FP32
    assert "OwnLoss computes its loss in bfloat16. For FP32, use torch's loss functions there" in text


def test_a_loss_of_what_a_model_has_computed(said: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    cast_model(model)
    accelerator = prepared(model)
    accelerator.backward(model(X).square().mean())
    assert not said()
    accelerator.backward(model[0](X.to(BF16)).square().mean())
    (text,) = said()
    assert "the training step computes its loss in bfloat16. For FP32, compute it from predictions.float()" in text


def test_what_is_no_16_bit_loss_in_training(said: Any) -> None:
    model, batch = tiny_models.bert()
    cast_model(model)
    with torch.no_grad():
        model(**batch)
    model(**{name: value for name, value in batch.items() if name != "labels"})
    uncast_model(model)
    model.to(BF16)(**batch)
    model, batch = tiny_models.llama()
    cast_model(model)
    assert model(**batch).loss.dtype == FP32
    assert not said()
