"""Random numbers that are the same on every device."""

import torch


def randn(*shape: int, seed: int) -> torch.Tensor:
    """Normal numbers, FP32, drawn on the CPU; on the device where new tensors are made."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())
