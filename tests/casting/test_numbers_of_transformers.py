"""Models of transformers that take numbers and positions: these arrive as they are, and the model trains."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from hf_lowprec.casting import cast_model
from hf_lowprec.casting.hooks.input_downcast import losses_mix_dtypes
from tests.support.every_architecture.architecture_check import loss_of, without_chance
from tests.support.every_architecture.tiny_batches import offers
from tests.support.every_architecture.tiny_configs import tiny_config
from tests.support.models.inspection import BF16, FP32

Batch = dict[str, Any]
UNIT = 2.0**-8  # BF16 has 8 significant bits, so rounding to nearest errs by at most this much of the value


def built(name: str, model_type: str) -> tuple[Any, Batch]:
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    model = without_chance(model_class(tiny_config(model_class, model_type)))
    _, batch = next(iter(offers(model)))
    torch.manual_seed(3)
    return model, batch


def points(model: Any, batch: Batch) -> Batch:
    return {"input_points": torch.rand(2, 1, 2, 2) * 30, "input_labels": torch.ones(2, 1, 2).long()}


def boxes(model: Any, batch: Batch) -> Batch:
    return {"input_boxes": torch.rand(2, 1, 4) * 30}


def patches(model: Any, batch: Batch) -> Batch:
    """Of an image of 300 rows and one column: BF16 has no 257, which is a row of its own."""
    place = torch.tensor([[257.0, 1.0], [299.0, 1.0]] * 8)
    pixels = torch.randn(16, model.config.vision_config.patch_embed_hidden_size)
    return {"flattened_patches": torch.cat((place, pixels), -1).expand(2, -1, -1).clone()}


def noise(model: Any, batch: Batch) -> Batch:
    # Ranks by distances that BF16 does not see.
    count = (batch["pixel_values"].shape[-1] // model.config.patch_size) ** 2
    return {"noise": 0.5 + 2.0**-12 * torch.stack([torch.randperm(count) for _ in range(2)])}


def predicted(model: Any, batch: Batch) -> Batch:
    """One position, the last, in the two streams of XLNet."""
    length = batch["input_ids"].shape[1]
    return {"target_mapping": torch.eye(length)[None, -1:].repeat(2, 1, 1)}


def regions(model: Any, batch: Batch) -> Batch:
    return {"bbox": torch.rand(*batch["input_ids"].shape, 4)}


CASES: dict[str, tuple[str, str, Callable[[Any, Batch], Batch], set[str]]] = {
    "points of SAM": ("SamModel", "sam", points, {"input_points"}),
    "boxes of SAM": ("SamModel", "sam", boxes, {"input_boxes"}),
    "points of SAM 2": ("Sam2Model", "sam2", points, {"input_points"}),
    "boxes of BROS": ("BrosForTokenClassification", "bros", regions, {"bbox"}),
    "places of LXMERT": ("LxmertModel", "lxmert", lambda m, b: {}, {"visual_pos"}),
    "rows of Pix2Struct": ("Pix2StructForConditionalGeneration", "pix2struct", patches, {"flattened_patches"}),
    "noise of ViT-MAE": ("ViTMAEForPreTraining", "vit_mae", noise, {"noise"}),
    "time of pi0": ("PI0ForConditionalGeneration", "pi0", lambda m, b: {}, {"timestep", "noise"}),
    "times of a series": (
        "TimeSeriesTransformerForPrediction",
        "time_series_transformer",
        lambda m, b: {},
        {"past_time_features", "future_time_features", "past_values", "future_values"},
    ),
    "returns of a decision": ("DecisionTransformerModel", "decision_transformer", lambda m, b: {}, {"returns_to_go"}),
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


@pytest.mark.parametrize("name", ["Sam", "SamHQ", "Sam2"])
def test_prompts_of_sam(name: str) -> None:
    """Their coordinates go through many periods of a sine, by a random matrix: rounded, masks were half off."""
    model, batch = built(f"{name}Model", {"SamHQ": "sam_hq"}.get(name, name.lower()))
    batch |= points(model, batch)
    exact = model(**batch).pred_masks
    cast_model(model)
    masks = model(**batch).pred_masks
    # Some hundred roundings from the pixels to a mask, which add up like a root.
    assert masks.dtype == BF16 and (masks - exact).norm() <= 100**0.5 * UNIT * exact.norm()


def test_noise_of_vit_mae_ranks_the_patches() -> None:
    model, batch = built("ViTMAEForPreTraining", "vit_mae")
    batch |= noise(model, batch)
    exact = model(**batch)
    cast_model(model)
    assert torch.equal(model(**batch).ids_restore, exact.ids_restore)


def test_answers_of_tapas() -> None:
    """A year is compared with a sum of numbers in a table: BF16 has no 1997."""
    config: Any = tiny_config(transformers.TapasForQuestionAnswering, "tapas")
    config.num_aggregation_labels, config.use_answer_as_supervision = 4, True
    config.average_logits_per_cell, config.huber_loss_delta, config.cell_selection_preference = False, 25.0, 0.2
    torch.manual_seed(0)
    model = without_chance(transformers.TapasForQuestionAnswering(config))
    types = torch.zeros(2, 12, 7).long()
    types[:, 4:, 0], types[:, 4:, 1], types[:, 4:, 2] = 1, torch.arange(8) % 2 + 1, torch.arange(8) % 3 + 1
    batch = {"input_ids": torch.randint(64, 96, (2, 12)), "token_type_ids": types}
    batch |= {"labels": torch.zeros(2, 12).long(), "aggregation_labels": torch.tensor([0, 1])}
    batch |= {"numeric_values": torch.full((2, 12), 1997.0), "numeric_values_scale": torch.ones(2, 12)}
    batch |= {"float_answer": torch.tensor([1997.0, 1999.0])}
    seen: dict[str, Tensor] = {}
    cast_model(model)
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    model(**batch).loss.backward()
    assert all(seen[name] is batch[name] for name in ("numeric_values", "numeric_values_scale", "float_answer"))


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
