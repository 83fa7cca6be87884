"""timm: a ViT, a ResNet and a ConvNeXt, and torchvision's ResNet, against FP32; `create_optimizer_v2`, `ModelEmaV3`."""

import cpu_torchvision  # noqa: F401
import timm
import torch
from fp32_comparison import check_one_step, compare_with_fp32
from timm.optim import OptimInfo, create_optimizer_v2
from timm.optim._optim_factory import default_registry
from timm.utils import ModelEmaV3
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torchvision.models.resnet import BasicBlock, ResNet

import hf_lowprec

default_registry.register(OptimInfo("bf16split", "hf_lowprec.AdamW", has_betas=True, defaults={"rounding": "split"}))
MODELS = {
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
    "resnet10t": {"stem_width": 8, "channels": (8, 16, 16, 32)},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32)},
}


def optimizer_of(model: torch.nn.Module, split: bool) -> torch.optim.Optimizer:
    return create_optimizer_v2(model, opt="bf16split" if split else "adamw", lr=1e-4, weight_decay=0.05)


def loss_of(images: torch.Tensor, labels: torch.Tensor):
    return lambda model: cross_entropy(model(images).float(), labels)


torch.manual_seed(0)
built = {name: timm.create_model(name, pretrained=False, num_classes=10, **sizes) for name, sizes in MODELS.items()}
built["resnet of torchvision"] = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)
for name, model in built.items():
    check_one_step(model, {"x": torch.randn(8, 3, 32, 32)})
    batches = [loss_of(torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))) for _ in range(4)]
    compare_with_fp32(name, model, batches * 6, optimizer_of)

model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **MODELS["vit_tiny_patch16_224"])
hf_lowprec.cast_model(model)
optimizer = create_optimizer_v2(model, opt="bf16split", lr=1e-4)
assert isinstance(optimizer, hf_lowprec.AdamW) and {group["rounding"] for group in optimizer.param_groups} == {"split"}
averages = {"ModelEmaV3": ModelEmaV3(model, decay=0.999)}
averages["AveragedModel"] = hf_lowprec.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
averages["AveragedModel"].update_parameters(model, optimizer)
first = {name: [param.clone() for param in average.module.parameters()] for name, average in averages.items()}
for step in range(20):
    batches[step % 4](model).backward()
    optimizer.step()
    optimizer.zero_grad()
    averages["ModelEmaV3"].update(model)
    averages["AveragedModel"].update_parameters(model, optimizer)
for name, average in averages.items():
    pairs = zip(average.module.parameters(), first[name], strict=True)
    moved = torch.cat([(now != then).flatten() for now, then in pairs]).float().mean()
    print(f"{name}: {moved:.1%} of the averages moved")
    assert (moved > 0.9) == (name == "AveragedModel"), moved
