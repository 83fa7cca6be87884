"""Parses `optim_args` into one `OptimArgs`, from which all other code reads its options.

transformers passes it as one string of pairs, `"key=value,key=value"`, so the value of every option is a string.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from hf_lowprec.integrations.transformers.rounding_schedule import EXPECTED, RoundingSchedule
from hf_lowprec.optim.arguments import keywords
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer
from hf_lowprec.optim.optimizer_names import check_keywords, optimizer_factory

_DTYPES = {
    **{"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float32": torch.float32, "fp32": torch.float32},
    "int8": torch.int8,
}
_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")


@dataclasses.dataclass(frozen=True)
class OptimArgs:
    """The parsed `optim_args`. Options that it does not set are empty or None.

    Attributes:
        optimizer: keyword arguments of the optimizer's class.
        keep_fp32: patterns of modules to keep in FP32, for `cast_model`.
        grad_accumulation: how the gradients of micro-batches are accumulated, for `prepare_accelerator`.
        check_replicas_every: steps between comparisons of replicas, for `LowPrecisionCallback`.
        rounding_schedule: the phases of `rounding`, if it has several; the optimizer is built in the mode of the first.
    """

    optimizer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keep_fp32: tuple[str, ...] = ()
    grad_accumulation: str | None = None
    check_replicas_every: int | None = None
    rounding_schedule: RoundingSchedule | None = None


def optim_args_of(args: Any) -> OptimArgs:
    """The `optim_args` of a `TrainingArguments` with one of our `optim` names.

    Raises:
        ValueError: a part is not of the form `key=value`, a key is unknown or repeated, or a value cannot be parsed.
    """
    if not isinstance(args.optim_args, str | None):
        raise ValueError(
            f"optim_args must be a string such as 'key=value,key=value'; got {type(args.optim_args).__name__}"
        )
    return _parsed_optim_args(optimizer_name(args), args.optim_args or "")


@functools.lru_cache(maxsize=16)  # both Trainer and transformers' dispatch table need it
def _parsed_optim_args(name: str, text: str) -> OptimArgs:
    cls, _ = optimizer_factory(name)
    try:
        options = _option_strings(text)
    except ValueError as error:
        raise ValueError(f"{error}{_separators_hint(name, text)}") from None
    check_keywords(options, [*_text_keywords(cls), *_CALLBACK_PARSERS], f"optim_args for optim={name!r}")
    optimizer, callback = {}, {}
    for key, value in options.items():
        if key in _CALLBACK_PARSERS:
            callback[key] = _parsed(_CALLBACK_PARSERS[key], key, value)
        else:
            optimizer[key] = _optimizer_option(cls, key, value)
    schedule = optimizer.get("rounding")
    if isinstance(schedule, RoundingSchedule):
        optimizer["rounding"] = schedule.phases[0].mode
        callback["rounding_schedule"] = schedule if len(schedule.phases) > 1 else None
    return OptimArgs(MappingProxyType(optimizer), **callback)


def optimizer_name(args: Any) -> str:
    """The `optim` of `TrainingArguments` as a string."""
    return str(getattr(args.optim, "value", args.optim))


def _option_strings(text: str) -> dict[str, str]:
    """`"key=value,key=value"` as a dictionary of strings."""
    options: dict[str, str] = {}
    for part in (part.strip() for part in text.split(",")) if text.strip() else ():
        if not part:
            raise ValueError(f"optim_args={text!r} has a comma with nothing before or after it; remove the comma")
        key, separator, value = (field.strip() for field in part.partition("="))
        if not (key and separator and value) or "=" in value:
            raise ValueError(f"optim_args: {part!r} is not of the form key=value (pairs are separated by commas)")
        if key in options:
            raise ValueError(f"optim_args names {key!r} twice")
        options[key] = value
    return options


def _separators_hint(name: str, text: str) -> str:
    """For several values of one key written as in Python, `betas=(0.9, 0.95)`, the text that can be parsed."""
    pairs: list[str] = []
    for part in re.sub(r"[\s'\"]", "", text).split(","):
        if "=" in part or not pairs:
            pairs.append(part)
        else:
            pairs[-1] += f"|{part}"
    corrected = ",".join(re.sub(r"=[(\[{](.*)[)\]}]$", r"=\1", pair) for pair in pairs)
    try:
        if corrected != text:
            _parsed_optim_args(name, corrected)
            return f"; several values of one key are separated by |: optim_args={corrected!r}"
    except ValueError:
        pass
    return ""


def _text_keywords(cls: type[LowPrecisionOptimizer]) -> list[str]:
    """The keyword arguments of `cls` that a string can express; a list of parameters, for example, is left out."""
    return [key for key, default in keywords(cls).items() if default is not None or key in _PARSERS]


def _optimizer_option(cls: type[LowPrecisionOptimizer], key: str, text: str) -> Any:
    """Parse the value of one of the optimizer's options. Its type is that of the default, unless that is None."""
    default = keywords(cls)[key]
    if isinstance(default, tuple):
        return _numbers(key, text, default)
    return _parsed(_PARSERS.get(key) or _PARSERS_BY_TYPE[type(default)], key, text)


def _parsed(parse: Callable[[str], Any], key: str, text: str) -> Any:
    try:
        return parse(text)
    except (ValueError, KeyError):
        raise ValueError(f"optim_args: {key}={text!r} cannot be parsed; {_EXPECTED[parse]}") from None


def _numbers(key: str, text: str, default: tuple[float, ...]) -> tuple[float, ...]:
    try:
        numbers = tuple(map(float, text.split("|")))
    except ValueError:
        numbers = ()
    if len(numbers) != len(default):
        expected = f"use {len(default)} numbers, as in {join_numbers(default)}"
        raise ValueError(f"optim_args: {key}={text!r} cannot be parsed; {expected}")
    return numbers


def join_numbers(numbers: tuple[float, ...]) -> str:
    """Several numbers as the string value of one option."""
    return "|".join(map(str, numbers))


def _patterns(text: str) -> tuple[str, ...]:
    return tuple(pattern for pattern in text.split("|") if pattern)


def _bool(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError(text)
    return text.lower() in _TRUE


def _dtype(text: str) -> torch.dtype:
    return _DTYPES[text.lower().removeprefix("torch.")]


def _dtypes(text: str) -> torch.dtype | Mapping[str, torch.dtype]:
    """Parse one dtype, or one per state as in `exp_avg:int8|exp_avg_sq:float32`."""
    if ":" not in text:
        return _dtype(text)
    pairs = (pair.split(":") for pair in text.split("|"))
    return {name: _dtype(dtype) for name, dtype in pairs}


_CALLBACK_PARSERS: dict[str, Callable[[str], Any]] = {
    "keep_fp32": _patterns,
    "grad_accumulation": str,
    "check_replicas_every": int,
}
"""Options of `LowPrecisionCallback`, not of the optimizer."""
_PARSERS: dict[str, Callable[[str], Any]] = {
    "state_dtype": _dtypes,
    "max_grad_norm": float,
    "first_parameter": int,
    "rounding": RoundingSchedule.parse,
}
"""Options of the optimizer whose default does not have the type of their values."""
_PARSERS_BY_TYPE: dict[type, Callable[[str], Any]] = {bool: _bool, int: int, float: float, str: str}
_EXPECTED: dict[Callable[[str], Any], str] = {
    _bool: "use True or False",
    int: "use an integer",
    float: "use a number",
    RoundingSchedule.parse: EXPECTED,
    _dtypes: "use bfloat16, float32, int8, or a dtype per state as in exp_avg:int8|exp_avg_sq:float32",
}
"""The end of the message when a parser fails."""
