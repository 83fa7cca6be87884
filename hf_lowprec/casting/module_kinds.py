"""Recognize kinds of modules, such as norms and losses, by their class and by the code of their `forward`."""

import dis
import inspect
import re
from types import CodeType

from torch import nn

TORCH_LOSS_FUNCTIONS = {name for name in dir(nn.functional) if name.endswith(("_loss", "cross_entropy"))}
TORCH_LOSS_FUNCTIONS |= {"binary_cross_entropy_with_logits", "kl_div"}
TORCH_LOSS_FUNCTIONS -= {"linear_cross_entropy"}  # multiplies by the weights of the head
"""Names of torch's functions that compute a loss from predictions."""

_TORCH_LOSSES = TORCH_LOSS_FUNCTIONS.union(nn.modules.loss.__all__)
_PRODUCTS = {"matmul", "mm", "bmm", "mv", "dot", "inner", "outer", "einsum", "tensordot", "addmm", "baddbmm", "linear"}
"""Names of functions and methods whose operands must have one dtype."""
_NORM_CLASSES = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
_NORM_NAME = re.compile(r"Norm(\d+[a-z]?|Gated|PerHead|Layer)*$", re.IGNORECASE)
_ROTARY_NAME = re.compile(r"Rotary|Rope\w*Embedding", re.IGNORECASE)
_FREQUENCIES = re.compile(r"(\w+_)?inv_freq")
_LOSS_NAME = re.compile(r"(Loss|Criterion)$")


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm, by its class or by the name of its class or a base class.

    A module with children that hold tensors is a norm only if the children are. By name alone, whole encoders
    (Wav2Vec2EncoderStableLayerNorm) and norms that own linear layers would count.
    """
    if not isinstance(module, _NORM_CLASSES) and not _is_named(module, _NORM_NAME):
        return False
    inner = (part for part in module.modules() if part is not module and (part._parameters or part._buffers))
    return all(map(is_norm, inner))


def is_rotary(module: nn.Module) -> bool:
    """Return whether a module is a rotary embedding by name, or has no parameters and a buffer named `inv_freq`.

    Modules whose children hold tensors are not. A rotary embedding converts its own outputs, so it gets no hooks.
    """
    has_frequencies = not module._parameters and any(map(_FREQUENCIES.fullmatch, module._buffers))
    if not has_frequencies and not _is_named(module, _ROTARY_NAME):
        return False
    inner = any(part._parameters or part._buffers for part in module.modules() if part is not module)
    return not inner and not is_norm(module)


def is_loss(module: nn.Module) -> bool:
    """Return whether a module is a loss, by the name of its class or a base class.

    A module with parameters other than single numbers (a temperature) is not a loss but a part of the model.
    """
    if not _is_named(module, _LOSS_NAME):
        return False
    return not any(parameter.dim() for parameter in module.parameters()) and not (is_norm(module) or is_rotary(module))


def is_model(module: nn.Module) -> bool:
    """Return whether a module is a model by transformers' convention: its class has a `main_input_name`.

    Code outside calls such a model directly: `generate` calls the encoder inside a model.
    """
    return hasattr(type(module), "main_input_name") or "main_input_name" in vars(module)


def names_in_forward(module: nn.Module) -> frozenset[str]:
    """Return the global names and attributes that the code of a module's `forward` uses."""
    code = _code(module)
    return frozenset() if code is None else frozenset(code.co_names)


def arguments_of_forward(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of a module's `forward`."""
    code = _code(module)
    return () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def uses_torch_losses(module: nn.Module) -> bool:
    """Return whether the code of a module's `forward` names one of torch's losses."""
    return not _TORCH_LOSSES.isdisjoint(names_in_forward(module))


def multiplies_tensors(module: nn.Module) -> bool:
    """Return whether the code of a module's `forward` names a product of tensors, or has the operator `@`."""
    code = _code(module)
    if code is None:
        return False
    has_operator = any(
        step.argrepr in ("@", "@=") or step.opname.endswith("MATRIX_MULTIPLY") for step in dis.get_instructions(code)
    )  # before Python 3.11, each operator had an instruction of its own
    return has_operator or not _PRODUCTS.isdisjoint(code.co_names)


def is_code_of_transformers(module: nn.Module) -> bool:
    """Return whether a module's `forward` comes from transformers, directly or inherited by a user's class."""
    return _library(module) == "transformers"


def is_code_of_a_library(module: nn.Module) -> bool:
    """Return whether a module's `forward` comes from a library of models whose losses are known."""
    return _library(module) in ("transformers", "sentence_transformers", "diffusers", "torch")


def _is_named(module: nn.Module, name: re.Pattern[str]) -> bool:
    return any(name.search(cls.__name__) for cls in type(module).__mro__)


def _library(module: nn.Module) -> str:
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    return owner.__module__.partition(".")[0]


def _code(module: nn.Module) -> CodeType | None:
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)
