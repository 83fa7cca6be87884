"""Batches for model types and classes whose argument names do not suffice, and what else is special about a few."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.every_architecture.sound_batches import SOUNDS
from tests.support.every_architecture.tiny_labels import Batch, masks, objects


def _time_series(config: Any, name: str) -> Batch:
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    values = {"past_values": torch.randn(2, past), "future_values": torch.randn(2, future)}
    times = {"past_time_features": torch.randn(2, past, 1), "future_time_features": torch.randn(2, future, 1)}
    return {**values, **times, "past_observed_mask": torch.ones(2, past)}


def _patched_series(config: Any, name: str) -> Batch:
    batch: Batch = {"past_values": torch.randn(2, config.context_length, config.num_input_channels)}
    if "Classification" in name:
        batch["target_values"] = torch.arange(2)
    elif "Regression" in name:
        batch["target_values"] = torch.randn(2, getattr(config, "num_targets", 1))
    elif "Prediction" in name:
        batch["future_values"] = torch.randn(2, config.prediction_length, config.num_input_channels)
    return batch


def _decisions(config: Any, name: str) -> Batch:
    return {
        "states": torch.randn(2, 4, config.state_dim),
        "actions": torch.randn(2, 4, config.act_dim),
        "rewards": torch.randn(2, 4, 1),
        "returns_to_go": torch.randn(2, 4, 1),
        "timesteps": torch.arange(4).expand(2, 4),
        "attention_mask": torch.ones(2, 4),
    }


def _text(length: int = 12) -> Tensor:
    return torch.randint(64, 96, (2, length))


def _regions(config: Any, name: str) -> Batch:
    features = {"visual_feats": torch.randn(2, 4, config.visual_feat_dim), "visual_pos": torch.rand(2, 4, 4)}
    return {"input_ids": _text(), "attention_mask": torch.ones(2, 12), **features}


def _painted(config: Any, name: str) -> Batch:
    names = ("pixel_values", "prompt_pixel_values", "prompt_masks")
    height, width = config.image_size
    return {name: torch.randn(2, 3, height // 2, width) for name in names}


def _masked_video(config: Any, name: str) -> Batch:
    patches = (config.num_frames // config.tubelet_size) * (config.image_size // config.patch_size) ** 2
    pixels = torch.randn(2, config.num_frames, 3, config.image_size, config.image_size)
    return {"pixel_values": pixels, "bool_masked_pos": (torch.arange(patches) % 2 == 0).expand(2, -1)}


def _flattened(config: Any, name: str) -> Batch:
    place = torch.stack(torch.meshgrid(torch.arange(1, 5), torch.arange(1, 5), indexing="ij"), -1).reshape(16, 2)
    width = config.vision_config.patch_embed_hidden_size
    patches = torch.randn(2, 16, width)
    return {"flattened_patches": torch.cat((place.expand(2, -1, -1).float(), patches), -1), "labels": _text()}


def _asked(config: Any, name: str) -> Batch:
    tokens = _text()
    tokens[:, 3] = config.question_token_id
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def _grounded(config: Any, name: str) -> Batch:
    count, size = config.latent_query_num, config.vision_config.image_size
    tokens = _text(count + 6)
    mask = torch.zeros_like(tokens)
    mask[:, 1 : count + 1] = 1
    pixels = torch.randn(2, 3, size, size)
    return {"pixel_values": pixels, "input_ids": tokens, "image_embeds_position_mask": mask, "labels": tokens}


def _grounding(config: Any, name: str) -> Batch:
    begin, end, point = 101, 102, 1012
    tokens = torch.tensor([[begin, 70, 71, point, 72, 73, point, end]] * 2)
    size = config.backbone_config.image_size
    batch = {"pixel_values": torch.randn(2, 3, size, size), "pixel_mask": torch.ones(2, size, size).long()}
    batch |= {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return {**batch, **objects((size, size))} if "ForObjectDetection" in name else batch


def _tasked(config: Any, name: str) -> Batch:
    size = config.backbone_config.image_size
    texts = torch.randint(64, 96, (2, config.num_queries - config.text_encoder_n_ctx, config.task_seq_len))
    batch = {"pixel_values": torch.randn(2, 3, size, size), "pixel_mask": torch.ones(2, size, size).long()}
    batch |= {"task_inputs": _text(config.task_seq_len), "text_inputs": texts}
    return {**batch, **masks((size, size))} if "Segmentation" in name else batch


def _with_queries(config: Any, name: str) -> Batch:
    image = torch.randn(2, 5, config.encoder_hidden_size)
    return {"query_embeds": torch.randn(2, 8, config.hidden_size), "encoder_hidden_states": image}


def _interleaved(config: Any, name: str) -> Batch:
    tokens, size = _text(), config.vision_config.image_size
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    batch |= {"pixel_values": torch.randn(2, 2, 3, size, size), "image_attention_mask": torch.ones(2, 12, 2).long()}
    return batch if name == "IdeficsModel" else {**batch, "labels": tokens}


def _three_parts(config: Any, name: str) -> Batch:
    tokens = _text()
    tokens[:, [3, 4, 11]] = config.sep_token_id
    if "MultipleChoice" in name:
        return {"input_ids": tokens[:, None].expand(2, 2, -1).contiguous(), "labels": torch.arange(2)}
    return {"input_ids": tokens, "start_positions": torch.tensor([5, 6]), "end_positions": torch.tensor([7, 8])}


def _tiles(config: Any, name: str) -> Batch:
    pixels = torch.randn(2, 1, config.max_num_tiles, 3, config.image_size, config.image_size)
    mask = torch.ones(2, 1, config.max_num_tiles).long()
    return {"pixel_values": pixels, "aspect_ratio_ids": torch.ones(2, 1).long(), "aspect_ratio_mask": mask}


def _forecast(config: Any, name: str) -> Batch:
    past = torch.randn(2, config.context_length)
    frequency = {"freq": torch.zeros(2, 1).long()} if config.model_type == "timesfm" else {}
    if "Prediction" in name:
        return {"past_values": past, "future_values": torch.randn(2, config.horizon_length), **frequency}
    return {"past_values": past, "past_values_padding": torch.zeros_like(past).long(), **frequency}


def _placed(config: Any, name: str) -> Batch:
    """Patches with their places, six by six: what is pooled is three by three."""
    place = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij"), -1).reshape(36, 2)
    return {"pixel_values": torch.randn(2, 36, 3 * config.patch_size**2), "pixel_position_ids": place.expand(2, -1, -1)}


def _images_of_patches(config: Any, name: str) -> Batch:
    pixels = torch.randn(32, 3, config.patch_size, config.patch_size)
    return {"pixel_values": pixels, "grid_thw": torch.tensor([[1, 4, 4]] * 2)}


def _long_row(config: Any, name: str) -> Batch:
    pixels = torch.randn(1, 3, config.patch_size, 32 * config.patch_size)
    return {"pixel_values": pixels, "target_sizes": torch.tensor([[4, 4]] * 2, dtype=torch.int32)}


def _robot(config: Any, name: str) -> Batch:
    size, tokens = config.vlm_config.vision_config.image_size, _text(16 + 6)
    tokens[:, :16] = config.vlm_config.image_token_id
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    batch |= {"pixel_values": torch.randn(2, 1, 3, size, size), "pixel_attention_mask": torch.ones(2, 1).bool()}
    if name == "PI0Model":
        return {**batch, "action_embeds": torch.randn(2, config.chunk_size + 1, config.dit_config.hidden_size)}
    noise = torch.randn(2, config.chunk_size, config.max_action_dim)
    given = {"noise": noise, "timestep": torch.rand(2), "actions": torch.randn_like(noise)}
    return {**batch, **given, "state": torch.randn(2, config.max_state_dim)}


def _line(config: Any, name: str) -> Batch:
    height = 96 if "mobile" in config.model_type else 48
    return {"pixel_values": torch.randn(2, 3, height, 192)}  # of text, which shrinks to three rows


def _frames(config: Any, name: str) -> Batch:
    tokens, size = _text()[:1], config.max_img_size
    pixels = torch.randn(1, config.num_frames, 3, size, size)  # one video: a table is viewed as if there were no more
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values": pixels}


def _noised(config: Any, name: str) -> Batch:
    context = torch.randn(2, 8, config.hidden_size * len(config.target_layer_ids))
    return {"noise_embeds": torch.randn(2, 4, config.hidden_size), "context_hidden_states": context}


def _typed(config: Any, name: str) -> Batch:
    tokens = _text()
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": torch.zeros_like(tokens),
    }
    return {**batch, "labels": tokens} if "For" in name else batch


def _decision(config: Any, name: str) -> Batch:
    marks = {"marks": torch.tensor([[4, 8]]), "num_options": torch.tensor([[2, 2]])}
    return {"input_ids": _text()[:1], **marks, "question_type_ids": torch.zeros(1, 2).long()}


BATCHES: dict[str, Callable[[Any, str], Batch]] = {
    **SOUNDS,
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), _time_series),
    **dict.fromkeys(("patchtst", "patchtsmixer"), _patched_series),
    **dict.fromkeys(("grounding-dino", "mm-grounding-dino"), _grounding),
    **dict.fromkeys(("LongformerForMultipleChoice", "LongformerForQuestionAnswering"), _three_parts),
    **dict.fromkeys(("minicpm_ocr_vision", "minicpmv4_7_vision"), _long_row),
    **dict.fromkeys(("timesfm", "timesfm2_5"), _forecast),
    **dict.fromkeys((f"pp_ocr{kind}_rec" for kind in ("v5_mobile", "v5_server", "v6_small", "v6_tiny")), _line),
    "decision_transformer": _decisions,
    "lxmert": _regions,
    "seggpt": _painted,
    "VideoMAEForPreTraining": _masked_video,
    "pix2struct": _flattened,
    "SplinterForPreTraining": _asked,
    "kosmos-2": _grounded,
    "oneformer": _tasked,
    "blip_2_qformer": _with_queries,
    "idefics": _interleaved,
    "MllamaVisionModel": _tiles,
    "PerceiverModel": lambda config, name: {"inputs": torch.randn(2, 6, config.d_model)},
    "gemma4_vision": _placed,
    "kimi_k25_vision": _images_of_patches,
    "pi0": _robot,
    "jev": _decision,
    "molmo2": _typed,
    "tvp": _frames,
    "muse_glimmer_assistant": _noised,
}

# Models whose loss jumps where a rounding error crosses a threshold: theirs is only asked to be finite.
DISCRETE: dict[str, str] = {
    "EomtDinov3ForUniversalSegmentation": "points of a mask are sampled by their rank",
    "ExaoneMoeForCausalLM": "experts are chosen by their rank",
    "NeuCodecModel": "a frame's code is the nearest of few levels",
    "Xcodec2Model": "a frame's code is the nearest of few levels",
    "Nemotron3_5TranscribeAudioModel": "speakers are active above 0.5, where a new model's probabilities lie",
}

# Model types whose tiny models take seconds: walked for the page, left out of the tests.
LONG = {"vibevoice_acoustic_tokenizer", "vibevoice_acoustic_tokenizer_decoder", "vibevoice_acoustic_tokenizer_encoder"}
LONG |= {"inkling_mm_model", "vibevoice", "vibevoice_asr", "emu3", "slanext", "univnet"}
