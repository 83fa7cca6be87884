"""OneTrainer: the lines that patches/onetrainer.patch adds to its `create_optimizer`, with its pins."""

import textwrap
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

import hf_lowprec

PATCH = (Path(__file__).parent / "patches" / "onetrainer.patch").read_text()
added = "\n".join(line[1:] for line in PATCH.splitlines() if line.startswith("+"))
LINES = textwrap.dedent(added[added.index("            import hf_lowprec") : added.index("            )\n") + 14])


def created(model: nn.Module) -> torch.optim.Optimizer:
    names = {
        "parameters": [{"name": "unet", "params": list(model.parameters()), "lr": 1e-6, "initial_lr": 1e-6}],
        "config": SimpleNamespace(learning_rate=1e-6),
        "optimizer_config": SimpleNamespace(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2),
    }
    exec(LINES, names)
    return names["optimizer"]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, torch.Tensor]:
    """Train as its `GenericTrainer` does, and return the FP32 weights."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for _ in range(steps):
        model(inputs).float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    return {name: value.clone() for name, value in hf_lowprec.fp32_state_dict(model, optimizer).items()}


torch.manual_seed(0)
inputs = torch.randn(8, 16, dtype=torch.bfloat16)
model, resumed = (nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)).bfloat16() for _ in range(2))
optimizer = created(model)
first = train(model, optimizer, 1)
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "saved.pt")
last = train(model, optimizer, 3)
assert isinstance(optimizer, hf_lowprec.AdamW) and optimizer.param_groups[0]["rounding"] == "split"
assert all((last[name] != value).float().mean() > 0.9 for name, value in first.items())
saved = torch.load("saved.pt")
resumed.load_state_dict(saved["model"])
optimizer = created(resumed)
optimizer.load_state_dict(saved["optimizer"])
assert all(torch.equal(value, last[name]) for name, value in train(resumed, optimizer, 3).items())
