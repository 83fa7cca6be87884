"""The layers of audio, vision and language models that `hf-lowprec doctor` probes on a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_lowprec.monitor.layer_probes import Computation, Probe, probe_layer, relative_errors


def layers() -> dict[str, nn.Module]:
    """Layers by purpose, on the meta device, since a probe reads only their configuration."""
    with torch.device("meta"):
        return {
            "audio, first": nn.Conv1d(1, 512, 10, stride=5, bias=False),
            "audio, strided": nn.Conv1d(512, 512, 3, stride=2, bias=False),
            "audio, positions": nn.Conv1d(768, 768, 128, padding=64, groups=16),
            "audio, few positions": nn.Conv1d(96, 96, 128, padding=64, groups=16),
            "audio, spectrogram": nn.Conv1d(80, 384, 3, padding=1),
            "audio, depthwise": nn.Conv1d(256, 256, 31, padding=15, groups=256),
            "audio, upsampling": nn.ConvTranspose1d(64, 32, 16, stride=8, padding=4),
            "vision, patches": nn.Conv2d(3, 192, 16, stride=16),
            "vision, stem": nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            "vision, 3×3": nn.Conv2d(64, 64, 3, padding=1, bias=False),
            "vision, strided": nn.Conv2d(128, 128, 3, stride=2, padding=1, bias=False),
            "vision, 1×1": nn.Conv2d(64, 256, 1, bias=False),
            "vision, strided 1×1": nn.Conv2d(256, 512, 1, stride=2, bias=False),
            "vision, stride beyond kernel": nn.Conv2d(32, 48, 1, stride=3, bias=False),
            "vision, grouped": nn.Conv2d(128, 128, 3, padding=1, groups=32, bias=False),
            "vision, depthwise": nn.Conv2d(96, 96, 7, padding=3, groups=96),
            "vision, dilated": nn.Conv2d(64, 64, 3, padding=2, dilation=2),
            "vision, upsampling": nn.ConvTranspose2d(64, 32, 2, stride=2),
            "video, patches": nn.Conv3d(3, 192, (2, 14, 14), stride=(2, 14, 14)),
            "linear": nn.Linear(384, 1536),
            "linear, odd sizes": nn.Linear(67, 33),
            "embedding": nn.Embedding(64, 384),
            "layer norm": nn.LayerNorm(384),
            "RMS norm": nn.RMSNorm(384),
            "group norm": nn.GroupNorm(16, 64),
            "batch norm": nn.BatchNorm2d(64),
        }


def functions() -> dict[str, Computation]:
    """Functions for which there is no module, by what they compute."""
    heads = dict.fromkeys(("query", "key", "value"), (2, 4, 40, 64))
    return {
        "batched matmul": Computation(_matmul, {"left": (8, 16, 64), "right": (8, 64, 24)}),
        "batched matmul, odd sizes": Computation(_matmul, {"left": (8, 17, 33), "right": (8, 33, 19)}),
        "attention": Computation(F.scaled_dot_product_attention, heads),
        "causal attention": Computation(_causal_attention, heads),
    }


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    return left @ right


def _causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _probe_function(name: str, computation: Computation, dtype: torch.dtype, device: torch.device) -> Probe:
    return Probe(name, relative_errors(computation, dtype, device))


def probe_layers(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[list[Probe], list[str]]:
    """Probe all layers and functions.

    Returns:
        The probes' results, and the name and reason for each layer that torch cannot run on `device`.
    """
    runs: dict[str, Callable[[], Probe | None]] = {
        name: partial(probe_layer, layer, dtype, device) for name, layer in layers().items()
    }
    for name, computation in functions().items():
        runs[name] = partial(_probe_function, name, computation, dtype, device)
    probes, unsupported = [], []
    for name, run in runs.items():
        try:
            probe = run()
        except RuntimeError as error:
            unsupported.append(f"{name}: {' '.join(str(error).split())[:120]}")
        else:
            probes += [] if probe is None else [probe]
    return probes, unsupported
