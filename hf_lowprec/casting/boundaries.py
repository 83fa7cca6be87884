"""What passes into and out of a module: hooks that convert the floating tensors among its arguments and outputs.

Every hook is a plain function or a frozen dataclass of this module: they pickle by name, survive a deepcopy and
are recognised in a later cast.
"""

import copy
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

Convert = Callable[[Tensor, str], Tensor]  # tensor, name of the argument or key it came under -> tensor


def is_reference(name: str) -> bool:
    """Whether an argument of that name is what a loss is measured against, so that rounding it moves the goal."""
    return "label" in name.lower() or "target" in name.lower()


@functools.cache
def losses_mix_dtypes() -> bool:
    """Whether this torch differentiates a loss of 16-bit predictions against FP32 labels; 2.11 does not, 2.13 does."""
    prediction = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    try:
        with torch.enable_grad():
            nn.functional.mse_loss(prediction, torch.zeros(1)).backward()
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True)
class NarrowInputs:
    """Forward pre-hook: floating arguments wider than `dtype` go to `dtype`.

    What `is_reference` names is spared where `spares_references`. Nothing else changes: an argument without such
    a tensor stays the same object.
    """

    dtype: torch.dtype
    spares_references: bool
    positional: tuple[str, ...]  # names of forward's positional parameters, the last one for all further values

    @classmethod
    def of(cls, module: nn.Module, dtype: torch.dtype) -> "NarrowInputs":
        try:
            parameters = inspect.signature(module.forward).parameters.values()
        except (TypeError, ValueError):
            parameters = {}.values()
        skip = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
        return cls(dtype, losses_mix_dtypes(), tuple(p.name for p in parameters if p.kind not in skip))

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        names = self.positional + self.positional[-1:] * (len(args) - len(self.positional)) or ("",) * len(args)
        args = tuple([converted(arg, self._narrow, name) for arg, name in zip(args, names, strict=False)])
        return args, {name: converted(value, self._narrow, name) for name, value in kwargs.items()}

    def _narrow(self, tensor: Tensor, name: str) -> Tensor:
        if tensor.dtype.itemsize <= self.dtype.itemsize or (self.spares_references and is_reference(name)):
            return tensor
        # FP32's lowest number, as of an additive mask, would round to -inf: a row of those has no softmax.
        lowest = torch.finfo(self.dtype).min
        return (tensor.clamp(min=lowest) if "mask" in name.lower() else tensor).to(self.dtype)


def enter_float32(module: nn.Module | None, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if any(isinstance(value, nn.Module) for value in (*args, *kwargs.values())):
        return args, kwargs  # it computes with those, in their formats (PEFT's DoRA)
    return converted(args, _float32), converted(kwargs, _float32)


# Not the input's dtype: T5 itself converts the input of `wo` to FP32, which would leak into 16-bit layers.
def leave_bfloat16(module: nn.Module, args: Any, output: Any) -> Any:
    return converted(output, _bfloat16)


def leave_float16(module: nn.Module, args: Any, output: Any) -> Any:
    return converted(output, _float16)


def leave_float32(module: nn.Module, args: Any, output: Any) -> Any:
    return converted(output, _float32)


def return_float32(module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook of a whole model: what it returns to code outside of it."""
    if torch.is_grad_enabled() and isinstance(output, dict) and output.get("loss") is not None:
        return output
    return converted(output, _float32_if_16_bit)


_LEAVING = (leave_bfloat16, leave_float16, leave_float32, return_float32)


def install_float32(module: nn.Module, dtype: torch.dtype, rounds_output: bool) -> bool:
    """Give a kept module its boundary, as far as it has none; whether anything was missing."""
    enters = enter_float32 not in module._forward_pre_hooks.values()
    if enters:
        module.register_forward_pre_hook(enter_float32, with_kwargs=True)
    # Never taken away: a cast of a part cannot know what consumes the output in the whole.
    return (rounds_output and install_rounding(module, dtype)) or enters


def install_rounding(module: nn.Module, dtype: torch.dtype) -> bool:
    """Let a module round its floating outputs; whether it did not yet."""
    return _install_output(module, leave_bfloat16 if dtype == torch.bfloat16 else leave_float16)


def install_widening(module: nn.Module) -> bool:
    """Let a module return exact FP32 copies of its floating outputs; whether it did not yet."""
    return _install_output(module, leave_float32)


def install_float32_outputs(model: nn.Module) -> None:
    """Let a model return FP32 to code outside of it, unless it returns a loss to be differentiated; once."""
    if return_float32 not in model._forward_hooks.values():
        model.register_forward_hook(return_float32)  # last, after what rounds outputs


def _install_output(module: nn.Module, leave: Callable[..., Any]) -> bool:
    if leave in module._forward_hooks.values():
        return False
    # First, so that every other forward hook sees what the neighbours see.
    module.register_forward_hook(leave, prepend=True)
    return True


def install_narrowing(module: nn.Module, dtype: torch.dtype) -> bool:
    """Let a module narrow its inputs; whether it did not yet."""
    if any(isinstance(hook, NarrowInputs) for hook in module._forward_pre_hooks.values()):
        return False
    module.register_forward_pre_hook(NarrowInputs.of(module, dtype), with_kwargs=True)
    return True


def remove_all(module: nn.Module) -> None:
    """Take away what a cast installed on this module; hooks of others stay."""
    for hooks, with_kwargs in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs),
    ):
        for key, hook in list(hooks.items()):
            if isinstance(hook, NarrowInputs) or hook in (enter_float32, *_LEAVING):
                del hooks[key]
                with_kwargs.pop(key, None)


def _float32(tensor: Tensor, name: str) -> Tensor:
    return tensor.to(torch.float32)


def _float32_if_16_bit(tensor: Tensor, name: str) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _bfloat16(tensor: Tensor, name: str) -> Tensor:
    return tensor.to(torch.bfloat16)


def _float16(tensor: Tensor, name: str) -> Tensor:
    return tensor.to(torch.float16)


def converted(value: Any, convert: Convert, name: str = "") -> Any:
    """`value` with its floating tensors converted; the same object where that changes none."""
    if isinstance(value, Tensor):
        return convert(value, name) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        items = [converted(item, convert, name) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        # A key names what is under it, but cannot hide that all of it came in as labels.
        entries = {key: converted(item, convert, f"{name}.{key}") for key, item in value.items()}
        if all(entries[key] is item for key, item in value.items()):
            return value
        if is_dataclass(value):
            return type(value)(**entries)
        if type(value) in (dict, OrderedDict):
            return type(value)(entries)
        twin = copy.copy(value)  # not every dict is built from its entries: defaultdict
        twin.update(entries)
        return twin
    return value
