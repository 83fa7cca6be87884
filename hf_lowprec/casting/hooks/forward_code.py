"""Read the code of a module's `forward`: its arguments, the names it uses, whether it computes a loss."""

import inspect
from types import CodeType

from torch import nn

TORCH_LOSSES = {*nn.modules.loss.__all__, *(n for n in dir(nn.functional) if n.endswith(("_loss", "cross_entropy")))}
"""Names of torch's loss modules and functions."""


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
    return not TORCH_LOSSES.isdisjoint(names_in_forward(module))


def is_code_of_transformers(module: nn.Module) -> bool:
    """Return whether a module's `forward` comes from transformers, directly or inherited by a user's class."""
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    return owner.__module__.startswith("transformers.")


def _code(module: nn.Module) -> CodeType | None:
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)
