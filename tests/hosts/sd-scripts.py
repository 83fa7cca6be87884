"""sd-scripts: what `--optimizer_type hf_lowprec.AdamW --optimizer_args "rounding='split'"` does, with `--full_bf16`."""

import ast
import importlib

import torch
from accelerate import Accelerator
from diffusers import UNet2DConditionModel

OPTIMIZER_TYPE = "hf_lowprec.AdamW"
OPTIMIZER_ARGS = ["rounding='split'", "weight_decay=0.01", "betas=(0.9, 0.99)"]

torch.manual_seed(0)
model = UNet2DConditionModel(
    sample_size=8,
    block_out_channels=(32, 64),
    layers_per_block=1,
    cross_attention_dim=32,
    norm_num_groups=8,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
).to(torch.bfloat16)
module, _, name = OPTIMIZER_TYPE.rpartition(".")
options = {key: ast.literal_eval(value) for key, value in (word.split("=") for word in OPTIMIZER_ARGS)}
groups = [{"params": list(model.parameters()), "lr": 1e-6}]
optimizer = getattr(importlib.import_module(module), name)(groups, lr=1e-6, **options)
schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)

accelerator = Accelerator(cpu=True, mixed_precision="bf16")
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)


def train(steps: int) -> None:
    for _ in range(steps):
        with accelerator.accumulate(model):
            latents, words = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 32)
            with accelerator.autocast():
                predicted = model(latents.bfloat16(), torch.randint(0, 1000, (2,)), words.bfloat16()).sample
            accelerator.backward((predicted.float() - torch.randn(2, 4, 8, 8)).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)


def exact() -> dict[str, torch.Tensor]:
    values = importlib.import_module("hf_lowprec").fp32_state_dict(accelerator.unwrap_model(model), optimizer)
    return {name: value.clone() for name, value in values.items()}


train(1)
first = exact()
train(2)
last = exact()
moved = torch.cat([(last[name] != value).flatten() for name, value in first.items()]).float().mean()
assert moved > 0.9, moved  # at 1e-6, weights rounded to nearest would stay
accelerator.save_state("state")
train(1)
accelerator.load_state("state")
assert all(torch.equal(value, last[name]) for name, value in exact().items())
print(f"{moved:.1%} of the weights have moved")
