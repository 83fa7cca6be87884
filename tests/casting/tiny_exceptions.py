"""Where names are not enough to make a batch: by model type or class, and what else is special about a few classes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]

def _time_series(model: nn.Module) -> Batch:
    config: Any = model.config
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    values = {"past_values": torch.randn(2, past), "future_values": torch.randn(2, future)}
    times = {"past_time_features": torch.randn(2, past, 1), "future_time_features": torch.randn(2, future, 1)}
    return {**values, **times, "past_observed_mask": torch.ones(2, past)}


def _patched_series(model: nn.Module) -> Batch:
    config: Any = model.config
    batch: Batch = {"past_values": torch.randn(2, config.context_length, config.num_input_channels)}
    name = type(model).__name__
    if "Classification" in name:
        batch["target_values"] = torch.arange(2)
    elif "Regression" in name:
        batch["target_values"] = torch.randn(2, getattr(config, "num_targets", 1))
    elif "Prediction" in name:
        batch["future_values"] = torch.randn(2, config.prediction_length, config.num_input_channels)
    return batch


def _decisions(model: nn.Module) -> Batch:
    config: Any = model.config
    return {
        "states": torch.randn(2, 4, config.state_dim),
        "actions": torch.randn(2, 4, config.act_dim),
        "rewards": torch.randn(2, 4, 1),
        "returns_to_go": torch.randn(2, 4, 1),
        "timesteps": torch.arange(4).expand(2, 4),
        "attention_mask": torch.ones(2, 4),
    }


def _codes(model: nn.Module) -> Batch:
    config: Any = model.config
    return {"input_ids": torch.randint(0, 32, (2 * config.num_codebooks, 6))}


def _text(length: int = 12) -> Tensor:
    return torch.randint(64, 96, (2, length))


def _regions(model: nn.Module) -> Batch:
    config: Any = model.config
    features = {"visual_feats": torch.randn(2, 4, config.visual_feat_dim), "visual_pos": torch.rand(2, 4, 4)}
    return {"input_ids": _text(), "attention_mask": torch.ones(2, 12), **features}


def _painted(model: nn.Module) -> Batch:
    names = ("pixel_values", "prompt_pixel_values", "prompt_masks")
    height, width = model.config.image_size  # type: ignore[union-attr, misc]
    return {name: torch.randn(2, 3, height // 2, width) for name in names}


def _masked_video(model: nn.Module) -> Batch:
    config: Any = model.config
    patches = (config.num_frames // config.tubelet_size) * (config.image_size // config.patch_size) ** 2
    pixels = torch.randn(2, config.num_frames, 3, config.image_size, config.image_size)
    return {"pixel_values": pixels, "bool_masked_pos": (torch.arange(patches) % 2 == 0).expand(2, -1)}


def _flattened(model: nn.Module) -> Batch:
    config: Any = model.config
    place = torch.stack(torch.meshgrid(torch.arange(1, 5), torch.arange(1, 5), indexing="ij"), -1).reshape(16, 2)
    width = config.vision_config.patch_embed_hidden_size
    patches = torch.randn(2, 16, width)
    return {"flattened_patches": torch.cat((place.expand(2, -1, -1).float(), patches), -1), "labels": _text()}


def _asked(model: nn.Module) -> Batch:
    config: Any = model.config
    tokens = _text()
    tokens[:, 3] = config.question_token_id
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def _grounded(model: nn.Module) -> Batch:
    config: Any = model.config
    count, size = config.latent_query_num, config.vision_config.image_size
    tokens = _text(count + 6)
    mask = torch.zeros_like(tokens)
    mask[:, 1 : count + 1] = 1
    pixels = torch.randn(2, 3, size, size)
    return {"pixel_values": pixels, "input_ids": tokens, "image_embeds_position_mask": mask, "labels": tokens}


BATCHES: dict[str, Callable[[nn.Module], Batch]] = {
    "autoformer": _time_series,
    "informer": _time_series,
    "time_series_transformer": _time_series,
    "patchtst": _patched_series,
    "patchtsmixer": _patched_series,
    "decision_transformer": _decisions,
    "MusicgenForCausalLM": _codes,
    "MusicgenMelodyForCausalLM": _codes,
    "lxmert": _regions,
    "seggpt": _painted,
    "VideoMAEForPreTraining": _masked_video,
    "pix2struct": _flattened,
    "SplinterForPreTraining": _asked,
    "kosmos-2": _grounded,
}

# Models whose loss jumps where a rounding error crosses a threshold: theirs is only asked to be finite.
DISCRETE: dict[str, str] = {
    "EomtDinov3ForUniversalSegmentation": "points of a mask are sampled by their rank",
    "ExaoneMoeForCausalLM": "experts are chosen by their rank",
    "Nemotron3_5TranscribeAudioModel": "speakers are active above 0.5, where a new model's probabilities lie",
}

# Model types whose tiny models take seconds: walked for the page, left out of the tests.
LONG = {"inkling_mm_model", "vibevoice", "vibevoice_asr", "emu3", "slanext", "univnet"}
