"""Losses of a cast model are computed in FP32, on copies of its 16-bit predictions."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING

from hf_lowprec.casting import cast_model, uncast_model
from tests.support.models import tiny_models
from tests.support.models.inspection import BF16, COPIES, FP32, copy_of, gradient_dtypes
from tests.support.training.tiny_trainer import llama


class Weighted(nn.Module):
    """A model that ends in a loss module with a buffer."""

    def __init__(self, criterion: nn.Module) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.classifier = nn.Linear(8, 3)
        self.criterion = criterion

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.classifier(self.body(x))
        return self.criterion(logits, labels), logits


class PairwiseMatchLoss(nn.Module):
    """Compute distances as DETR does: `cdist` takes neither BF16 nor different dtypes."""

    def forward(self, boxes: torch.Tensor, targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        return torch.cdist(boxes, targets[0]["boxes"], p=1).mean()


class TestLossModules:
    def test_weights_and_result_are_float32(self) -> None:
        torch.manual_seed(0)
        weight = torch.tensor([0.1, 0.3, 0.7])
        model = Weighted(nn.CrossEntropyLoss(weight=weight.clone()))
        report = cast_model(model)
        assert report.losses == ("criterion",) and "criterion" in report.kept and not report.heads
        assert torch.equal(model.criterion.weight, weight)
        labels = torch.tensor([0, 1, 2, 1])
        loss, logits = model(torch.randn(4, 4), labels)
        assert logits.dtype == BF16 and loss.dtype == FP32
        # The same operation on the same numbers.
        assert torch.equal(loss, nn.functional.cross_entropy(logits.float(), labels, weight))
        loss.backward()
        assert gradient_dtypes(model) == {BF16}
        assert "loss in float32" in str(report)
        assert not cast_model(model).changed

    def test_a_temperature_is_no_part_of_the_model(self) -> None:
        class ContrastiveLoss(nn.Module):
            def __init__(self, parameter: torch.Tensor) -> None:
                super().__init__()
                self.scale = nn.Parameter(parameter)

            def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
                return nn.functional.cross_entropy(logits * self.scale.sum(), labels)

        model = Weighted(ContrastiveLoss(torch.tensor(2.659)))
        assert cast_model(model).losses == ("criterion",)
        loss, _ = model(torch.randn(4, 4), torch.arange(4) % 3)
        loss.backward()
        assert loss.dtype == model.criterion.scale.dtype == model.criterion.scale.grad.dtype == FP32
        assert gradient_dtypes(model.body) == {BF16}
        assert "criterion" not in cast_model(Weighted(ContrastiveLoss(torch.ones(3)))).kept

    def test_without_tensors(self) -> None:
        model = Weighted(nn.CrossEntropyLoss())
        assert cast_model(model).losses == ("criterion",)
        assert model(torch.randn(4, 4), torch.arange(4) % 3)[0].dtype == FP32

    def test_does_not_hide_the_head(self) -> None:
        model = Weighted(nn.CrossEntropyLoss(weight=torch.ones(3)))
        assert cast_model(model, keep_fp32="classifier").heads == ("classifier",)

    def test_a_network_by_that_name_is_none(self) -> None:
        class PerceptualLoss(nn.Linear):
            pass

        model = nn.Sequential(nn.Linear(4, 4), PerceptualLoss(4, 4))
        assert not cast_model(model).losses and model[1].weight.dtype == BF16

    def test_labels_of_any_depth(self) -> None:
        model = nn.ModuleDict({"body": nn.Linear(4, 4), "match": PairwiseMatchLoss()})
        cast_model(model)
        boxes = model["body"](torch.rand(5, 4, dtype=BF16))
        with pytest.raises((RuntimeError, NotImplementedError)):
            PairwiseMatchLoss()(boxes, [{"boxes": torch.rand(2, 4)}])
        loss = model["match"](boxes, [{"boxes": torch.rand(2, 4)}])
        loss.backward()
        assert loss.dtype == FP32 and model["body"].weight.grad.any()


class TestLossFunctions:
    def test_of_a_classifier(self) -> None:
        model, batch = tiny_models.vit()
        report = cast_model(model)
        assert report.losses == ("",)
        outputs = model(**batch)
        expected = nn.functional.cross_entropy(outputs.logits.float(), batch["labels"])
        assert outputs.logits.dtype == BF16 and outputs.loss.dtype == FP32
        assert torch.equal(outputs.loss, expected)

    def test_parts_without_a_loss_have_none(self) -> None:
        model, _ = tiny_models.llama()
        assert cast_model(model).losses == ("",)
        assert "_loss_function" not in vars(model.model)


def test_a_loss_module_that_was_assigned_is_no_obstacle() -> None:
    """nn.Module files it among its children, and transformers' property goes on to choose by itself."""
    model = llama()
    model.loss_function = nn.CrossEntropyLoss()
    cast_model(model)
    tokens = torch.arange(1, 9)[None]
    assert model(input_ids=tokens, labels=tokens).loss.dtype == FP32


def summed(logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    assert logits.dtype == FP32
    return logits.sum()


@pytest.mark.parametrize("through", [None, *COPIES])
def test_a_loss_function_that_is_chosen_after_the_cast(through: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = llama(), torch.arange(1, 9)[None]
    cast_model(model)
    model = model if through is None else copy_of(model, through)
    logits = model(input_ids=tokens).logits.float()
    monkeypatch.setitem(LOSS_MAPPING, "Sum", summed)
    model.loss_type = "Sum"
    assert torch.equal(model(input_ids=tokens, labels=tokens).loss, logits.sum())
    monkeypatch.setitem(LOSS_MAPPING, "Sum", lambda logits, labels, **kwargs: 2 * summed(logits, labels))
    assert torch.equal(model(input_ids=tokens, labels=tokens).loss, 2 * logits.sum())
    model.loss_function = summed
    assert torch.equal(model(input_ids=tokens, labels=tokens).loss, logits.sum())


@pytest.mark.parametrize("own", [False, True])
def test_uncast_takes_the_loss_back(own: bool) -> None:
    model = llama()
    if own:
        model.loss_function = summed
    before = model.loss_function
    cast_model(model)
    assert model.loss_function is not before
    uncast_model(model)
    assert model.loss_function is before
