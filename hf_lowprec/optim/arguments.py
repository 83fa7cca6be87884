"""The arguments of optimizers: one table says which values each takes, how text is read, and where it can be set.

`SHARED` has the keyword arguments of all optimizers, `COMMON` those of several algorithms. The `arguments` of an
algorithm say what is valid for its own; `complete_arguments` adds the defaults from the signature.

Every message names the argument, its value and what is valid.
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Literal, TypedDict, get_args, get_type_hints

import torch
from torch import Tensor

from hf_lowprec.rounding import Rounding, StateRounding, mode_name

Backend = Literal["auto", "triton", "native", "eager"]
"""The values of the argument `backend`."""

Clip = Literal["exact", "delayed"]
"""The values of the argument `clip`."""

LARGEST = torch.finfo(torch.float32).max
"""The largest finite FP32 number. Steps are computed in FP32, where larger numbers would be infinite."""

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_DTYPES = {
    **{"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float32": torch.float32, "fp32": torch.float32},
    "int8": torch.int8,
}
READERS: dict[Any, Callable[[str], Any]] = {
    float: float,
    int: int,
    bool: lambda text: _BOOLEANS[text.lower()],
    get_args(Rounding): mode_name,
}
"""Functions from text to value, by the kind of argument. Text of other kinds is the value."""


@dataclass(frozen=True)
class Argument:
    """The values that an argument takes.

    Attributes:
        kind: the type of its value, or of the items of a tuple: `float` for numbers that FP32 can hold, `int`, `bool`,
            `torch.dtype`, a tuple of names; `NoneType` for anything that text cannot express.
        default: its default. If it is None, None is valid; if it is a tuple, so are sequences of the same length.
        ge: numbers are at least this.
        gt: numbers are greater than this.
        lt: numbers are less than this.
        le: numbers are at most this.
        per_group: whether param groups can set it.
    """

    kind: Any
    default: Any = None
    ge: float = -math.inf
    gt: float = -math.inf
    lt: float = math.inf
    le: float = math.inf
    per_group: bool = True

    def value_of(self, given: Any) -> Any:
        """Return the value that is given as a Python value or as text.

        Text is what configuration files and command lines hold: `"2e-5"`, `"false"`, `"0.9,0.95"`, `"int8"`, `"none"`.
        Sequences and mappings may be of any class, and hold text. Anything else is returned unchanged, for `check` to
        refuse.
        """
        if not isinstance(self.default, tuple):
            return None if self.default is None and _is_none(given) else self._read(given)
        items = split_items(given) if isinstance(given, str) else given
        if not isinstance(items, Sequence):
            return given
        return tuple(None if None in self.default and _is_none(item) else self._read(item) for item in items)

    def _read(self, given: Any) -> Any:
        if self.kind is torch.dtype:
            if isinstance(given, str) and ":" in given:
                given = dict(item.partition(":")[::2] for item in split_items(given))
            if isinstance(given, Mapping):
                return {state: dtype_of(dtype) for state, dtype in given.items()}
            return dtype_of(given)
        if not isinstance(given, str):
            return bool(given) if _is_boolean(given) else given
        try:
            return READERS[self.kind](given.strip())
        except (KeyError, ValueError):
            return given

    def check(self, name: str, value: Any, place: str = "") -> None:
        """Raise ValueError unless `value` is valid. Dtypes are checked where the states are known.

        Args:
            name: the argument's name.
            value: its value.
            place: where it was found, for the message, such as `" in param group 0"`.
        """
        if not isinstance(self.default, tuple):
            if (value is not None or self.default is not None) and (problem := self._problem(value, place)):
                raise ValueError(f"{name}={value!r}{problem}")
            return
        if not isinstance(value, tuple | list) or len(value) != len(self.default):
            expected = f"{len(self.default)} numbers, as {self.default}"
            raise ValueError(f"{name}={value!r}{place} is invalid; it must be {expected}")
        for k, item in enumerate(value):
            if (item is not None or self.default[k] is not None) and (problem := self._problem(item, place)):
                raise ValueError(f"{name}[{k}]={item!r}{problem}")

    def _problem(self, value: Any, place: str) -> str:
        """Return what is wrong with one value, as the end of a message; empty if it is valid."""
        if self.kind is bool:
            return "" if _is_boolean(value) else f"{place} is not True or False"
        if isinstance(self.kind, tuple):
            return "" if value in self.kind else f"{place} is unknown; valid are {', '.join(map(repr, self.kind))}"
        if self.kind is int and not _is_integer(value):
            return f"{place} is not an integer"
        if self.kind is not float and self.kind is not int:
            return ""
        if type(value) is float or type(value) is int:
            number = value
        elif isinstance(value, Tensor) and value.device.type != "cpu" and value.numel() == 1:
            return ""  # never wait for a device in a step
        else:
            number = _as_float(value)
        too_large = self.kind is float and abs(number) > LARGEST
        if self.ge <= number < self.lt and self.gt < number <= self.le and not too_large:
            return ""
        limits = {">=": self.ge, ">": self.gt, "<": self.lt, "<=": self.le}
        words = " and ".join(f"{sign} {limit:g}" for sign, limit in limits.items() if math.isfinite(limit))
        noun = f"{'an integer' if self.kind is int else 'a number'} {words}".strip()
        return f" is invalid; it must be {noun}{' that FP32 can hold (up to 3.4e38)' if too_large else ''}"


def split_items(text: str) -> list[str]:
    """Return the items of a list or mapping in text: `a|b`, `a,b`, or as Python and YAML write it."""
    text = re.sub(r"[\s'\"]", "", text)
    return re.split(r"[,|]", re.sub(r"^[(\[{](.*)[)\]}]$", r"\1", text))


def dtype_of(value: Any) -> Any:
    """Return the state dtype that `value` names. Other values are returned unchanged."""
    return _DTYPES.get(value.strip().lower().removeprefix("torch."), value) if isinstance(value, str) else value


def _is_none(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower() in ("none", "null")


def _is_boolean(value: Any) -> bool:
    """Return whether `value` is a Python or NumPy boolean."""
    cls = type(value)
    return cls is bool or (cls.__module__ == "numpy" and cls.__name__ in ("bool", "bool_"))


def _is_integer(value: Any) -> bool:
    """Return whether `value` is an integer of any type; booleans do not count."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def _as_float(value: Any) -> float:
    """Convert `value` to float; NaN unless it is one real number, which may be a tensor."""
    try:
        value = value.item() if hasattr(value, "item") else value
        return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except (RuntimeError, ValueError, OverflowError):
        return math.nan


class Shared(TypedDict, total=False):
    """The keyword arguments of every optimizer, with their types; `LowPrecisionOptimizer` documents them."""

    rounding: Annotated[Rounding, Argument(get_args(Rounding), "split")]
    state_dtype: Annotated[torch.dtype | Mapping[str, torch.dtype] | None, Argument(torch.dtype)]
    state_rounding: Annotated[StateRounding, Argument(get_args(StateRounding), "stochastic")]
    seed: Annotated[int, Argument(int, 0)]
    first_parameter: Annotated[int | None, Argument(int, ge=0)]
    backend: Annotated[Backend, Argument(get_args(Backend), "auto", per_group=False)]
    error_feedback: Annotated[bool | None, Argument(bool, per_group=False)]
    max_grad_norm: Annotated[float | None, Argument(float, gt=0, per_group=False)]
    skip_nonfinite: Annotated[bool, Argument(bool, False, per_group=False)]
    gradient_release: Annotated[bool, Argument(bool, False, per_group=False)]
    clip: Annotated[Clip, Argument(get_args(Clip), "exact", per_group=False)]
    offload_states: Annotated[bool, Argument(bool, False, per_group=False)]
    offload_gradients: Annotated[bool, Argument(bool, False, per_group=False)]


_HINTS = get_type_hints(Shared, include_extras=True)
SHARED: dict[str, Argument] = {name: hint.__metadata__[0] for name, hint in _HINTS.items()}
COMMON = {
    "lr": Argument(float),  # schedulers may take it below zero, as in torch
    "betas": Argument(float, ge=0, lt=1),
    "eps": Argument(float, ge=0),
    "weight_decay": Argument(float, ge=0),
}
EXECUTION_ARGUMENTS = tuple(name for name, argument in SHARED.items() if not argument.per_group)
"""Arguments that apply to the whole optimizer and cannot be set per parameter group."""

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

_FREED = "gradient_release=True frees gradients during the backward pass"
EXCLUSIONS: list[tuple[Callable[[Any], bool], str]] = [
    (
        lambda given: given.clip == "delayed" and not given.gradient_release,
        "clip='delayed' is only for gradient_release=True; without it, clip='exact' clips by the norm of the step "
        "itself, at the same cost",
    ),
    (
        lambda given: given.clip == "delayed" and given.max_grad_norm is None,
        "clip='delayed' needs max_grad_norm, the norm to which it clips",
    ),
    (
        lambda given: given.gradient_release and given.clip == "exact" and given.max_grad_norm is not None,
        "max_grad_norm={max_grad_norm!r} with clip='exact' needs all gradients before the first parameter is stepped, "
        f"but {_FREED}; use clip='delayed', which clips by the norm of the step before, or StableAdamW, which clips "
        "each tensor's update by itself, without max_grad_norm",
    ),
    (
        lambda given: given.gradient_release and given.skip_nonfinite,
        f"skip_nonfinite=True needs all gradients to decide, but {_FREED}; use one of the two",
    ),
    (
        lambda given: given.offload_gradients and not given.offload_states,
        "offload_gradients=True moves gradients to where the states are; add offload_states=True",
    ),
    (
        lambda given: given.offload_gradients and given.gradient_release,
        "offload_gradients=True keeps gradients on the host until step(), but gradient_release=True steps during the "
        "backward pass; use one of the two. gradient_release=True overlaps more, and needs no host memory for "
        "gradients; offload_gradients=True clips exactly and accumulates micro-batches",
    ),
    (
        lambda given: given.offload_states and given.backend == "triton",
        "backend='triton' steps on a GPU, but offload_states=True steps on the CPU; use 'auto'",
    ),
]
"""Combinations of `EXECUTION_ARGUMENTS` that do not work, and what to do instead."""


def check_execution_arguments(optimizer: Any) -> None:
    """Raise ValueError if one of the `EXECUTION_ARGUMENTS` of `optimizer` is invalid, alone or with another one."""
    for name in EXECUTION_ARGUMENTS:
        SHARED[name].check(name, getattr(optimizer, name))
    for excluded, message in EXCLUSIONS:
        if excluded(optimizer):
            raise ValueError(message.format(max_grad_norm=optimizer.max_grad_norm))


def hint(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the end of a message about the unknown argument `name`: what to use instead, or the closest of `valid`."""
    if name in FOREIGN_ARGUMENTS:
        return f": {FOREIGN_ARGUMENTS[name]}"
    near = difflib.get_close_matches(name, valid, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def full_signature(cls: Any) -> Signature:
    """Return the signature of an optimizer class, with `SHARED` in place of `**shared`, for `help()` and editors."""
    parameters = list(signature(cls.__init__).parameters.values())[1:]  # without self
    if parameters[-1].kind is Parameter.VAR_KEYWORD:
        parameters[-1:] = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=argument.default, annotation=_HINTS[name].__origin__)
            for name, argument in SHARED.items()
        ]
    return Signature(parameters)


def complete_arguments(cls: Any) -> dict[str, Argument]:
    """Return the arguments of an optimizer class by name: those of its signature, without `params`, and its flags.

    `SHARED`, `COMMON` and the `arguments` of the class say what is valid; for other arguments, the default does.
    """
    known = {**SHARED, **COMMON}
    for base in reversed(cls.__mro__):
        known |= vars(base).get("arguments", {})
    defaults = {name: parameter.default for name, parameter in signature(cls).parameters.items() if name != "params"}
    defaults |= dict.fromkeys(cls.flags, True)
    kinds = {name: float if isinstance(default, tuple) else type(default) for name, default in defaults.items()}
    return {name: replace(known.get(name, Argument(kinds[name])), default=defaults[name]) for name in defaults}


def values_of(cls: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of arguments that are given as Python values or text. Other names are returned unchanged."""
    known = cls.arguments
    return {name: known[name].value_of(value) if name in known else value for name, value in given.items()}


def keywords(cls: Any) -> dict[str, Any]:
    """Return the keyword arguments of an optimizer class and their defaults."""
    return {name: argument.default for name, argument in cls.arguments.items() if name not in cls.flags}
