"""diffusers: twelve models against FP32; the loop of its scripts, with `EMAModel`; our page and our example."""

import runpy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from diffusers import (
    AutoencoderKL,
    AutoencoderKLTemporalDecoder,
    DDPMScheduler,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    MiniMaxMusic3Transformer1DModel,
    PixArtTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from diffusers.training_utils import EMAModel
from fp32_comparison import check_one_step, compare_with_fp32
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import hf_lowprec
from tests.support.docs.pages import DOCS, ROOT, blocks

ROWS, WORDS = 4, 5
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
BLOCKS = {"norm_num_groups": 8, "layers_per_block": 1}
LATENTS = {"in_channels": 4, "out_channels": 4, "num_layers": 2, **HEADS}
FLUX = {"in_channels": 16, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 32, **HEADS}


def noise(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape)


def integers() -> dict[str, Tensor]:
    return {"timestep": torch.randint(0, 1000, (ROWS,))}


def fractions() -> dict[str, Tensor]:
    return {"timestep": torch.rand(ROWS)}


def given(*shape: int, words: int, width: int = 0, guidance: float = 0, masked: bool = False) -> dict[str, Tensor]:
    """What most models are given: hidden states of a shape, and those of words.

    Some are given a mask of the words, pooled projections of a width, or a guidance as well.
    """
    batch = {"hidden_states": noise(*shape), "encoder_hidden_states": noise(WORDS, words)}
    if masked:
        batch["encoder_attention_mask"] = torch.ones(ROWS, WORDS)
    if width:
        batch["pooled_projections"] = noise(width)
    if guidance:
        batch["guidance"] = torch.full((ROWS,), guidance)
    return batch


def models() -> Iterator[tuple[nn.Module, Callable[[], dict[str, Any]]]]:
    """Each model with what makes a batch for it."""
    yield unet(), lambda: {"sample": noise(4, 8, 8), "encoder_hidden_states": noise(WORDS, 32), **integers()}
    down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
    model = AutoencoderKL(block_out_channels=(16, 32), down_block_types=down, up_block_types=up, **BLOCKS)
    yield model, lambda: {"sample": noise(3, 16, 16)}
    # Takes the dtype of a norm's weight for that of its activations.
    model = AutoencoderKLTemporalDecoder(block_out_channels=(32, 32), down_block_types=down, layers_per_block=1)
    yield model, lambda: {"sample": noise(3, 16, 16), "num_frames": 2}
    sizes = {"cross_attention_dim": 32, "caption_channels": 24, "sample_size": 8, "use_additional_conditions": False}
    yield PixArtTransformer2DModel(**LATENTS, **sizes), lambda: given(4, 8, 8, words=24, masked=True) | integers()
    sizes = {"sample_size": 8, "joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 16}
    model = SD3Transformer2DModel(**LATENTS, **sizes, pos_embed_max_size=16, qk_norm="rms_norm")
    yield model, lambda: given(4, 8, 8, words=32, width=16) | integers()
    model = FluxTransformer2DModel(**FLUX, pooled_projection_dim=16, guidance_embeds=True, axes_dims_rope=(4, 6, 6))
    positions = {
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
        "txt_ids": torch.zeros(WORDS, 3),
    }
    yield model, lambda: given(16, 16, words=32, width=16, guidance=1.0) | positions | fractions()
    model = Flux2Transformer2DModel(**FLUX, timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4))
    positions_2 = {
        "img_ids": torch.cartesian_prod(*map(torch.arange, (1, 4, 4, 1))).expand(ROWS, 16, 4),
        "txt_ids": torch.cartesian_prod(*map(torch.arange, (1, 1, 1, WORDS))).expand(ROWS, WORDS, 4),
    }
    yield model, lambda: given(16, 16, words=32, guidance=3.5) | positions_2 | fractions()
    sizes = {"in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 32}
    images = {"encoder_hidden_states_mask": torch.ones(ROWS, WORDS, dtype=torch.long), "img_shapes": [(1, 4, 4)] * ROWS}
    model = QwenImageTransformer2DModel(**sizes, axes_dims_rope=(4, 6, 6), **HEADS)
    yield model, lambda: given(16, 16, words=32) | images | fractions()
    model = WanTransformer3DModel(**LATENTS, text_dim=24, freq_dim=32, ffn_dim=64)
    yield model, lambda: given(4, 2, 8, 8, words=24) | integers()
    sizes = {"in_channels": 8, "out_channels": 8, "cross_attention_dim": 32, "num_layers": 2, "caption_channels": 24}
    video = {"num_frames": 2, "height": 4, "width": 4}
    model = LTXVideoTransformer3DModel(**sizes, **HEADS)
    yield model, lambda: given(32, 8, words=24, masked=True) | video | integers()
    sizes = {"num_single_layers": 1, "num_refiner_layers": 1, "text_embed_dim": 24, "pooled_projection_dim": 16}
    model = HunyuanVideoTransformer3DModel(**LATENTS | {"num_layers": 1}, **sizes, rope_axes_dim=(4, 6, 6))
    yield model, lambda: given(4, 2, 8, 8, words=24, width=16, guidance=6000.0, masked=True) | integers()
    # Has trained frequencies.
    sizes = {"in_channels": 8, "condition_dim": 16, "num_layers": 2, "ff_inner_dim": 32, "rotary_dim": 4}
    model = MiniMaxMusic3Transformer1DModel(**sizes, fourier_embedding_dim=8, **HEADS)
    yield model, lambda: {"hidden_states": noise(8, 24), "encoder_hidden_states": noise(24, 16), **fractions()}


def unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


def loss_of(batch: dict[str, Any]) -> Callable[[nn.Module], Tensor]:
    """The loss of a batch: the model is to predict other noise or, if it is an autoencoder, what it is given."""
    target = torch.randn_like(next(iter(batch.values()))) if "timestep" in batch else batch["sample"]
    return lambda model: mse_loss(model(**batch, return_dict=False)[0].float(), target)


def train_like_the_scripts() -> None:
    """The lines of train_text_to_image.py; those that guides/hosts.md changes have a comment."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    scheduler = DDPMScheduler()
    model = unet()
    # The decay of long training; by default, it grows to that from 0.
    decay = {"decay": 0.9999, "min_decay": 0.9999}
    ema = EMAModel(model.parameters(), model_cls=UNet2DConditionModel, model_config=model.config, **decay)
    hf_lowprec.cast_model(model)  # added, after EMAModel
    rounded = EMAModel(model.parameters(), **decay)
    optimizer_cls = hf_lowprec.AdamW  # was torch.optim.AdamW
    optimizer = optimizer_cls(model.parameters(), lr=1e-5, weight_decay=1e-2, rounding="split")
    hf_lowprec.prepare_accelerator(accelerator)  # added
    model, optimizer = accelerator.prepare(model, optimizer)
    first = {}
    for _ in range(100):
        with accelerator.accumulate(model):
            latents, target, steps = noise(4, 8, 8), noise(4, 8, 8), integers()["timestep"]
            noisy = scheduler.add_noise(latents, target, steps)
            prediction = model(noisy, steps, noise(WORDS, 32), return_dict=False)[0]
            accelerator.backward(mse_loss(prediction.float(), target))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            exact = hf_lowprec.fp32_state_dict(accelerator.unwrap_model(model), optimizer)
            ema.step([nn.Parameter(exact[name]) for name, _ in model.named_parameters()])  # was model.parameters()
            rounded.step(model.parameters())
            for one in (ema, rounded):  # the first step copies
                first.setdefault(one, [average.clone() for average in one.shadow_params])
    moved = [
        torch.cat([(a != b).flatten() for a, b in zip(one.shadow_params, first[one], strict=True)]).float().mean()
        for one in (ema, rounded)
    ]
    print("shares of averages that moved:", moved)
    assert moved[0] > 0.9 > 2 * moved[1], moved
    ema.store(model.parameters())
    ema.copy_to(model.parameters())
    ema.restore(model.parameters())
    accelerator.save_state("state")
    accelerator.load_state("state")
    exact = hf_lowprec.fp32_state_dict(accelerator.unwrap_model(model), optimizer)
    model = UNet2DConditionModel.from_config(model.config)  # added
    model.load_state_dict(exact)  # added
    model.save_pretrained("final")
    ema.save_pretrained("ema")


torch.manual_seed(0)
# The limit is what autocast is off by at most where it does not round timesteps: with AutoencoderKLTemporalDecoder.
for model, batch in models():
    check_one_step(model, batch() | {"return_dict": False})
    compare_with_fp32(type(model).__name__, model, [loss_of(batch()) for _ in range(4)] * 6, limit=0.07)
train_like_the_scripts()
names: dict[str, Any] = {}
for block in blocks(DOCS / "guides" / "diffusion.md"):
    if block.language == "python":
        exec(block.text, names)
example = ROOT / "examples" / "diffusion.py"
for kind in ("transformer", "unet"):
    sys.argv = [example.name, "--kind", kind, "--output", kind]
    runpy.run_path(str(example), run_name="__main__")
