"""Find layers that torch computes wrongly on this machine, as oneDNN does some BF16 convolutions on CPUs with AMX.

A model that holds one cannot train as in FP32, whatever the cast does. Where a comparison fails, each convolution and
linear layer is compared with FP64 in the very shapes in which the model calls it. If one is wrong, the comparison is
made once more, with the same bounds, and that layer in FP32, as users are told to. If none is, the fault is ours.
"""

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]
TOLERANCE = 2.0**-4
"""Of the largest value. A kernel that rounds each of k partial sums to BF16 errs by about 2⁻⁸·√(k/2): 2⁻⁵ for 128."""


def broken_layers(model: nn.Module, batch: Batch) -> tuple[str, ...]:
    """The names of a model's layers that are wrong in BF16, in one of the shapes they are called with."""
    called: dict[str, set[torch.Size]] = {}

    def watch(name: str) -> Callable[..., None]:
        return lambda module, args: called.setdefault(name, set()).add(args[0].shape) if args else None

    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
    handles = [module.register_forward_pre_hook(watch(name)) for name, module in layers]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(n for n, shapes in called.items() if any(is_wrong(model.get_submodule(n), s) for s in shapes))


def is_wrong(layer: nn.Module, shape: torch.Size) -> bool:
    """Whether a layer's output or one of its gradients in BF16 is not FP64's but for rounding."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    try:
        layer = copy.deepcopy(layer).bfloat16()
        results = _forward_backward(layer, values)
    except RuntimeError:  # torch does not run it so: no reason to leave a failure to it
        return False
    exact = _forward_backward(copy.deepcopy(layer).double(), values.double())
    pairs = zip(results, exact, strict=True)
    return any(not (a - b).abs().max() <= TOLERANCE * b.abs().max() for a, b in pairs)  # NaN is wrong


def _forward_backward(layer: nn.Module, values: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of each parameter."""
    leaves = [values.requires_grad_(), *layer.requires_grad_().parameters()]
    output = layer(values)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(output)
    return [tensor.detach().double() for tensor in (output, *torch.autograd.grad(output, leaves, gradient))]


def report(title: str, broken: Iterable[str]) -> None:
    """Name them in pytest's summary."""
    for name in broken:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(f"{title}: {name} is wrong on this machine and was kept in FP32", stacklevel=2)
