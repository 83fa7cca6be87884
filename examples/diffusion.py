"""Train a diffusion transformer or UNet of diffusers in pure BF16: the whole model, with averaged weights, or LoRA.

    python examples/diffusion.py --kind unet
    python examples/diffusion.py --lora --model facebook/DiT-XL-2-256 --images my-images --size 256

By default, tiny models learn to draw noisy stripes, within a minute on a CPU. `--images` names a folder that has a
folder of images for each class. Needs `pip install diffusers`, and `peft` for LoRA.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, DiTTransformer2DModel, UNet2DModel
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import get_ema_multi_avg_fn

import hf_lowprec

CLASSES = {"transformer": DiTTransformer2DModel, "unet": UNet2DModel}


def tiny(kind: str, size: int) -> nn.Module:
    """A model of 0.1 million parameters, or a few more."""
    if kind == "transformer":
        heads = {"num_attention_heads": 4, "attention_head_dim": 16}
        return DiTTransformer2DModel(**heads, in_channels=3, num_layers=2, sample_size=size, num_embeds_ada_norm=2)
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8, "attention_head_dim": 8}
    return UNet2DModel(sample_size=size, num_class_embeds=2, **sizes, **blocks)


def stripes(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Noisy stripes in [-1, 1], and their classes: 0 where they are horizontal, 1 where vertical."""
    classes = torch.randint(2, (count,))
    lines = torch.sin(0.8 * torch.arange(size) + 6.3 * torch.rand(count, 3, 1, 1)).expand(-1, -1, size, -1)
    images = torch.where(classes.view(-1, 1, 1, 1) == 1, lines, lines.transpose(2, 3))
    return (0.7 * images + 0.1 * torch.randn(images.shape)).clamp(-1, 1), classes


def photographs(folder: str, size: int) -> tuple[Tensor, Tensor]:
    """The images of a folder in [-1, 1], and their classes."""
    import numpy as np
    from datasets import load_dataset

    rows = load_dataset("imagefolder", data_dir=folder, split="train")
    pixels = np.stack([np.asarray(row["image"].convert("RGB").resize((size, size))) for row in rows])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1, torch.tensor([row["label"] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=list(CLASSES), default="transformer")
    parser.add_argument("--model", help="a pipeline with such a model: hub name or folder")
    parser.add_argument("--images", help="a folder with a folder of images for each class")
    parser.add_argument("--size", type=int, default=16, help="of images, in pixels")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 16 only")
    parser.add_argument("--rounding", choices=["split", "kahan", "stochastic", "nearest"], default="split")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("out"))
    options = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator()
    images, classes = photographs(options.images, options.size) if options.images else stripes(512, options.size)
    if options.model is None:
        model, schedule = tiny(options.kind, options.size), DDPMScheduler()
    else:
        model = CLASSES[options.kind].from_pretrained(options.model, subfolder=options.kind)
        schedule = DDPMScheduler.from_pretrained(options.model, subfolder="scheduler")
        if options.kind == "transformer":  # images become latents once; the VAE does not train
            vae = AutoencoderKL.from_pretrained(options.model, subfolder="vae").to(accelerator.device)
            with torch.no_grad():
                rows = [vae.encode(row.to(accelerator.device)).latent_dist.sample() for row in images.split(8)]
            images = torch.cat(rows).cpu() * vae.config.scaling_factor
    takes_classes = options.kind == "transformer" or model.config.num_class_embeds

    if options.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=16, lora_alpha=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
        )
    accelerator.print(hf_lowprec.cast_model(model))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = hf_lowprec.AdamW(trained, lr=options.lr, weight_decay=0.01, rounding=options.rounding)
    average = None  # in FP32, of the whole model
    if not options.lora:
        average = hf_lowprec.AveragedModel(model, accelerator.device, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    hf_lowprec.prepare_accelerator(accelerator)  # FP32 sums over ranks, FP32 predictions
    model, optimizer = accelerator.prepare(model, optimizer)

    def loss_of(model: Callable[..., tuple[Tensor, ...]], rows: Tensor) -> Tensor:
        """The loss of predicting the noise in images, or latents, at random timesteps."""
        clean = images[rows].to(accelerator.device)
        noise = torch.randn_like(clean)
        timesteps = torch.randint(schedule.config.num_train_timesteps, (len(rows),), device=clean.device)
        conditions = {"class_labels": classes[rows].to(clean.device)} if takes_classes else {}
        noisy = schedule.add_noise(clean, noise, timesteps)
        predicted = model(noisy, timestep=timesteps, return_dict=False, **conditions)[0]
        return mse_loss(predicted[:, : noise.shape[1]], noise)  # some DiTs predict variances as well

    @torch.no_grad()
    def validation(model: nn.Module) -> float:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return loss_of(model.eval(), torch.arange(0, len(images), 8)).item()

    torch.manual_seed(accelerator.process_index)  # ranks draw different rows
    train = (torch.arange(len(images)) % 8).nonzero().flatten()
    before = validation(model)
    for step in range(options.steps):
        rows = train[torch.randint(len(train), (16,))]
        loss = loss_of(model.train(), rows)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            average.update_parameters(accelerator.unwrap_model(model), optimizer)
        if step % 20 == 0 or step == options.steps - 1:
            accelerator.print(f"step {step:>4}  loss {loss.item():.4f}")
    accelerator.print(f"validation loss {before:.4f} -> {validation(model if average is None else average):.4f}")

    if average is None:  # the adapter in FP32
        hf_lowprec.save_pretrained(accelerator.unwrap_model(model), optimizer, options.output)
    elif accelerator.is_main_process:
        average.module.save_pretrained(options.output)
    accelerator.print(f"written to {options.output}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
