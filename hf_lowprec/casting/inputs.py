"""Rounds a model's activations to its dtype at its inputs; everything else passes unchanged."""

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.casting.activations import is_time, role_of
from hf_lowprec.casting.boundaries import converted, install_widening, remove_hooks
from hf_lowprec.casting.losses import uses_torch_losses
from hf_lowprec.casting.places import computing_children, narrows, predictions
from hf_lowprec.casting.policy import Modules, callable_parts

# They multiply their inputs with their own weights, so every input is an activation, including 1-D ones.
_LAYERS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.Embedding, nn.EmbeddingBag)
_NUMBERS, _INTEGERS = "_low_precision_numbers", "_low_precision_integers"


@functools.cache
def losses_mix_dtypes() -> bool:
    """Whether this torch can differentiate a loss between 16-bit predictions and FP32 labels: 2.13 can, 2.11 cannot."""
    prediction = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    try:
        with torch.enable_grad():
            nn.functional.mse_loss(prediction, torch.zeros(1)).backward()
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True)
class NarrowInputs:
    """Forward pre-hook: activations wider than `dtype` go to `dtype` (see `activations.py`).

    Labels are rounded too where `keeps_labels` is false. Nothing else changes: an argument without an activation
    stays the same object. Where numbers stay wide, `follow_numbers` prepares the module for what it makes of them; so
    it does for integer timesteps, which diffusion models turn into FP32 sines, outside of transformers.
    """

    dtype: torch.dtype
    keeps_labels: bool
    positional: tuple[str, ...]  # names of forward's positional parameters, the last one for all further values
    takes_times: bool  # whether an integer among its arguments may be a timestep: never in transformers' own classes

    @classmethod
    def of(cls, module: nn.Module, dtype: torch.dtype) -> "NarrowInputs":
        try:
            parameters = inspect.signature(module.forward).parameters.values()
        except (TypeError, ValueError):
            parameters = {}.values()
        skip = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
        times = any(is_time(p.name) or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        times = times and not type(module).__module__.startswith("transformers.")
        return cls(dtype, losses_mix_dtypes(), tuple(p.name for p in parameters if p.kind not in skip), times)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        names = self.positional + self.positional[-1:] * (len(args) - len(self.positional)) or ("",) * len(args)
        numbers: list[str] = []
        narrow = functools.partial(self._narrow, isinstance(module, _LAYERS), numbers)
        args = tuple([converted(arg, narrow, name) for arg, name in zip(args, names, strict=False)])
        kwargs = {name: converted(value, narrow, name) for name, value in kwargs.items()}
        if self.takes_times and not torch.compiler.is_compiling():
            given = (*zip(names, args, strict=False), *kwargs.items())
            if times := [name for name, value in given if is_time(name) and _is_integer(value)]:
                follow_numbers(module, self.dtype, times, _INTEGERS)
        if numbers:
            follow_numbers(module, self.dtype, numbers)
        return args, kwargs

    def _narrow(self, is_layer: bool, numbers: list[str], tensor: Tensor, name: str) -> Tensor:
        """`tensor` in the model's format if it is an activation.

        `numbers` collects the names of tensors that make FP32 what is computed with them. One without dimensions does
        not, nor do indices, nor labels that are no weights.
        """
        if tensor.dtype.itemsize <= self.dtype.itemsize:
            return tensor
        role = "activation" if is_layer else role_of(name, tensor.dim())
        if role == "reference" and not self.keeps_labels:
            role = "activation"
        if role in ("number", "reference"):
            if tensor.dim() and ("weight" in name.lower() or (role == "number" and not name.endswith("_ids"))):
                numbers.append(name)
            return tensor
        # FP32's lowest number, as of an additive mask, would round to -inf: a row of those has no softmax.
        lowest = torch.finfo(self.dtype).min
        return (tensor.clamp(min=lowest) if role == "mask" else tensor).to(self.dtype)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)


def follow_numbers(module: nn.Module, dtype: torch.dtype, names: list[str], mark: str = _NUMBERS) -> None:
    """Prepare a module for FP32 numbers among its arguments, at the first call that brings some.

    What it computes with them is FP32, so its children narrow their inputs. A child that receives the numbers keeps
    them in FP32 and prepares its own children, so that only modules on their path get a hook. torch takes no FP32
    weights of classes for 16-bit predictions, so a module that computes a loss and is given weights gets FP32 copies of
    what makes its predictions.

    Args:
        module: what is called.
        dtype: the format that it computes in.
        names: of its FP32 arguments that are numbers, or of integers that become such.
        mark: the attribute of the module that remembers them.
    """
    followed: tuple[str, ...] = getattr(module, mark, ())
    new = tuple([name for name in names if name not in followed])
    if new:
        _follow_numbers(module, dtype, weights=any("weight" in name.lower() for name in new))
        setattr(module, mark, followed + new)


def forget_numbers(module: nn.Module) -> None:
    """Let `follow_numbers` prepare a module again."""
    for mark in (_NUMBERS, _INTEGERS):
        vars(module).pop(mark, None)


def numbers_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the FP32 numbers that `module` has been called with so far."""
    return tuple(vars(module).get(_NUMBERS, ()))


@torch.compiler.disable(
    reason="hf_lowprec installs hooks at the first call with FP32 numbers: "
    "call the model once before compiling it with fullgraph=True"
)
def _follow_numbers(module: nn.Module, dtype: torch.dtype, weights: bool) -> None:
    modules = dict(module.named_modules(remove_duplicate=False))
    for name in _called_children("", modules):
        if narrows(name, modules, dtype):
            install_narrowing(modules[name], dtype)
    if weights and uses_torch_losses(module):
        for name in predictions("", modules):
            if narrows(name, modules, dtype):
                install_widening(modules[name])


def _called_children(name: str, modules: Modules) -> list[str]:
    """Children that compute; those of a container or of `nn.Sequential`, whose parts may take numbers, in its place."""
    parts = [part for child in computing_children(name, modules) for part in callable_parts(child, modules)]
    split = [_called_children(p, modules) if isinstance(modules[p], nn.Sequential) else [p] for p in parts]
    return [part for parts in split for part in parts]


def install_narrowing(module: nn.Module, dtype: torch.dtype) -> bool:
    """Let a module narrow its inputs; whether it did not yet."""
    forget_numbers(module)  # it may have grown
    if any(isinstance(hook, NarrowInputs) for hook in module._forward_pre_hooks.values()):
        return False
    module.register_forward_pre_hook(NarrowInputs.of(module, dtype), with_kwargs=True)
    return True


def remove_narrowing(module: nn.Module) -> None:
    """Take `install_narrowing`, and what followed from it, back."""
    remove_hooks(module, lambda hook: isinstance(hook, NarrowInputs))
    forget_numbers(module)
