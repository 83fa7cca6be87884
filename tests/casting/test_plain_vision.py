"""Vision models written the way timm and torchvision write them, and modules with parametrized weights."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import hf_lowprec
from hf_lowprec.casting import cast_model
from tests.support.models.inspection import BF16, FP32, bits, fp32_names

UNIT = 2.0**-8  # rounding to BF16 errs by at most this much of the value


class BatchNormAct2d(nn.BatchNorm2d):
    """As in timm: a norm that owns the activation after it."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))


class LayerNorm2d(nn.LayerNorm):
    """Over channels, by a functional call with the parameters of its own."""

    def forward(self, input: Tensor) -> Tensor:
        x = input.permute(0, 2, 3, 1)
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class StdConv2d(nn.Conv2d):
    """Standardizes its own weight in every call, with running-free batch norm."""

    def forward(self, input: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = nn.functional.batch_norm(flat, None, None, training=True, eps=1e-6).reshape_as(self.weight)
        return nn.functional.conv2d(input, weight, self.bias, self.stride, self.padding)


class Block(nn.Module):
    """A transformer block of timm: layer scale, relative position bias from a buffer of indices."""

    def __init__(self, n: int, tokens: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(n), nn.LayerNorm(n)
        self.qkv, self.proj = nn.Linear(n, 3 * n), nn.Linear(n, n)
        self.gamma = nn.Parameter(torch.full((n,), 0.1))
        self.relative_position_bias_table = nn.Parameter(torch.randn(2 * tokens - 1) * 0.02)
        place = torch.arange(tokens)
        self.register_buffer("relative_position_index", place[:, None] - place[None] + tokens - 1, persistent=False)
        self.relative_position_index: Tensor
        self.mlp = nn.Sequential(OrderedDict(fc1=nn.Linear(n, 2 * n), act=nn.GELU(), fc2=nn.Linear(2 * n, n)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        bias = self.relative_position_bias_table[self.relative_position_index]
        x = x + self.gamma * self.proj(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 16, 8, 8)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 16) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 17, 16) * 0.02)
        self.blocks = nn.Sequential(Block(16, 17), Block(16, 17))
        self.fc_norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = self.blocks(torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1) + self.pos_embed)
        return self.head(self.fc_norm(x.mean(1)))


class ConvNet(nn.Module):
    """Of torchvision's making: dicts of sequentials, squeeze and excitation, dropped paths, a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(StdConv2d(3, 8, 3, padding=1), BatchNormAct2d(8), nn.Conv2d(8, 8, 3, groups=8))
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.Sigmoid())
        self.norm = LayerNorm2d(8)
        self.classifier = nn.Sequential(nn.Dropout(0.0), nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = self.norm(x * self.squeeze(x))
        return self.classifier(torch.cat((x.mean((2, 3)), x.amax((2, 3))), -1))


@pytest.mark.parametrize("build", [VisionTransformer, ConvNet])
def test_trains(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x, labels = build().eval(), torch.randn(4, 3, 32, 32), torch.arange(4)
    exact = copy.deepcopy(model)
    report = cast_model(model)
    assert not report.warnings
    norms = {n for n, m in model.named_modules() if "Norm" in type(m).__name__}
    assert {name.rpartition(".")[0] for name in fp32_names(model)} == norms == set(report.boundaries)
    out, expected = model(x), exact(x)
    # Some 20 values on the way to a logit are rounded, with independent errors of at most a unit.
    assert out.dtype == BF16 and (out - expected).abs().max() <= 20**0.5 * UNIT * expected.abs().max()
    model.train()
    loss = nn.functional.cross_entropy(model(x).float(), labels)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in model.parameters())
    hf_lowprec.AdamW(model.parameters(), lr=1e-3).step()
    assert nn.functional.cross_entropy(model(x).float(), labels) < loss


@pytest.mark.parametrize("parametrize", [parametrizations.weight_norm, parametrizations.spectral_norm])
@pytest.mark.parametrize("make", [lambda: nn.Linear(6, 6), lambda: nn.Conv1d(6, 6, 3, padding=1)])
def test_parametrized_weights(parametrize: Any, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = parametrize(make()).eval()
    model = nn.Sequential(module, nn.LayerNorm(6))
    x = torch.randn(2, 6, 6)
    exact = copy.deepcopy(model)(x)
    names = set(bits(model))
    cast_model(model)
    assert set(bits(model)) == names
    # A spectral norm's power iteration is a norm, and goes on in FP32.
    assert {name for name in fp32_names(model) if not name.endswith(("._u", "._v"))} == {"1.weight", "1.bias"}
    out = model(x)
    out.sum().backward()
    # The weight is a quotient of products and norms of rounded numbers, about five roundings; the sums have six to 18
    # terms, and the norm divides by a deviation that is not much smaller than the values.
    assert out.dtype == BF16 and (out - exact).abs().max() <= 8 * UNIT * exact.abs().max()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in module.parameters())


def test_parametrization_kept_in_float32() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 6))
    exact = bits(model)
    report = cast_model(model, keep_fp32="0")
    assert "0" in report.boundaries
    assert all(value.dtype == FP32 for name, value in bits(model).items() if name.startswith("0."))
    assert torch.equal(bits(model)["0.parametrizations.weight.original1"], exact["0.parametrizations.weight.original1"])
    assert model(torch.randn(2, 6)).dtype == BF16


def test_shared_block() -> None:
    shared = Block(16, 4)
    model = nn.Sequential(shared, nn.Linear(16, 16), shared)
    cast_model(model)
    assert model[0] is model[2] and len(shared.norm1._forward_hooks) == 1
    model(torch.randn(2, 4, 16)).sum().backward()
    assert shared.norm1.weight.grad is not None and shared.norm1.weight.grad.dtype == FP32
