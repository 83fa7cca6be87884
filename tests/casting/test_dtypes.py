"""The dtype that is asked for: which are refused, FP16, and gradients that were there before."""

from typing import Any

import pytest
import torch
from torch import nn

from hf_lowprec.casting import cast_model
from tests.support.models import tiny_models
from tests.support.models.inspection import FP16, FP32, dtypes, norm_modules, output_dtypes
from tests.support.models.tiny_models import ARCHITECTURES


@pytest.mark.parametrize("dtype", [FP32, torch.float64, torch.int8, torch.float8_e4m3fn, "float32", None])
def test_bad_dtype(dtype: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"torch\.bfloat16 or torch\.float16"):
        cast_model(model, dtype)
    assert model.weight.dtype == FP32


def test_existing_gradients() -> None:
    model, batch = tiny_models.llama(tied=True)
    model(**batch).loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert cast_model(model, "bfloat16").dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == parameter.dtype
        assert torch.equal(parameter.grad, grads[name].to(parameter.dtype))
    model(**batch).loss.backward()
    assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_float16(name: str) -> None:
    model, batch = ARCHITECTURES[name].build()
    exact = model(**batch).loss.item()
    cast_model(model, FP16)
    assert set(dtypes(model).values()) - {torch.int64} == {FP16, FP32}
    seen = output_dtypes(model, batch)
    assert all(seen[path] == {FP16} for path in norm_modules(model))
    loss = model(**batch).loss
    loss.backward()
    # FP16 rounds eight times finer than BF16, whose error here stays below 1 % of the loss.
    assert abs(loss.item() - exact) < 0.01 / 8 * exact
