"""The keyword arguments that all optimizers share, their values as text, and checks of values.

Every message names the argument, its value and what is valid. Checks of an argument of a parameter group are also told
`where` it is, such as "param group 0".
"""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, get_args

import torch

from hf_lowprec.rounding import Rounding, StateRounding, mode_name

Backend = Literal["auto", "triton", "native", "eager"]
"""The values of the argument `backend`."""

Clip = Literal["exact", "delayed"]
"""The values of the argument `clip`."""


class Shared(TypedDict, total=False):
    """The keyword arguments that every algorithm passes on to `LowPrecisionOptimizer`, which documents them."""

    rounding: Rounding
    state_dtype: torch.dtype | Mapping[str, torch.dtype] | None
    state_rounding: StateRounding
    seed: int
    first_parameter: int | None
    backend: Backend
    max_grad_norm: float | None
    skip_nonfinite: bool
    gradient_release: bool
    clip: Clip
    offload_states: bool
    offload_gradients: bool


def full_signature(algorithm: type, base: type) -> inspect.Signature:
    """The signature of `algorithm` with `**shared` replaced by the keywords of `base`.

    It makes `help()`, editors and `inspect.signature` show them. `LowPrecisionOptimizer.__init_subclass__` sets it.
    """
    parameters_of_init = inspect.signature(algorithm.__init__).parameters.values()  # type: ignore[misc]
    shared = inspect.signature(base.__init__).parameters  # type: ignore[misc]
    parameters = [p for p in parameters_of_init if p.name != "self" and p.kind is not p.VAR_KEYWORD]
    if algorithm.__init__ is not base.__init__ and any(p.kind is p.VAR_KEYWORD for p in parameters_of_init):  # type: ignore[misc]
        parameters += [shared[name] for name in Shared.__annotations__]
    return inspect.Signature(parameters)


def keywords(cls: Any) -> dict[str, Any]:
    """The keyword arguments of an optimizer class and their defaults. The result is cached: do not modify it."""
    return _keywords(cls)


@functools.cache  # a separate function, because to type checkers optimizer classes are not hashable
def _keywords(cls: Any) -> dict[str, Any]:
    parameters = inspect.signature(cls).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name != "params"}


_DTYPES = {
    **{"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float32": torch.float32, "fp32": torch.float32},
    "int8": torch.int8,
}
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_READERS: dict[type, Callable[[str], Any]] = {bool: lambda text: _BOOLEANS[text.lower()], int: int, float: float}
OPTIONAL: dict[str, type] = {"state_dtype": torch.dtype, "max_grad_norm": float, "beta1": float, "first_parameter": int}
"""The types of the arguments that can be None. The type of another argument is that of its default."""


def value_of(cls: Any, name: str, value: Any) -> Any:
    """The value of the argument `name` of the optimizer class `cls`, given as Python value or as text.

    Text is what configuration files and command lines hold: `"2e-5"`, `"false"`, `"0.9,0.95"`, `"int8"`, `"none"`.
    Sequences of numbers and dtypes by state may be of any class, and hold text. Everything else is returned as it is,
    even text that is no value of this argument: the checks of arguments refuse it.
    """
    if name in OPTIONAL and _is_none(value):
        return None
    if name == "rounding":
        return mode_name(value)
    if name == "state_dtype":
        if isinstance(value, str) and ":" in value:
            value = dict(item.partition(":")[::2] for item in split_items(value))
        return {key: dtype_of(each) for key, each in value.items()} if isinstance(value, Mapping) else dtype_of(value)
    default = keywords(cls).get(name, True if name in cls.flags else None)
    if isinstance(default, tuple):
        items = split_items(value) if isinstance(value, str) else value
        if not isinstance(items, Sequence):
            return value
        return tuple(None if None in default and _is_none(item) else _scalar(item, float) for item in items)
    return _scalar(value, OPTIONAL.get(name, type(default)))


def _is_none(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower() in ("none", "null")


def split_items(text: str) -> list[str]:
    """The items of a list or mapping as text: `a|b`, `a,b`, or as Python and YAML write it."""
    text = re.sub(r"[\s'\"]", "", text)
    return re.split(r"[,|]", re.sub(r"^[(\[{](.*)[)\]}]$", r"\1", text))


def dtype_of(value: Any) -> Any:
    """The dtype of states whose name is `value`. Other values are returned as they are."""
    return _DTYPES.get(value.strip().lower().removeprefix("torch."), value) if isinstance(value, str) else value


def _scalar(value: Any, kind: type) -> Any:
    try:
        return _READERS[kind](value.strip()) if isinstance(value, str) else value
    except (KeyError, ValueError):
        return value


LARGEST = torch.finfo(torch.float32).max
"""The largest finite FP32 number. Steps are computed in FP32, where larger numbers would be infinite."""
FOREIGN_ARGUMENTS = {
    "foreach": "a step handles all parameters together in any case; remove it",
    "fused": "every backend is fused, so there is nothing to choose; remove it",
    "capturable": "steps are not captured in CUDA graphs; remove it",
    "differentiable": "rounding has no useful gradient, so steps are not differentiable; remove it or use torch's",
    "kahan_sum": "the rounding mode is an argument of its own; use rounding='kahan'",
    "bf16_stochastic_round": "the rounding mode is an argument of its own; use rounding='stochastic'",
    "decouple_lr": "weight decay is multiplied by the learning rate; use weight_decay=d / lr with the highest lr",
}
"""Arguments of optimizers of torch, optimi and torchao → why ours do not have them, and what to do instead."""
EXECUTION_ARGUMENTS = {
    *("backend", "max_grad_norm", "skip_nonfinite", "gradient_release", "clip"),
    "offload_states",
    "offload_gradients",
}
"""Arguments that apply to the whole optimizer and cannot be set per parameter group."""


def check_range(name: str, value: Any, low: float, high: float = float("inf")) -> None:
    """Raise ValueError unless `value` is a real number with `low <= value < high` that FP32 can hold."""
    number = _as_float(value)
    if not (low <= number < high and abs(number) <= LARGEST):
        lower = "" if low == float("-inf") else f" >= {low:g}"
        upper = "" if high == float("inf") else f" and < {high:g}"
        finite = " that FP32 can hold (up to 3.4e38)" if abs(number) > LARGEST else ""
        raise ValueError(f"{name}={_short_repr(value)} is invalid; it must be a number{lower}{upper}{finite}")


def _as_float(value: Any) -> float:
    """Convert `value` to float; NaN unless it is one real number."""
    if type(value) is float:
        return value
    if hasattr(value, "item"):  # a tensor or a NumPy number
        try:
            value = value.item()
        except (RuntimeError, ValueError):
            return float("nan")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return float("nan")
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _short_repr(value: Any) -> str:
    """`repr(value)`, except for very large integers, which Python refuses to convert to decimal digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"<an integer of {value.bit_length()} bits>"
    return repr(value)


def check_betas(betas: Iterable[Any]) -> None:
    """Raise ValueError unless each of `betas` is a number in [0, 1)."""
    for k, beta in enumerate(betas):
        check_range(f"betas[{k}]", beta, 0.0, 1.0)


def check_one_of(name: str, value: Any, valid: tuple[str, ...], where: str = "") -> None:
    """Raise ValueError unless `value` is one of the strings in `valid`."""
    if value not in valid:
        raise ValueError(f"{name}={value!r}{_in(where)} is unknown; valid are {', '.join(map(repr, valid))}")


def check_boolean(name: str, value: Any, where: str = "") -> None:
    """Raise ValueError unless `value` is a Python or NumPy boolean."""
    cls = type(value)
    if cls is not bool and (cls.__module__, cls.__name__.rstrip("_")) != ("numpy", "bool"):
        raise ValueError(f"{name}={value!r}{_in(where)} is not True or False")


def _in(where: str) -> str:
    return f" in {where}" if where else ""


def check_integer(name: str, value: Any, where: str = "") -> None:
    """Raise ValueError unless `value` is an integer of any type; booleans do not count."""
    try:
        if isinstance(value, bool):
            raise TypeError
        operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r}{_in(where)} is not an integer") from None


def check_max_norm(name: str, value: Any) -> None:
    """Raise ValueError unless gradients can be clipped to the norm `value`, a number above 0."""
    check_range(name, value, 0.0)
    if value == 0:
        raise ValueError(f"{name}={value!r} would take no step at all; it must be greater than 0")


def check_execution_arguments(max_grad_norm: Any, skip_nonfinite: Any) -> None:
    """Raise ValueError if one of these `EXECUTION_ARGUMENTS` is invalid."""
    check_boolean("skip_nonfinite", skip_nonfinite)
    if max_grad_norm is not None:
        check_max_norm("max_grad_norm", max_grad_norm)


def check_gradient_release(gradient_release: Any, clip: Any, max_grad_norm: Any, skip_nonfinite: Any) -> None:
    """Raise ValueError if `gradient_release` or `clip` is invalid, or excluded by one of the other arguments."""
    check_boolean("gradient_release", gradient_release)
    check_one_of("clip", clip, get_args(Clip))
    if clip == "delayed" and not gradient_release:
        raise ValueError(
            "clip='delayed' is only for gradient_release=True; without it, clip='exact' clips by the norm of the step "
            "itself, at the same cost"
        )
    if clip == "delayed" and max_grad_norm is None:
        raise ValueError("clip='delayed' needs max_grad_norm, the norm to which it clips")
    if not gradient_release:
        return
    freed = "gradient_release=True frees gradients during the backward pass"
    if max_grad_norm is not None and clip == "exact":
        raise ValueError(
            f"max_grad_norm={max_grad_norm!r} with clip='exact' needs all gradients before the first parameter is "
            f"stepped, but {freed}; use clip='delayed', which clips by the norm of the step before, or StableAdamW, "
            "which clips each tensor's update by itself, without max_grad_norm"
        )
    if skip_nonfinite:
        raise ValueError(f"skip_nonfinite=True needs all gradients to decide, but {freed}; use one of the two")


def check_offload(offload_states: Any, offload_gradients: Any, backend: Any, gradient_release: Any) -> None:
    """Raise ValueError if one of the first two is invalid, or excluded by one of the other arguments."""
    check_boolean("offload_states", offload_states)
    check_boolean("offload_gradients", offload_gradients)
    if offload_gradients and not offload_states:
        raise ValueError("offload_gradients=True moves gradients to where the states are; add offload_states=True")
    if offload_gradients and gradient_release:
        raise ValueError(
            "offload_gradients=True keeps gradients on the host until step(), but gradient_release=True steps during "
            "the backward pass; use one of the two. gradient_release=True overlaps more, and needs no host memory for "
            "gradients; offload_gradients=True clips exactly and accumulates micro-batches"
        )
    if offload_states and backend == "triton":
        raise ValueError("backend='triton' steps on a GPU, but offload_states=True steps on the CPU; use 'auto'")


def check_unexpected_keywords(cls: type, unexpected: Iterable[str]) -> None:
    """Raise TypeError for the first of `unexpected`, the keywords that `cls` does not take, if there are any."""
    for name in unexpected:
        if name in FOREIGN_ARGUMENTS:
            raise TypeError(f"{cls.__name__} takes no {name}=: {FOREIGN_ARGUMENTS[name]}")
        near = difflib.get_close_matches(name, keywords(cls), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"{cls.__name__} got an unexpected keyword argument {name!r}{hint}")
