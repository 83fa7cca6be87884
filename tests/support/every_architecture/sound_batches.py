"""Batches of sound and of its codes, for model types and classes whose argument names do not suffice."""

from collections.abc import Callable
from typing import Any

import torch

from tests.support.every_architecture.tiny_labels import Batch, find


def _codes(config: Any, name: str) -> Batch:
    return {"input_ids": torch.randint(0, 32, (2 * config.num_codebooks, 6))}


def _prompted(config: Any, name: str) -> Batch:
    tokens = torch.randint(64, 96, (2, 12))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if config.model_type == "musicgen_melody":
        batch["input_features"] = torch.randn(2, 5, config.num_chroma)
    return {**batch, "labels": torch.randint(3, 32, (2, 6, config.decoder.num_codebooks))}


def _read_aloud(config: Any, name: str) -> Batch:
    config = getattr(config, "model_config", config)
    tokens, frames = torch.randint(8, 64, (2, 6)), 2
    return {
        "input_ids": tokens,
        "spectrogram_labels": torch.randn(2, 6 * frames, config.num_mel_bins),
        "duration_labels": torch.full((2, 6), frames),
        "pitch_labels": torch.randn(2, 6, 1),
        "energy_labels": torch.randn(2, 6, 1),
    }


def _spoken(config: Any, name: str) -> Batch:
    if "TextToSpeech" in name:
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


def _features(*, width: str, times: int = 1, frames: int = 64, mask: str = "") -> Callable[[Any, str], Batch]:
    """Frames as wide as that field of the config says, so many times."""

    def make(config: Any, name: str) -> Batch:
        batch: Batch = {"input_features": torch.randn(2, frames, times * find(config, width))}
        batch |= {mask: torch.ones(2, frames).long()} if mask else {}
        return {**batch, "labels": torch.randint(64, 96, (2, 5))} if "ForCTC" in name else batch

    return make


def _mel(config: Any, name: str) -> Batch:
    if config.model_type == "gemma3n_audio":
        return {"audio_mel": torch.randn(2, 64, config.input_feat_size), "audio_mel_mask": torch.zeros(2, 64).bool()}
    mel = config.subsampling_conv_channels[0]
    return {"input_features": torch.randn(2, 64, mel), "attention_mask": torch.ones(2, 64).bool()}


def _windows(config: Any, name: str) -> Batch:
    frames = 4 * config.n_window
    return {
        "input_features": torch.randn(2, config.num_mel_bins, frames),
        "input_features_mask": torch.ones(2, frames).long(),
    }


def _waves(config: Any, name: str) -> Batch:
    """Of a length that many strides divide; with a text, if the model is one of both."""
    if config.model_type == "muse_spark_audio":
        return {"input_values": torch.randn(2, 1920)}
    if name == "VibeVoiceAcousticTokenizerEncoderModel":
        return {"hidden_states": torch.randn(2, 1, 6400)}
    batch: Batch = {"input_values": torch.randn(2, 1, 5760)}
    return {**batch, "input_ids": torch.randint(64, 96, (2, 12))} if config.model_type == "pe_audio" else batch


def _waves_and_features(config: Any, name: str) -> Batch:
    width = find(config, "feature_projection_input_dim")
    return {"input_values": torch.randn(2, 1, 2560), "input_features": torch.randn(2, 8, width)}


def _latents(config: Any, name: str) -> Batch:
    name = "hidden_states" if config.model_type.startswith("vibevoice") else "latents"
    return {name: torch.randn(2, config.hidden_size, 4)}


def _alongside(config: Any, name: str) -> Batch:
    """As many frames as the text has tokens, once they are convolved and joined."""
    tokens = torch.randint(64, 96, (2, 12))
    frames = torch.randn(2, find(config, "num_mel_bins"), 96)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "input_features": frames}
    return {**batch, "labels": tokens} if "For" in name else batch


def _states(config: Any, name: str) -> Batch:
    return {"inputs_embeds": torch.randn(2, 8, config.hidden_size)}


def _text_and_codes(config: Any, name: str) -> Batch:
    tokens = torch.randint(3, 32, (2, 6, config.num_codebooks + 1))
    return {"input_ids": tokens, "labels": tokens[..., 0]} if "For" in name else {"input_ids": tokens}


# By model type or class.
SOUNDS: dict[str, Callable[[Any, str], Batch]] = {
    **{f"Musicgen{kind}": _codes for kind in ("ForCausalLM", "Model", "MelodyForCausalLM", "MelodyModel")},
    **{f"Musicgen{kind}ForConditionalGeneration": _prompted for kind in ("", "Melody")},
    **dict.fromkeys(("fastspeech2_conformer", "fastspeech2_conformer_with_hifigan"), _read_aloud),
    **dict.fromkeys(("SpeechT5ForTextToSpeech", "SpeechT5Model"), _spoken),
    **dict.fromkeys(("gemma3n_audio", "gemma4_audio"), _mel),
    **{f"granite_speech5_{kind}": _features(width="num_mel_bins", times=4) for kind in ("ctc", "encoder")},
    "fun_asr_nano_encoder": _features(width="num_mel_bins", times=7, mask="input_features_mask"),
    "qwen3_asr_encoder": _windows,
    **dict.fromkeys(("muse_spark_audio", "pe_audio", "pe_audio_encoder"), _waves),
    **{f"vibevoice_acoustic_tokenizer{kind}": _waves for kind in ("", "_encoder")},
    "voxtral_realtime": _alongside,
    **dict.fromkeys(("xcodec2", "neucodec"), _waves_and_features),
    "mimi_decoder": _latents,
    **{f"{kind}_tokenizer_decoder": _latents for kind in ("pocket_tts_audio", "vibevoice_acoustic")},
    "nemotron3_5_transcribe_word_timestamp": _states,
    "kyutai_speech_to_text": _text_and_codes,
}
