"""Load tiny random models of transformers in BF16, and print a table of how far their outputs are from those in FP32.

Each is loaded with `from_pretrained(dtype=torch.bfloat16)` twice: as it is, and with some modules computed in FP32,
which get their FP32 weights and upcast inputs, and whose outputs are rounded. An error is ‖BF16 − FP32‖ / ‖FP32‖.

    python fp32_modules.py
"""

import tempfile
from functools import partial

import torch
import transformers as hf
from torch.utils._pytree import tree_map_only

COORDINATES = {"bbox", "input_points"}  # inputs that stay in FP32
SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2}
BF16 = torch.bfloat16


def models():
    """Yield models, inputs, the output to compare, and the classes to compute in FP32."""
    torch.manual_seed(0)
    ids = {"input_ids": torch.arange(24).view(2, 12)}
    heads = {"num_attention_heads": 4, "intermediate_size": 128}
    state = "last_hidden_state"

    model = hf.FNetModel(hf.FNetConfig(**SIZES, intermediate_size=128))
    yield model, ids, state, "FNetBasicFourierTransform"

    lengths = {"prediction_length": 4, "context_length": 8, "label_length": 4, "lags_sequence": [1, 2, 3]}
    config = hf.AutoformerConfig(**lengths, num_time_features=1)
    past = {"past_values": torch.rand(2, 11), "past_observed_mask": torch.ones(2, 11)}
    future = {"future_values": torch.rand(2, 4), "future_time_features": torch.rand(2, 4, 1)}
    series = {"past_time_features": torch.rand(2, 11, 1), **past, **future}
    yield hf.AutoformerModel(config), series, state, "AutoformerAttention", "AutoformerValueEmbedding"

    corners = torch.rand(2, 12, 2)
    bbox = {"bbox": torch.cat([corners, corners + 0.1], dim=-1)}
    yield hf.BrosModel(hf.BrosConfig(**SIZES, **heads)), ids | bbox, state, "BrosPositionalEmbedding2D"

    config = hf.xLSTMConfig(**SIZES, num_heads=4, num_blocks=2, chunk_size=8, use_cache=False)
    yield hf.xLSTMModel(config), ids, state, "xLSTMBackend"

    vision = hf.SamVisionConfig(hidden_size=64, output_channels=64, image_size=32, patch_size=8, num_pos_feats=32)
    vision.scale = 1  # as in segment-anything; the default follows the hidden size
    prompts = hf.SamPromptEncoderConfig(hidden_size=64, image_size=1024, patch_size=256)
    decoder = hf.SamMaskDecoderConfig(hidden_size=64, num_attention_heads=4, mlp_dim=128)
    points = {"image_embeddings": torch.randn(1, 64, 4, 4), "input_points": 1024 * torch.rand(1, 1, 50, 2)}
    config = hf.SamConfig(vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=decoder)
    yield hf.SamModel(config), points, "pred_masks", "SamPositionalEmbedding"

    config = hf.MiniMaxM3VLVisionConfig(**{**SIZES, **heads}, image_size=32, patch_size=8)
    patches = {"pixel_values": torch.randn(32, 384), "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}
    yield hf.MiniMaxM3VLVisionModel(config), patches, state, "MiniMaxM3VLVisionRotaryEmbedding"


def computed_in_fp32(forward, *args, **kwargs):
    """Call `forward` with upcast inputs, and round its outputs."""
    upcast = partial(tree_map_only, torch.Tensor, lambda x: x.float() if x.is_floating_point() else x)
    round_ = partial(tree_map_only, torch.Tensor, lambda x: x.to(BF16) if x.is_floating_point() else x)
    return round_(forward(*upcast(args), **upcast(kwargs)))


def in_bf16(model, fp32_classes):
    """A copy of `model`, loaded in BF16, in which modules of these classes compute in FP32."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        copy = type(model).from_pretrained(folder, dtype=BF16).eval()
    for name, module in model.named_modules():
        if type(module).__name__ in fp32_classes:
            replaced = copy.get_submodule(name).float()
            replaced.load_state_dict(module.state_dict())
            replaced.forward = partial(computed_in_fp32, replaced.forward)
    return copy


@torch.no_grad()
def error(model, inputs, output, fp32_classes=()):
    """The relative error in BF16, or the message of the error that is raised."""
    exact = model(**inputs)[output]
    rounded = {
        name: x.to(BF16) if x.is_floating_point() and name not in COORDINATES else x for name, x in inputs.items()
    }
    try:
        found = in_bf16(model, fp32_classes)(**rounded)[output]
    except RuntimeError as raised:
        return f"`{str(raised).partition(',')[0]}`"
    return f"{(found.float() - exact).norm() / exact.norm():.2%}"


def main():
    print("| model | BF16 | with FP32 in | BF16, with FP32 there |\n|---|---|---|---|")
    for model, inputs, output, *fp32_classes in models():
        model.eval()
        stock, kept = error(model, inputs, output), error(model, inputs, output, fp32_classes)
        names = ", ".join(f"`{name}`" for name in fp32_classes)
        print(f"| `{type(model).__name__}` | {stock} | {names} | {kept} |")


if __name__ == "__main__":
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    main()
