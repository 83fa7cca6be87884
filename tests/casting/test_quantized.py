"""Quantized weights: a cast leaves quantized data and its scales alone, in every form in which it is stored."""

import pytest
import torch
from torch import nn

from hf_lowprec.casting import cast_model, uncast_model
from tests.support.models import tiny_models
from tests.support.models.inspection import BF16, FP32, dtypes, output_dtypes
from tests.support.models.quantized_models import Int8Linear, Int8Weight, StoredLinear, quantize_linears, subclassed

FORMS = {"buffers": Int8Linear, "parameter_subclass": StoredLinear, "wrapper_subclass": subclassed}


def stored_bytes(model: nn.Module) -> dict[str, bytes]:
    """The quantized data and scales of every quantized module."""
    found = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, Int8Linear):
            tensors = [module.qweight.data, module.scales]
        elif isinstance(weight, Int8Weight):
            tensors = [weight.codes, weight.scale]
        else:
            continue
        found[name] = b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("base", [FP32, BF16])
def test_weights_stay_and_the_rest_is_cast(form: str, base: torch.dtype) -> None:
    model, batch = tiny_models.llama()
    del batch["labels"]  # the loss is FP32
    quantize_linears(model.to(base), FORMS[form])
    before, dtypes_before = stored_bytes(model), dtypes(model)
    assert len(before) == 14
    expected = model(**batch).logits if base == FP32 else None
    with pytest.raises(ValueError, match=r"keep_fp32 '\*\.mlp' covers .*mlp\.\w+_proj\.\w*weight, which is quant"):
        cast_model(model, keep_fp32="*.mlp")
    assert dtypes(model) == dtypes_before
    report = cast_model(model)
    assert stored_bytes(model) == before
    assert {t.dtype for n, t in model.named_parameters() if "norm" in n} == {FP32}
    assert model.lm_head.weight.dtype == model.model.embed_tokens.weight.dtype == BF16
    assert sum("proj" in name for name in report.untouched) == (14 if form == "wrapper_subclass" else 28)
    seen = output_dtypes(model, batch)
    # Rotary tables and norms are rounded on leaving; a quantized module answers in the format of its input.
    assert {dtype for found in seen.values() for dtype in found} == {BF16}
    if expected is not None:
        # Ten BF16 operations in depth, each off by at most 2^-9 of a value, in independent directions.
        assert (model(**batch).logits.float() - expected).norm() < 10**0.5 * 2**-9 * expected.norm()
    assert not cast_model(model).changed


def test_a_bias_is_cast_and_a_scale_is_not_and_a_module_with_a_plain_weight_is_not_quantized() -> None:
    model = nn.Sequential(Int8Linear(nn.Linear(8, 8)), nn.Linear(8, 8))
    model[1].register_buffer("amax_history", torch.ones(4, dtype=torch.uint8))
    cast_model(model)
    assert (model[0].bias.dtype, model[0].scales.dtype) == (BF16, FP32)
    assert dtypes(model[1]) == {"weight": BF16, "bias": BF16, "amax_history": torch.uint8}
    assert model(torch.ones(1, 8)).dtype == BF16


def test_weights_that_present_fp32_get_fp32_inputs() -> None:
    model = nn.Sequential(subclassed(nn.Linear(8, 8)), subclassed(nn.Linear(8, 8), BF16), nn.Linear(8, 8))
    report = cast_model(model)
    assert report.kept == {"0": "weights quantized as Int8Weight of torch.float32"}
    assert report.boundaries == ("0",)
    assert (model[0].bias.dtype, model[1].bias.dtype) == (FP32, BF16)
    assert model(torch.ones(1, 8)).dtype == BF16


class StoredAsBF16(nn.Parameter):
    """Quantized data that is stored as if it were BF16 numbers."""


def test_uncast_leaves_quantized_data_alone_and_takes_gradients_along() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = StoredAsBF16(torch.ones(4, 4, dtype=BF16), requires_grad=False)
    cast_model(model)
    model[0].weight.grad = torch.ones(4, 4, dtype=BF16)
    uncast_model(model)
    assert model[1].weight.dtype == BF16
    assert model[0].weight.dtype == model[0].weight.grad.dtype == FP32
