"""Tiny vision and speech models with a batch for each: models whose inputs are floating."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from tests.support.models import tiny_models

UNIT = 2.0**-8  # BF16 has 8 significant bits, so rounding to nearest errs by at most this much of the value
Built = tuple[nn.Module, dict[str, torch.Tensor]]

SPEECH: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": (8, 8),
    "conv_kernel": (4, 4),
    "conv_stride": (4, 4),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
}


def image_classifier(name: str, **config: Any) -> Callable[[], Built]:
    def build() -> Built:
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForImageClassification")(
            getattr(transformers, f"{name}Config")(num_labels=3, **config)
        )
        return model, {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.arange(4) % 3}

    return build


def wav2vec2(kind: str) -> Callable[[], Built]:
    def build() -> Built:
        torch.manual_seed(0)
        config = transformers.Wav2Vec2Config(**SPEECH, vocab_size=8, num_labels=3, classifier_proj_size=16)
        model = getattr(transformers, f"Wav2Vec2For{kind}")(config)
        labels = torch.tensor([[1, 2, 3], [4, 5, 6]]) if kind == "CTC" else torch.tensor([0, 2])
        return model, {"input_values": torch.randn(2, 400), "labels": labels}

    return build


def whisper() -> Built:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        **{"vocab_size": 32, "num_mel_bins": 8, "d_model": 16, "max_source_positions": 20, "max_target_positions": 24},
        **{"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
        **{"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1},
        **{"eos_token_id": 2, "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None},
    )
    labels = torch.randint(4, 32, (2, 6))
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(2, 8, 40),
        "labels": labels,
    }


MODELS: dict[str, Callable[[], Built]] = {
    "resnet": image_classifier("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    "convnext": image_classifier("ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    "swin": image_classifier(
        "Swin", image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4
    ),
    "beit": image_classifier(
        "Beit",
        image_size=32,
        patch_size=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    ),
    "wav2vec2-ctc": wav2vec2("CTC"),
    "wav2vec2-classification": wav2vec2("SequenceClassification"),
    "whisper": whisper,
    "vit": tiny_models.vit,
}
