"""The hook that rounds the activations among a model's inputs to 16 bits; all other arguments pass unchanged.

Which arguments are activations is decided in `argument_roles.py`. Timesteps also stay as they are where the `forward`
of a model converts them to the dtype of its activations.
"""

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.casting.argument_roles import is_time, role_of
from hf_lowprec.casting.module_hooks import convert_floats, install_output_conversion, write_back_later
from hf_lowprec.casting.module_kinds import is_code_of_transformers, uses_torch_losses
from hf_lowprec.casting.module_tree import ModuleTree, prediction_layers
from hf_lowprec.rounding import LOW_PRECISION_DTYPES

# They multiply their inputs with their own weights, so every input is an activation, including 1-D ones.
_LAYERS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.Embedding, nn.EmbeddingBag)
_FOLLOWED = "_low_precision_numbers"
"""The attribute of a module with the names of the arguments that `follow_numbers` has prepared it for."""


@functools.cache
def losses_mix_dtypes() -> bool:
    """Return whether torch can differentiate a loss of 16-bit predictions and FP32 labels: 2.13 can, 2.11 cannot."""
    prediction = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    try:
        with torch.enable_grad():
            nn.functional.mse_loss(prediction, torch.zeros(1)).backward()
    except RuntimeError:
        return False
    return True


class ExactTimes(Tensor):
    """Timesteps that become FP32 when they are converted to 16 bits.

    Diffusion models write `timestep.to(hidden_states.dtype) * 1000` and compute sines of that, in FP32.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors
            result = func(*args, **(kwargs or {}))
            if func in _CONVERSIONS and result.dtype in LOW_PRECISION_DTYPES:
                result = args[0].to(result.device, torch.float32)
            return result.as_subclass(cls) if func in _KEEP_TIMES else result


_CONVERSIONS = {Tensor.to, Tensor.type_as, Tensor.bfloat16, Tensor.half}
_KEEP_TIMES = _CONVERSIONS | {Tensor.expand, Tensor.repeat, Tensor.view, Tensor.reshape, Tensor.unsqueeze}
"""Their results are timesteps as well."""


@dataclass(frozen=True)
class DowncastInputs:
    """Forward pre-hook that converts floating activations wider than `dtype` to `dtype`.

    Labels are converted too if `keeps_labels` is false. Nothing else changes: an argument without activations stays the
    same object. If FP32 numbers remain, `follow_numbers` prepares the module for what it computes from them. The same
    holds for integer timesteps outside transformers, because diffusion models compute FP32 sines from them. There,
    timesteps are `ExactTimes`.
    """

    dtype: torch.dtype
    keeps_labels: bool
    positional: tuple[str, ...]  # names of forward's positional parameters, the last one for all further values
    takes_times: bool  # whether an integer among its arguments may be a timestep: never in transformers' own classes

    @classmethod
    def of(cls, module: nn.Module, dtype: torch.dtype) -> "DowncastInputs":
        """Return the hook for a module, with the names of its arguments."""
        try:
            parameters = inspect.signature(module.forward).parameters.values()
        except (TypeError, ValueError):
            parameters = {}.values()
        skip = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
        times = any(is_time(p.name) or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        times = times and not type(module).__module__.startswith("transformers.")
        return cls(dtype, losses_mix_dtypes(), tuple(p.name for p in parameters if p.kind not in skip), times)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        extra = len(args) - len(self.positional)  # all of `*args`, after the first
        names = (self.positional + self.positional[-1:] * extra or ("",) * len(args))[: len(args)] + tuple(kwargs)
        given = (*args, *kwargs.values())
        is_layer = isinstance(module, _LAYERS)
        numbers: list[str] = []
        downcast = functools.partial(self._downcast, is_layer, numbers)
        values = [convert_floats(value, downcast, name) for name, value in zip(names, given, strict=True)]
        if not is_layer:  # layers write nothing
            write_back_later(module, given, values)
        if self.takes_times:
            if not torch.compiler.is_compiling():
                numbers += [name for name, v in zip(names, values, strict=True) if is_time(name) and _is_integer(v)]
            values = [_exact_times(value, name) for name, value in zip(names, values, strict=True)]
        if numbers:
            follow_numbers(module, self.dtype, numbers)
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def _downcast(self, is_layer: bool, numbers: list[str], tensor: Tensor, name: str) -> Tensor:
        """Round a tensor if it is an activation, or a mask.

        Args:
            is_layer: the module multiplies all of its inputs with its weights, so each is an activation.
            numbers: gets the name appended if the tensor stays in FP32 and makes results FP32. Tensors without
                dimensions, indices, and labels that are not weights do not.
            tensor: a floating tensor among the arguments.
            name: its name.
        """
        if isinstance(tensor, ExactTimes):  # another argument here, perhaps an activation
            tensor = tensor.as_subclass(Tensor)
        if tensor.dtype.itemsize <= self.dtype.itemsize:
            return tensor
        role = "activation" if is_layer else role_of(name, tensor.dim())
        if role == "reference" and not self.keeps_labels:
            role = "activation"
        if role in ("number", "reference"):
            if tensor.dim() and ("weight" in name.lower() or (role == "number" and not name.endswith("_ids"))):
                numbers.append(name)
            return tensor
        # FP32's lowest number, as in an additive mask, would round to -inf, and a row of -inf has no softmax.
        lowest = torch.finfo(self.dtype).min
        return (tensor.clamp(min=lowest) if role == "mask" else tensor).to(self.dtype)


def _exact_times(value: Any, name: str) -> Any:
    is_exact = _is_integer(value) or (isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64))
    return value.as_subclass(ExactTimes) if is_exact and is_time(name) else value


def _is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)


def follow_numbers(module: nn.Module, dtype: torch.dtype, names: list[str]) -> None:
    """Prepare a module for FP32 numbers among its arguments, at the first call that passes any.

    Values computed from them are FP32, so the module's children downcast their inputs. A child that receives the
    numbers keeps them in FP32 and prepares its own children, so that only modules on their path get a hook. torch does
    not accept FP32 class weights with 16-bit predictions, so a transformers model that computes a loss with weights
    gets FP32 copies of its predictions.

    Args:
        module: the module being called.
        dtype: the 16-bit dtype that it computes in.
        names: the names of its arguments that are FP32 numbers, or integers that become FP32 numbers.
    """
    followed: tuple[str, ...] = getattr(module, _FOLLOWED, ())
    new = tuple([name for name in names if name not in followed])
    if new:
        _follow_numbers(module, dtype, weights=any("weight" in name.lower() for name in new))
        setattr(module, _FOLLOWED, followed + new)


def forget_numbers(module: nn.Module) -> None:
    """Let `follow_numbers` prepare a module again."""
    vars(module).pop(_FOLLOWED, None)


@torch.compiler.disable(
    reason="hf_lowprec installs hooks at the first call with FP32 numbers: "
    "call the model once before compiling it with fullgraph=True"
)
def _follow_numbers(module: nn.Module, dtype: torch.dtype, weights: bool) -> None:
    tree = ModuleTree.of(module)
    children = tree.called_children("")
    for name in children:  # grows by the modules in an `nn.Sequential`, which may take numbers
        if isinstance(tree.modules[name], nn.Sequential):
            children += tree.called_children(name)
        elif tree.computes_in(name, dtype):
            install_input_downcast(tree.modules[name], dtype)
    if weights and uses_torch_losses(module) and is_code_of_transformers(module):
        for name in prediction_layers(tree, ""):
            if tree.computes_in(name, dtype):
                install_output_conversion(tree.modules[name], torch.float32)


def install_input_downcast(module: nn.Module, dtype: torch.dtype) -> bool:
    """Let a module round the activations among its inputs to `dtype`. Return whether the hook is new."""
    forget_numbers(module)  # it may have grown
    if any(isinstance(hook, DowncastInputs) for hook in module._forward_pre_hooks.values()):
        return False
    module.register_forward_pre_hook(DowncastInputs.of(module, dtype), with_kwargs=True)
    return True
