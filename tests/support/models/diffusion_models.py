"""Small diffusion models as people write them: linear layers take FP32 sines of timesteps and noise levels."""

import math

import torch
from torch import Tensor, nn


def sines(t: Tensor, size: int) -> Tensor:
    frequencies = torch.exp(-math.log(10000) * torch.arange(size // 2) / (size // 2))
    angles = t.reshape(-1, 1).float() * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1)


class TimestepEmbedder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        return self.mlp(sines(t, self.width))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = nn.Linear(width, width)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(c)[:, None].chunk(3, -1)
        return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)


class DiT(nn.Module):
    """A transformer over patches, modulated by the timestep (Peebles and Xie)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.timesteps = TimestepEmbedder(width)
        self.classes = nn.Embedding(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.out = nn.Linear(width, 48)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        c = self.timesteps(t) + self.classes(y)
        for block in self.blocks:
            x = block(x, c)
        return self.out(x)


class Sines(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sines(x, 16)


class UNet(nn.Module):
    """The timestep enters through an `nn.Sequential` that begins with its sines."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time_mlp = nn.Sequential(Sines(), nn.Linear(16, width), nn.GELU(), nn.Linear(width, width))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.GroupNorm(4, width)
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)) + self.time_mlp(time)[:, :, None, None]
        return self.last(nn.functional.silu(hidden))


class Converting(nn.Module):
    """Timesteps go to the dtype of the activations before their sines are computed, as in Flux."""

    def __init__(self, scale: float, width: int = 16) -> None:
        super().__init__()
        self.scale, self.width = scale, width
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 1)
        self.times = nn.Linear(width, width)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        hidden = self.first(x)
        times = timestep.expand(x.shape[0]).to(hidden.dtype) * self.scale
        return self.last(hidden + self.times(sines(times, self.width))[:, :, None, None])


class Preconditioned(nn.Module):
    """A denoiser whose input and output are scaled by the noise level (Karras et al.)."""

    def __init__(self) -> None:
        super().__init__()
        self.model = UNet()

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        s = sigma.reshape(-1, 1, 1, 1)
        skip, out, into = 0.25 / (s**2 + 0.25), 0.5 * s / (s**2 + 0.25).sqrt(), 1 / (s**2 + 0.25).sqrt()
        return skip * x + out * self.model(into * x, s.log().flatten() / 4)
