"""Models of transformers that take numbers and positions: these arrive as they are, and the model trains."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from hf_lowprec.casting import cast_model
from hf_lowprec.casting.input_downcast import losses_mix_dtypes
from tests.support.every_architecture.architecture_check import loss_of, without_chance
from tests.support.every_architecture.tiny_batches import offers
from tests.support.every_architecture.tiny_configs import tiny_config
from tests.support.models.inspection import FP32

Batch = dict[str, Any]


def built(name: str, model_type: str) -> tuple[Any, Batch]:
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    model = without_chance(model_class(tiny_config(model_class, model_type)))
    _, batch = next(iter(offers(model)))
    torch.manual_seed(3)
    return model, batch


def points(model: Any, batch: Batch) -> Batch:
    return {"input_points": torch.rand(2, 1, 2, 2) * 30, "input_labels": torch.ones(2, 1, 2).long()}


def patches(model: Any, batch: Batch) -> Batch:
    """Of an image of 300 rows and one column: BF16 has no 257, which is a row of its own."""
    place = torch.tensor([[257.0, 1.0], [299.0, 1.0]] * 8)
    pixels = torch.randn(16, model.config.vision_config.patch_embed_hidden_size)
    return {"flattened_patches": torch.cat((place, pixels), -1).expand(2, -1, -1).clone()}


CASES: dict[str, tuple[str, str, Callable[[Any, Batch], Batch], set[str]]] = {
    "points of SAM": ("SamModel", "sam", points, {"input_points"}),
    "rows of Pix2Struct": ("Pix2StructForConditionalGeneration", "pix2struct", patches, {"flattened_patches"}),
    "time of pi0": ("PI0ForConditionalGeneration", "pi0", lambda m, b: {}, {"timestep", "noise"}),
    "times of a series": (
        "TimeSeriesTransformerForPrediction",
        "time_series_transformer",
        lambda m, b: {},
        {"past_time_features", "future_time_features", "past_values", "future_values"},
    ),
    "series of one dimension": (
        "TimesFmModelForPrediction",
        "timesfm",
        lambda m, b: {"past_values": [1000 + torch.randn(20), torch.randn(17)], "freq": [0, 0]},
        {"past_values"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_arrive_as_they_are_and_train(case: str) -> None:
    if case == "time of pi0" and not losses_mix_dtypes():
        pytest.skip("this torch's losses do not mix formats")
    name, model_type, more, numbers = CASES[case]
    model, batch = built(name, model_type)
    batch |= more(model, batch)
    seen: dict[str, Any] = {}
    cast_model(model)
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    loss, _ = loss_of(model(**batch))
    assert all(seen[name] is batch[name] for name in numbers)
    loss.backward()
    assert loss.isfinite() and any(p.grad is not None and p.grad.any() for p in model.parameters())
    assert all(p.grad is None or (p.grad.isfinite().all() and p.grad.dtype == p.dtype) for p in model.parameters())


def test_positions_in_floats_reach_the_rotary_embedding() -> None:
    """As Qwen3-Omni computes them, with seconds: BF16 has no 257."""
    model, _ = built("Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_omni_moe_thinker")
    cast_model(model)
    rotary = next(m for n, m in model.named_modules() if n.endswith("rotary_emb") and n.startswith("model"))
    seen: list[Tensor] = []
    rotary.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((*args, *kwargs.values())[1]), with_kwargs=True
    )
    tokens = torch.randint(64, 96, (1, 300))
    model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    assert seen and seen[0].dtype == FP32
    assert torch.equal(seen[0][0, 0], torch.arange(300.0))
