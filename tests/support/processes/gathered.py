"""Full tensors of shards, on every rank."""

import torch
from torch import Tensor

from hf_lowprec.optim.sharding import dtensor_like, local_shard


def gathered(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor; others as they are. gloo knows no int16, so its bits go as those of BF16."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    if tensor.dtype != torch.int16:
        return tensor.full_tensor()
    return dtensor_like(local_shard(tensor).view(torch.bfloat16), tensor).full_tensor().view(torch.int16)
