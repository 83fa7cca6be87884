"""A backward pass whose gradients are chosen, for optimizers that step parameters while it runs."""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_lowprec.optim import LowPrecisionOptimizer


def backward(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Let autograd give each parameter its gradient of `grads`; DTensors are placed alike.

    The gradient of a sum of products is the other factor, which no operation rounds.
    """
    sum((_local(param) * _local(grad)).sum().float() for param, grad in zip(params, grads, strict=True)).backward()


def give_gradients(optimizer: LowPrecisionOptimizer, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Set the gradients; with gradient release by a backward pass, which steps all but the last bucket."""
    if optimizer.gradient_release:
        backward(params, grads)
        assert sum(param.grad is not None for param in params) == 1
    else:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
