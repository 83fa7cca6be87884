"""Read the code of a module's `forward`: its arguments, the names it uses, whether it computes a loss."""

import dis
import inspect
from types import CodeType

from torch import nn

TORCH_LOSS_FUNCTIONS = {name for name in dir(nn.functional) if name.endswith(("_loss", "cross_entropy"))}
TORCH_LOSS_FUNCTIONS |= {"binary_cross_entropy_with_logits", "kl_div"}
TORCH_LOSS_FUNCTIONS -= {"linear_cross_entropy"}  # multiplies by the weights of the head
"""Names of torch's functions that compute a loss from predictions."""

_TORCH_LOSSES = TORCH_LOSS_FUNCTIONS.union(nn.modules.loss.__all__)
_PRODUCTS = {"matmul", "mm", "bmm", "mv", "dot", "inner", "outer", "einsum", "tensordot", "addmm", "baddbmm", "linear"}
"""Names of functions and methods whose operands must have one dtype."""


def names_in_forward(module: nn.Module) -> frozenset[str]:
    """The global names and attributes that the code of a module's `forward` uses."""
    code = _code(module)
    return frozenset() if code is None else frozenset(code.co_names)


def arguments_of_forward(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of a module's `forward`."""
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


def _library(module: nn.Module) -> str:
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    return owner.__module__.partition(".")[0]


def _code(module: nn.Module) -> CodeType | None:
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)
