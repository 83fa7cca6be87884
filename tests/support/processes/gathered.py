"""Full tensors of shards, on every rank."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def gathered(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor; others as they are. gloo knows no int16, so its bits go as those of BF16."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.dtype != torch.int16:
        return tensor.full_tensor()
    bits, layout = tensor.to_local().view(torch.bfloat16), {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(bits, tensor.device_mesh, tensor.placements, **layout).full_tensor().view(torch.int16)
