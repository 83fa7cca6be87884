"""Where names are not enough to make a config or a batch: by model type or class, with the reason beside them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]

RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
RESNET |= {"layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]}
# Their default backbone is timm's, an optional package.
NO_TIMM = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_kwargs": None}
LAST = {**NO_TIMM, "backbone_config": {**RESNET, "out_features": ["stage4"]}}
# A fourth level would be a 3 × 3 convolution of one pixel, of which torch's BF16 gradient on a CPU is now and then NaN.
PYRAMID = {**NO_TIMM, "backbone_config": RESNET, "num_feature_levels": 3}
# Half the pixels of a patch, so that all four stages are wider than a window.
SWIN = {"patch_size": 2, "window_size": 2}
EFFICIENTNET = {
    **{"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280, "kernel_sizes": [3, 3, 5]},
    **{"in_channels": [32, 16, 24], "out_channels": [16, 24, 40], "strides": [1, 2, 2], "expand_ratios": [1, 6, 6]},
    **{"num_block_repeats": [1, 1, 1], "depthwise_padding": []},
}
HISTORY = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2, 3], "num_time_features": 1}
HISTORY |= {"encoder_layers": 1, "decoder_layers": 1}
MAMBA = {"num_heads": 8, "head_dim": 16, "n_groups": 1}

FIELDS: dict[str, dict[str, Any]] = {
    "detr": LAST,
    "conditional_detr": LAST,
    "dab-detr": LAST,
    "table-transformer": LAST,
    "deformable_detr": PYRAMID,
    "swin": SWIN,
    "swinv2": SWIN,
    "donut-swin": SWIN,
    "maskformer-swin": SWIN,
    "efficientnet": EFFICIENTNET,
    "align_vision_model": EFFICIENTNET,
    "levit": {"image_size": 64, "patch_size": 16},  # a stem of four strided convolutions
    "mobilevitv2": {"image_size": 64},
    "mamba2": MAMBA,  # heads times their width is twice the model's width
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_unified_text": {"num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "reformer": {"axial_pos_shape": [3, 4], "lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4},
    "xmod": {"default_language": "en_XX"},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "vitmatte": {"fusion_hidden_sizes": [64, 32, 16, 8]},
    "blip-2": {"image_token_index": 5},
    "instructblip": {"image_token_index": 5},
    "instructblipvideo": {"video_token_index": 5},
    "voxtral": {"audio_token_id": 5},
    "lilt": {"hidden_size": 96},  # six numbers of a box share it
    "seggpt": {"num_hidden_layers": 4, "merge_index": 0, "intermediate_hidden_state_indices": [1, 2, 3, 3]},
    "autoformer": HISTORY,
    "informer": HISTORY,
    "time_series_transformer": HISTORY,
    "aria": {"projector_patch_to_query_dict": {16: 8}},
    "tvp": {"max_img_size": 32, "visual_prompt_size": 4},
    "chameleon": {"vocabulary_map": {"<image>": 5, "IMGIMGAA": 6}},
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6, "<|visual token 000000|>": 7}},
    "dpt": {"backbone_out_indices": [0, 1], "neck_hidden_sizes": [8, 16], "reassemble_factors": [4, 2]},
}


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
