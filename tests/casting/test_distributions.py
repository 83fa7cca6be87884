"""Series models that predict the parameters of a distribution: FP32, in the loss and where samples are drawn."""

import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from hf_lowprec.casting import cast_model, uncast_model
from tests.support.every_architecture.architecture_check import tiny_model
from tests.support.every_architecture.tiny_batches import offers
from tests.support.models.inspection import BF16, FP32

Batch = dict[str, Any]
UNIT = 2.0**-24  # FP32 has 24 significant bits: rounding to nearest errs by at most this much of the value
MODELS = {
    "TimeSeriesTransformerForPrediction": "time_series_transformer",
    "InformerForPrediction": "informer",
    "AutoformerForPrediction": "autoformer",
    "PatchTSTForPrediction": "patchtst",
    "PatchTSTForRegression": "patchtst",
    "PatchTSMixerForPrediction": "patchtsmixer",
    "PatchTSMixerForRegression": "patchtsmixer",
}


def built(name: str, distribution: str) -> tuple[Any, Batch]:
    fields = {"distribution_output": distribution, "loss": "nll"}
    model = tiny_model(getattr(transformers, name), MODELS[name], **fields)
    batch = next(batch for _, batch in offers(model))
    if distribution == "negative_binomial":  # of counts
        batch = {key: value.abs().round() if "values" in key else value for key, value in batch.items()}
    return model, batch


def squareplus(x: Tensor) -> Tensor:
    return (x + (x**2 + 4).sqrt()) / 2


# What each layer predicts, to the domain of a parameter.
DOMAINS = {
    "student_t": (lambda x: 2 + squareplus(x), lambda x: x, squareplus),
    "normal": (lambda x: x, squareplus),
    "negative_binomial": (squareplus, lambda x: x),
}


@pytest.mark.combinations(1)
@pytest.mark.parametrize("distribution", DOMAINS)
@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_samples_are_float32(name: str, distribution: str) -> None:
    model, batch = built(name, distribution)
    report = cast_model(model)
    assert report.predictions and all(model.get_submodule(n).weight.dtype == BF16 for n in report.predictions)
    seen: list[tuple[list[Tensor], Any]] = []
    for module in model.modules():
        if type(module).__name__ == "ParameterProjection":
            # Before its output is used: a negative binomial's logits are scaled in place.
            module.register_forward_hook(
                lambda m, args, out: seen.append(([p(args[0]) for p in m.proj], [x.clone() for x in out]))
            )
    loss = model(**batch).loss
    loss.backward()
    assert loss.dtype == FP32 and all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())
    for layers, parameters in seen:
        for domain, layer, parameter in zip(DOMAINS[distribution], layers, parameters, strict=True):
            expected = domain(layer.double()).squeeze(-1)
            # Four roundings: a square, a root and two sums, each of the size of |x| + 2 at most.
            bound = 4 * UNIT * (layer.double().abs().squeeze(-1) + 3)
            assert parameter.dtype == FP32 and ((parameter - expected).abs() <= bound).all()
    assert seen
    taken = inspect.signature(model.generate).parameters
    samples = model.eval().generate(**{key: value for key, value in batch.items() if key in taken}).sequences
    assert samples.dtype == FP32 and samples.isfinite().all()


def test_a_scale_has_the_least_value_of_float32() -> None:
    """It is bounded by the epsilon of its format: BF16's, 0.0078, is a noise that a series may well be below."""
    model, batch = built("TimeSeriesTransformerForPrediction", "student_t")
    scale = model.parameter_projection.proj[2]
    nn.init.zeros_(scale.weight)
    nn.init.constant_(scale.bias, -(2.0**20))
    cast_model(model)
    assert torch.equal(model(**batch).params[2].unique(), torch.tensor([2.0**-23]))


def test_once_and_taken_back() -> None:
    model, _ = built("InformerForPrediction", "student_t")
    report = cast_model(model)
    assert set(report.predictions) == {f"parameter_projection.proj.{k}" for k in range(3)}
    assert "predictions in float32:\n    parameter_projection.proj.* (x3): parameters of a distribution" in str(report)
    again = cast_model(model)
    assert not again.changed and again.predictions == report.predictions
    uncast_model(model)
    assert not any(layer._forward_hooks for layer in model.parameter_projection.proj)


def test_kept_layers_return_float32_by_themselves() -> None:
    model, batch = built("InformerForPrediction", "student_t")
    assert not cast_model(model, keep_fp32="parameter_projection").predictions
    assert model(**batch).params[0].dtype == FP32
