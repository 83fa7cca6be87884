"""Count the bytes of the tensors that exist now, to compare them with what was expected."""

from collections import Counter

import torch
from torch import nn

from hf_lowprec.monitor.byte_counts import MemoryUse


def memory_use(model: nn.Module, optimizer: torch.optim.Optimizer) -> MemoryUse:
    """Gradients exist from backward until `zero_grad`, state after the first step."""
    parameters, state = list(model.parameters()), Counter()
    for value in (value for held in optimizer.state.values() for value in held.values()):
        state[value.dtype] += value.nbytes
    return MemoryUse.of(parameters, (p.grad for p in parameters if p.grad is not None), state)
