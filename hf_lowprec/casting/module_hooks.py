"""Hooks that convert the floating tensors among a module's inputs and outputs between FP32 and 16 bits.

Every hook of a cast is a plain function or a frozen dataclass: pickle finds it by name, `deepcopy` keeps it, and a
later cast recognizes it. The hook that rounds a model's inputs is in `input_downcast.py`, that of loss functions in
`losses.py`.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.rounding import LOW_PRECISION_DTYPES

Convert = Callable[[Tensor, str], Tensor]  # tensor, name of the argument or dict key it came under -> tensor
_LIGER_MODES_IN_FP32 = ("llama", "gemma")
"""Values of a Liger norm's `casting_mode` with which its kernel computes in FP32 and returns its input's dtype."""


def upcast_inputs(module: nn.Module | None, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Convert floating arguments to FP32. A forward pre-hook."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # norms, which a model has many of
        if module is not None and vars(module).get("casting_mode") in _LIGER_MODES_IN_FP32:
            return args, kwargs  # its kernel converts what it reads
        return (convert_floats(args[0], _to_fp32),), kwargs
    given = *args, *kwargs.values()
    if any(isinstance(value, nn.Module) for value in given):
        return args, kwargs  # it computes with the tensors of those modules, in their dtypes (PEFT's DoRA)
    args, kwargs = convert_floats(args, _to_fp32), convert_floats(kwargs, _to_fp32)
    if module is not None and not all(isinstance(value, Tensor) for value in given):
        write_back_later(module, given, (*args, *kwargs.values()))
    return args, kwargs


@dataclass(frozen=True)
class ConvertOutputs:
    """Forward hook that converts floating outputs to `dtype`.

    The input's dtype would be wrong: T5 itself converts the input of `wo` to FP32, and that FP32 would leak.
    """

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return convert_floats(output, self._convert)

    def _convert(self, tensor: Tensor, name: str) -> Tensor:
        return tensor.to(self.dtype)


def upcast_model_outputs(module: nn.Module, args: Any, output: Any) -> Any:
    """Convert 16-bit outputs to FP32 for the code that called the model. A forward hook of a whole model."""
    return to_fp32_copies(output)


def upcast_model_outputs_without_loss(module: nn.Module, args: Any, output: Any) -> Any:
    """Do what `upcast_model_outputs` does, except for outputs with a loss that will be differentiated."""
    if torch.is_grad_enabled() and isinstance(output, dict) and output.get("loss") is not None:
        return output
    return upcast_model_outputs(module, args, output)


_MODEL_OUTPUT_UPCASTS = (upcast_model_outputs, upcast_model_outputs_without_loss)


def install_input_upcast(module: nn.Module) -> bool:
    """Make a module get its floating inputs in FP32. Return whether the hook is new."""
    if upcast_inputs in module._forward_pre_hooks.values():
        return False
    module.register_forward_pre_hook(upcast_inputs, with_kwargs=True)
    return True


def install_output_conversion(module: nn.Module, dtype: torch.dtype) -> bool:
    """Make a module return its floating outputs in `dtype`: FP32 means exact copies. Return whether this is new."""
    hook, hooks = ConvertOutputs(dtype), module._forward_hooks
    is_new = hook not in hooks.values()
    if is_new:  # first, so that the forward hooks of others see the output that the next module gets
        module.register_forward_hook(hook, prepend=True)
    # Hooks that round outputs stay first: otherwise, they would round the copies.
    for key in [k for k, h in hooks.items() if isinstance(h, ConvertOutputs) and h.dtype != torch.float32]:
        hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]
    return is_new


def install_model_output_upcast(model: nn.Module, next_to_loss: bool) -> None:
    """Make a model return FP32 to the code that calls it; with `next_to_loss`, even if it also returns a loss."""
    if next_to_loss:
        remove_hooks(model, (upcast_model_outputs_without_loss,))
    if returns_float32(model):
        return
    # Last, after the hooks that round outputs.
    model.register_forward_hook(upcast_model_outputs if next_to_loss else upcast_model_outputs_without_loss)


def returns_float32(model: nn.Module) -> bool:
    """Return whether `install_model_output_upcast` was called for a model."""
    return any(hook in _MODEL_OUTPUT_UPCASTS for hook in model._forward_hooks.values())


def remove_model_output_upcast(module: nn.Module) -> bool:
    """Undo `install_model_output_upcast` and upcasts of outputs below. Return whether it was installed."""
    installed = returns_float32(module)
    for part in module.modules() if installed else ():
        remove_hooks(part, (*_MODEL_OUTPUT_UPCASTS, ConvertOutputs(torch.float32)))
    return installed


def remove_hooks(module: nn.Module, hooks: Collection[Any] | None = None) -> None:
    """Remove these forward hooks and pre-hooks of a module; by default, all that casts have installed."""
    for tables in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
    ):
        found: dict[int, Any] = tables[0]
        for key, hook in list(found.items()):
            if hook in hooks if hooks is not None else str(getattr(hook, "__module__", "")).startswith(__package__):
                for table in tables:
                    table.pop(key, None)  # type: ignore[attr-defined]


def _to_fp32(tensor: Tensor, name: str) -> Tensor:
    return tensor.to(torch.float32)


def _16_bit_to_fp32(tensor: Tensor, name: str) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype in LOW_PRECISION_DTYPES else tensor


def to_fp32_copies(value: Any) -> Any:
    """Upcast the 16-bit tensors in a value, at any depth of tuples, lists, dicts and dataclasses."""
    return convert_floats(value, _16_bit_to_fp32)


def convert_floats(value: Any, convert: Convert, name: str = "") -> Any:
    """Convert the floating tensors in a value, at any depth of tuples, lists, dicts and dataclasses.

    Args:
        value: any object; objects of other types are returned as they are.
        convert: takes a tensor and its name, and returns the converted tensor.
        name: the name of `value`; keys of dicts and names of fields are appended, separated by dots.

    Returns:
        A value of the same type; the same object if no tensor in it changes.
    """
    if isinstance(value, Tensor):
        return convert(value, name) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):  # torch 2.9 cannot compile `tuple | list`
        items = [convert_floats(item, convert, name) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if type(value) in (tuple, list) or hasattr(value, "n_fields"):  # or one of torch.return_types
            return type(value)(items)
        if isinstance(value, tuple):  # a named tuple, whose constructor takes fields
            return tuple.__new__(type(value), items)
        (copied := copy.copy(value))[:] = items
        return copied
    if isinstance(value, dict):
        entries = {key: convert_floats(item, convert, f"{name}.{key}") for key, item in value.items()}
        if all(entries[key] is item for key, item in value.items()):
            return value
        if is_dataclass(value):  # a ModelOutput of transformers
            return type(value)(**entries)
        if type(value) in (dict, OrderedDict):
            return type(value)(entries)
        converted = copy.copy(value)  # not every dict is built from its entries: defaultdict
        converted.update(entries)
        return converted
    if is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        entries = convert_floats(vars(value), convert, name)
        if entries is not vars(value):
            value = copy.copy(value)
            vars(value).update(entries)  # it may be frozen
    return value


def write_back_later(module: nn.Module, values: Iterable[Any], copies: Iterable[Any]) -> None:
    """When the current call of `module` ends, copy what it wrote into `copies` back into `values`.

    This does nothing in code that torch compiles, nor for tensors in inference mode, where torch does not count writes.

    Args:
        module: the module, whose pre-hook calls this function.
        values: the arguments; empty for a module that writes into none.
        copies: the results of `convert_floats` for them.
    """
    if torch.compiler.is_compiling():
        return
    pairs = [pair for each in zip(values, copies, strict=False) for pair in _converted(*each)]
    originals = {id(copied): value for value, copied, _ in pairs}

    def write_back(*_: Any) -> None:
        handle.remove()
        for value, copied, before in pairs:
            if _contents(copied) == before:
                continue
            if isinstance(value, Tensor):
                value.copy_(copied)
            elif isinstance(value, list):
                value[:] = [originals.get(id(item), item) for item in copied]
            else:
                for key in before.keys() - copied.keys():
                    del value[key]
                for key in [key for key, item in copied.items() if before.get(key) != id(item)]:
                    value[key] = originals.get(id(copied[key]), copied[key])

    if pairs:
        handle = module.register_forward_hook(write_back, always_call=True)


def _converted(value: Any, copied: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield each copied value at any depth, its copy, and the contents of the copy."""
    if copied is not value:
        if is_dataclass(value) and not isinstance(value, dict):
            value, copied = vars(value), vars(copied)
        yield value, copied, _contents(copied)
        if isinstance(value, dict):
            value, copied = value.values(), copied.values()
        for each in () if isinstance(value, Tensor) else zip(value, copied, strict=True):
            yield from _converted(*each)


def _contents(value: Any) -> Any:
    """Return something that changes with each write into the tensor, list or dict."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    return {key: id(item) for key, item in (value.items() if isinstance(value, dict) else enumerate(value))}
