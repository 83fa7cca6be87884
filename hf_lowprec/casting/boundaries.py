"""Hooks that convert the floating tensors among a module's inputs and outputs.

Every hook of a cast is a plain function or a frozen dataclass: they pickle by name, survive a deepcopy and are
recognised in a later cast.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.rounding import LOW_PRECISION_DTYPES

Convert = Callable[[Tensor, str], Tensor]  # tensor, name of the argument or key it came under -> tensor


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


def upcast_outputs(module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook of a whole model: it returns FP32 to code outside of it."""
    return converted(output, _float32_if_16_bit)


def upcast_outputs_without_loss(module: nn.Module, args: Any, output: Any) -> Any:
    """The same, but for calls that return a loss to be differentiated."""
    if torch.is_grad_enabled() and isinstance(output, dict) and output.get("loss") is not None:
        return output
    return upcast_outputs(module, args, output)


_UPCASTS = (upcast_outputs, upcast_outputs_without_loss)
_LEAVING = (leave_bfloat16, leave_float16, leave_float32, *_UPCASTS)


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
    fresh = _install_output(module, leave_float32)
    # What rounds its outputs stays first: copies that were rounded after all would be 16-bit.
    for key in [key for key, hook in module._forward_hooks.items() if hook in (leave_bfloat16, leave_float16)]:
        module._forward_hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]
    return fresh


def install_upcast_outputs(model: nn.Module, next_to_loss: bool) -> None:
    """Let a model return FP32 to code outside of it; with `next_to_loss` also where it returns a loss."""
    if any(hook in _UPCASTS for hook in model._forward_hooks.values()):
        return
    # Last, after what rounds outputs.
    model.register_forward_hook(upcast_outputs if next_to_loss else upcast_outputs_without_loss)


def remove_upcast_outputs(module: nn.Module) -> bool:
    """Take `install_upcast_outputs` and the FP32 copies of predictions below it back; whether it was installed."""
    installed = any(hook in _UPCASTS for hook in module._forward_hooks.values())
    for part in module.modules() if installed else ():
        remove_hooks(part, lambda hook: hook in (*_UPCASTS, leave_float32))
    return installed


def _install_output(module: nn.Module, leave: Callable[..., Any]) -> bool:
    if leave in module._forward_hooks.values():
        return False
    # First, so that every other forward hook sees what the neighbours see.
    module.register_forward_hook(leave, prepend=True)
    return True


def remove_boundaries(module: nn.Module) -> None:
    """Take away what a cast installed here on a kept module, or on one whose output it converts."""
    remove_hooks(module, lambda hook: hook in (enter_float32, *_LEAVING))


def remove_hooks(module: nn.Module, ours: Callable[[Any], bool]) -> None:
    """Take hooks of `forward` away from a module; hooks of others stay."""
    for tables in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
    ):
        hooks: dict[int, Any] = tables[0]
        for key in [key for key, hook in hooks.items() if ours(hook)]:
            for table in tables:
                table.pop(key, None)  # type: ignore[attr-defined]


def _float32(tensor: Tensor, name: str) -> Tensor:
    return tensor.to(torch.float32)


def _float32_if_16_bit(tensor: Tensor, name: str) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype in LOW_PRECISION_DTYPES else tensor


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
