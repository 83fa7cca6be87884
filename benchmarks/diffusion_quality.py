"""Measure how far from FP32 each variant of training a small diffusion transformer ends, by timestep.

diffusers' DiT learns to denoise images of 16 × 16 pixels, by flow matching: first circles and squares, from random
weights; then FP32's result is fine-tuned on triangles and crosses. The seed sets the first weights, the images, the
noise and the timesteps; within a seed all variants share them, so differences from FP32 are paired. Held-out images,
their noise and their timesteps are the same for all seeds. FP32 trains a second time, from first weights that each
differ by a thousandth: two runs that begin with slightly different weights end apart, whatever their precision.

Results are written after each run. If the file exists, its runs are not repeated: so a stopped run goes on, and a run
with further variants trains only those. Needs diffusers.

    OMP_NUM_THREADS=1 python benchmarks/diffusion_quality.py [--output FILE.json] [--seeds 10] [--variants fp32,split]
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import hf_lowprec

RESULTS = Path(__file__).parent / "results"
SIDE, SHAPES, BATCH, HELD_OUT, BUCKETS = 16, ("circle", "square", "triangle", "cross"), 32, 512, 4


@dataclass(frozen=True)
class Stage:
    """A part of training.

    Attributes:
        labels: the shapes in its images, as numbers in `SHAPES`.
        steps: of the optimizer.
        rate: the highest learning rate with AdamW.
    """

    labels: tuple[int, ...]
    steps: int
    rate: float


STAGES = {"pretraining": Stage((0, 1), 600, 1e-3), "fine-tuning": Stage((2, 3), 300, 1e-4)}


@dataclass(frozen=True)
class Variant:
    """A variant of training.

    Attributes:
        label: its name in the table.
        optimizer: takes parameters, `lr`, `weight_decay` and `options`.
        options: further arguments of the optimizer.
        fp32: the name of the variant that it is compared with; its own if it trains in FP32.
        prepare: casts the FP32 model in place.
        rate_factor: its learning rates relative to AdamW's.
        autocast: whether the model is called under autocast to BF16.
    """

    label: str
    optimizer: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    fp32: str = "fp32"
    prepare: Callable[[nn.Module], object] = hf_lowprec.cast_model
    rate_factor: float = 1.0
    autocast: bool = False


def in_fp32(model: nn.Module) -> None:
    """Leave the model as it is."""


def in_fp32_from_changed_weights(model: nn.Module) -> None:
    """Change each weight by about a thousandth."""
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 + 1e-3 * torch.randn_like(param))


def in_bf16(model: nn.Module) -> None:
    """Cast everything."""
    model.to(torch.bfloat16)


def for_split(model: nn.Module) -> None:
    """Cast the model; the optimizer starts from its FP32 weights."""
    hf_lowprec.cast_model(model, keep_low_bits=True)


# torch's Adafactor multiplies rates by the RMS of a parameter.
ADAFACTOR = {"fp32": "adafactor-fp32", "rate_factor": 30.0}
SPLIT, STOCHASTIC, IN_8_BITS = {"rounding": "split"}, {"rounding": "stochastic"}, {"state_dtype": "int8"}
VARIANTS = {
    "fp32": Variant("FP32 AdamW", torch.optim.AdamW, prepare=in_fp32),
    "fp32-beside": Variant("FP32, weights changed by 0.1%", torch.optim.AdamW, prepare=in_fp32_from_changed_weights),
    "autocast": Variant("FP32 weights, autocast", torch.optim.AdamW, prepare=in_fp32, autocast=True),
    "nearest": Variant("BF16 nearest", torch.optim.AdamW, prepare=in_bf16),
    "split": Variant("BF16 split", hf_lowprec.AdamW, SPLIT, prepare=for_split),
    "split-8bit": Variant("BF16 split, 8-bit states", hf_lowprec.AdamW, SPLIT | IN_8_BITS, prepare=for_split),
    "sr": Variant("BF16 stochastic", hf_lowprec.AdamW, STOCHASTIC),
    "sr-8bit": Variant("BF16 stochastic, 8-bit states", hf_lowprec.AdamW, STOCHASTIC | IN_8_BITS),
    "adafactor-fp32": Variant("FP32 Adafactor", torch.optim.Adafactor, prepare=in_fp32, **ADAFACTOR),
    "adafactor-split": Variant("BF16 Adafactor, split", hf_lowprec.Adafactor, SPLIT, prepare=for_split, **ADAFACTOR),
    "adafactor-sr": Variant("BF16 Adafactor, stochastic", hf_lowprec.Adafactor, STOCHASTIC, **ADAFACTOR),
}


def images(labels: Tensor, generator: torch.Generator) -> Tensor:
    """One shape of a random colour, size and place on a background of another colour, for each label; in [-1, 1]."""
    count = len(labels)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    pixels = torch.arange(SIDE).float()
    size = uniform(3, 6, 1, 1)
    x, y = (pixels.view(axis) - uniform(6, 10, 1, 1) for axis in ((1, 1, SIDE), (1, SIDE, 1)))
    near, far = torch.minimum(x.abs(), y.abs()), torch.maximum(x.abs(), y.abs())
    masks = (
        x.square() + y.square() < size.square(),
        far < size,
        (2 * x.abs() < size + y) & (y < size),
        (near < size / 3) & (far < size),
    )
    mask = torch.stack([each.expand(count, SIDE, SIDE) for each in masks], 1)[torch.arange(count), labels].unsqueeze(1)
    colour, background = uniform(-1, 1, 3, 1, 1), uniform(-1, 1, 3, 1, 1)
    return torch.where(mask, colour, background)


def batch(stage: Stage, steps: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """The arguments of the model, and the velocity that it is to predict."""
    labels = torch.tensor(stage.labels)[torch.randint(len(stage.labels), steps.shape, generator=generator)]
    clean = images(labels, generator)
    noise = torch.randn(clean.shape, generator=generator)
    share = ((steps + 1) / 1000).view(-1, 1, 1, 1)
    noisy = (1 - share) * clean + share * noise
    return {"hidden_states": noisy, "timestep": steps, "class_labels": labels}, noise - clean


def predicted(model: nn.Module, arguments: dict[str, Tensor], autocast: bool = False) -> Tensor:
    """The model's prediction, in FP32. Pixels are rounded to the dtype of its layers, as training scripts do."""
    dtype = model.proj_out_2.weight.dtype
    pixels = arguments["hidden_states"].to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return model(**arguments | {"hidden_states": pixels}, return_dict=False)[0].float()


def transformer(seed: int) -> nn.Module:
    """A DiT of 0.4 million parameters."""
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(seed)
    return DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=3,
        num_layers=4,
        sample_size=SIDE,
        patch_size=4,
        num_embeds_ada_norm=len(SHAPES),
    )


@torch.no_grad()
def losses_by_timestep(model: nn.Module, stage: Stage, autocast: bool = False) -> list[float]:
    """The loss on held-out images with fixed noise, for timesteps of each quarter of the schedule."""
    generator = torch.Generator().manual_seed(1_000_000)
    found, width = [], 1000 // BUCKETS
    for first in range(0, 1000, width):
        steps = first + torch.randint(width, (HELD_OUT,), generator=generator)
        arguments, velocity = batch(stage, steps, generator)
        found.append(mse_loss(predicted(model, arguments, autocast), velocity).item())
    return found


def trained(variant: Variant, model: nn.Module, stage: Stage, seed: int) -> list[float]:
    """Train an FP32 model in place, as the variant does; return its losses by timestep."""
    variant.prepare(model)
    rate = stage.rate * variant.rate_factor
    optimizer = variant.optimizer(model.parameters(), lr=rate, weight_decay=0.01, **variant.options)
    warmup = stage.steps // 20
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / stage.steps)),
    )
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # DiT leaves out labels at random
    model.train()
    for _ in range(stage.steps):
        arguments, velocity = batch(stage, torch.randint(1000, (BATCH,), generator=generator), generator)
        mse_loss(predicted(model, arguments, variant.autocast), velocity).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses_by_timestep(model.eval(), stage, variant.autocast)


def run_seed(seed: int, variants: Sequence[str], done: Callable[[str, dict[str, list[float]]], None]) -> None:
    """Train the variants in both stages; hand the losses by timestep of each to `done`."""
    pretraining, fine_tuning = STAGES.values()
    base = transformer(seed)
    base_losses = trained(VARIANTS["fp32"], base, pretraining, seed)
    for name in variants:
        variant = VARIANTS[name]
        first = base_losses if name == "fp32" else trained(variant, transformer(seed), pretraining, seed)
        model = transformer(seed)
        model.load_state_dict(base.state_dict())
        losses = {"before": losses_by_timestep(model.eval(), fine_tuning)}
        done(name, {"pretraining": first, "fine-tuning": trained(variant, model, fine_tuning, seed), **losses})


def table(result: dict[str, Any]) -> str:
    """The results in Markdown: FP32's losses, and the paired differences of the others from them."""
    width = 1000 // BUCKETS
    spans = " | ".join(f"timesteps {first} to {first + width - 1}" for first in range(0, 1000, width))
    lines = [f"| stage | variant | all timesteps | {spans} |", f"| --- | --- |{' ---: |' * (1 + BUCKETS)}"]
    for stage in STAGES:
        for name, by_seed in result["losses"].items():
            variant = VARIANTS[name]
            rows = []
            for seed, losses in by_seed.items():
                reference = result["losses"][variant.fp32][seed][stage]
                zeros = [0.0] * BUCKETS if name == variant.fp32 else reference
                rows.append([loss - zero for loss, zero in zip(losses[stage], zeros, strict=True)])
            columns = [[mean(row) for row in rows], *map(list, zip(*rows, strict=True))]
            form = ".4f" if name == variant.fp32 else "+.4f"
            cells = (f"{mean(column):{form}} ± {stdev(column):.4f}" for column in columns)
            lines.append(f"| {stage} | {variant.label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="separated by commas")
    today = RESULTS / f"diffusion-quality-{datetime.date.today().isoformat()}.json"
    parser.add_argument("--output", type=Path, default=today, help=f"default: {today.name}")
    options = parser.parse_args(words)
    settings = {name: list(asdict(stage).values()) for name, stage in STAGES.items()} | {"batch": BATCH}
    versions = {"torch": torch.__version__, "diffusers": version("diffusers")}
    result: dict[str, Any] = {"settings": settings, "versions": versions, "losses": {}}
    if options.output.exists():
        result = json.loads(options.output.read_text(encoding="utf-8"))
        if result["settings"] != json.loads(json.dumps(settings)):
            raise SystemExit(f"{options.output} has the results of other settings: {result['settings']}")

    def done(name: str, losses: dict[str, list[float]]) -> None:
        result["losses"].setdefault(name, {})[str(seed)] = losses
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        means = ", ".join(f"{stage} {mean(values):.4f}" for stage, values in losses.items())
        print(f"seed {seed}, {name}: {means}", flush=True)

    for seed in range(options.seeds):
        wanted = [n for n in options.variants.split(",") if str(seed) not in result["losses"].get(n, {})]
        if wanted:
            run_seed(seed, wanted, done)
    print(table(result))


if __name__ == "__main__":
    main()
