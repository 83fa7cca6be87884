"""Batches of sound and of its codes, where names are not enough to make one: by model type or class."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.casting.tiny_labels import Batch


def _codes(model: nn.Module) -> Batch:
    config: Any = model.config
    return {"input_ids": torch.randint(0, 32, (2 * config.num_codebooks, 6))}


def _prompted(model: nn.Module) -> Batch:
    config: Any = model.config
    tokens = torch.randint(64, 96, (2, 12))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if config.model_type == "musicgen_melody":
        batch["input_features"] = torch.randn(2, 5, config.num_chroma)
    return {**batch, "labels": torch.randint(3, 32, (2, 6, config.decoder.num_codebooks))}


def _read_aloud(model: nn.Module) -> Batch:
    config: Any = model.config
    config = getattr(config, "model_config", config)
    tokens, frames = torch.randint(8, 64, (2, 6)), 2
    return {
        "input_ids": tokens,
        "spectrogram_labels": torch.randn(2, 6 * frames, config.num_mel_bins),
        "duration_labels": torch.full((2, 6), frames),
        "pitch_labels": torch.randn(2, 6, 1),
        "energy_labels": torch.randn(2, 6, 1),
    }


def _spoken(model: nn.Module) -> Batch:
    config: Any = model.config
    if "TextToSpeech" in type(model).__name__:
        tokens = torch.randint(8, 64, (2, 12))
        voice = torch.randn(2, config.speaker_embedding_dim)
        frames = torch.randn(2, 8, config.num_mel_bins)
        return {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "labels": frames,
            "speaker_embeddings": voice,
        }
    states = {name: torch.randn(2, 8, config.hidden_size) for name in ("input_values", "decoder_input_values")}
    return {**states, "attention_mask": torch.ones(2, 8).long()}


# By model type or class.
SOUNDS: dict[str, Callable[[nn.Module], Batch]] = {
    "MusicgenForCausalLM": _codes,
    "MusicgenModel": _codes,
    "MusicgenForConditionalGeneration": _prompted,
    "MusicgenMelodyForCausalLM": _codes,
    "MusicgenMelodyModel": _codes,
    "MusicgenMelodyForConditionalGeneration": _prompted,
    "fastspeech2_conformer": _read_aloud,
    "fastspeech2_conformer_with_hifigan": _read_aloud,
    "SpeechT5ForTextToSpeech": _spoken,
    "SpeechT5Model": _spoken,
}
