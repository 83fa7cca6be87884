"""`TrainingArguments` → optimizer arguments: the words transformers hands over are strings, all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from transformers import TrainingArguments

from hf_lowprec.optim.optimizer import LowPrecisionOptimizer
from hf_lowprec.optim.registry import check_keywords, optimizer_factory
from hf_lowprec.optim.validation import keywords

CALLBACK_KEYS = ("keep_fp32", "grad_accumulation", "check_replicas_every")
ADAM_FIELDS = ("adam_beta1", "adam_beta2", "adam_epsilon")
_DTYPES = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float32": torch.float32, "fp32": torch.float32}
_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")


def optimizer_arguments(args: Any) -> tuple[type[LowPrecisionOptimizer], dict[str, Any]]:
    """The optimizer class and arguments that `TrainingArguments` with one of our `optim` names ask for.

    `optim_args` wins over the dedicated fields (`adam_beta1`, …), which win over the class's defaults where they were
    changed from their own: Adam's 0.999 is not to become every algorithm's β2.

    A field that an algorithm has no place for is passed over, as Trainer does.

    Raises:
        ValueError: `optim_args` has an unknown key or a value that does not parse, or two betas were set for an
            algorithm of three; all are named.
    """
    name = optimizer_name(args)
    cls, kwargs = optimizer_factory(name)
    kwargs |= {"lr": args.learning_rate, "seed": args.seed}
    words = parse_optim_args(args.optim_args)
    check_keywords(words, [*_with_words(cls), *CALLBACK_KEYS], f"optim_args for optim={name!r}")
    kwargs |= _adam_fields(args, {key: value for key, value in keywords(cls).items() if key not in words})
    kwargs |= {key: _value(cls, key, word) for key, word in words.items() if key not in CALLBACK_KEYS}
    return cls, kwargs


def _with_words(cls: type[LowPrecisionOptimizer]) -> list[str]:
    """The arguments that a word can stand for; not those that are objects, as a list of parameters."""
    return [key for key, default in keywords(cls).items() if default is not None or key in _PARSERS]


def _adam_fields(args: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What Trainer's fields for Adam, where they were changed, say of an algorithm's arguments with these defaults."""
    own = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    changed = {name: getattr(args, name) for name in ADAM_FIELDS if getattr(args, name) != own[name]}
    found = {}
    if "eps" in defaults and "adam_epsilon" in changed:
        found["eps"] = changed["adam_epsilon"]
    if "betas" in defaults and (given := changed.keys() & {"adam_beta1", "adam_beta2"}):
        if len(defaults["betas"]) != 2:
            raise ValueError(
                f"{' and '.join(sorted(given))} cannot be used with optim={optimizer_name(args)!r}, whose betas are "
                f"{len(defaults['betas'])}: give optim_args='betas={_words(defaults['betas'])}'"
            )
        first, second = defaults["betas"]
        found["betas"] = (changed.get("adam_beta1", first), changed.get("adam_beta2", second))
    return found


def optimizer_name(args: Any) -> str:
    """The `optim` of `TrainingArguments` as text."""
    return str(getattr(args.optim, "value", args.optim))


def checked_arguments(args: Any) -> dict[str, Any]:
    """The optimizer's arguments; raises what building it would raise, before any model is touched."""
    cls, kwargs = optimizer_arguments(args)
    if args.optim_target_modules:
        raise ValueError(
            f"optim_target_modules={args.optim_target_modules!r} chooses the modules of GaLore and APOLLO; "
            f"optim={optimizer_name(args)!r} trains everything that requires a gradient: remove it"
        )
    if getattr(args, "cast_lm_head_to_fp32", False):  # of TRL's configurations; it widens what was rounded already
        raise ValueError(
            "cast_lm_head_to_fp32=True comes after the cast to 16 bits; set optim_args='keep_fp32=lm_head'"
        )
    param = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    cls([param], **{"first_parameter": 0, **kwargs})  # with a number, it is not counted among optimizers that train
    return kwargs


def callback_arguments(args: Any) -> dict[str, Any]:
    """What `optim_args` says to `LowPrecisionCallback`; patterns of `keep_fp32` are separated by `|`."""
    words = parse_optim_args(args.optim_args)
    parsers: Iterable[tuple[str, Callable[[str], Any]]] = zip(CALLBACK_KEYS, (_patterns, str, int), strict=True)
    return {key: _parsed(parse, key, words[key]) for key, parse in parsers if key in words}


def check_liger(args: Any, heads: Iterable[str]) -> None:
    """Raise ValueError, naming what to change, if `use_liger_kernel` cannot run.

    Args:
        args: as Trainer has them when training begins.
        heads: the modules that end the model in FP32.
    """
    if not args.use_liger_kernel:
        return
    if args.device.type == "cpu":
        raise ValueError("use_liger_kernel=True: Liger's Triton kernels do not run on a CPU; remove it")
    heads = ", ".join(heads)
    if heads and (args.liger_kernel_config or {}).get("fused_linear_cross_entropy", True):
        raise ValueError(
            f"use_liger_kernel=True multiplies 16-bit hidden states by the weight of {heads}, which is kept in FP32; "
            "set liger_kernel_config={'fused_linear_cross_entropy': False}"
        )


def parse_optim_args(text: str | None) -> dict[str, str]:
    """`"key=value,key=value"` as a dictionary of strings.

    Raises:
        ValueError: a part is not of the form `key=value`, or a key comes twice.
    """
    if not isinstance(text, str | None):
        raise ValueError(f"optim_args must be text, as 'key=value,key=value'; got {type(text).__name__}")
    words: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in (text or "").split(","))):
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if not (key and separator and value) or "=" in value:
            raise ValueError(f"optim_args: {part!r} is not of the form key=value (pairs are separated by commas)")
        if key in words:
            raise ValueError(f"optim_args names {key!r} twice")
        words[key] = value
    return words


def _value(cls: type[LowPrecisionOptimizer], key: str, word: str) -> Any:
    default = keywords(cls)[key]
    if isinstance(default, tuple):
        return _numbers(key, word, default)
    return _parsed(_PARSERS.get(key) or _BY_TYPE[type(default)], key, word)


def _parsed(parse: Callable[[str], Any], key: str, word: str) -> Any:
    try:
        return parse(word)
    except (ValueError, KeyError):
        raise ValueError(f"optim_args: {key}={word!r} does not parse; {_EXPECTED[parse]}") from None


def _numbers(key: str, word: str, default: tuple[float, ...]) -> tuple[float, ...]:
    try:
        numbers = tuple(map(float, word.split("|")))
    except ValueError:
        numbers = ()
    if len(numbers) != len(default):
        expected = f"give {len(default)} numbers as {_words(default)}"
        raise ValueError(f"optim_args: {key}={word!r} does not parse; {expected}")
    return numbers


def _words(numbers: tuple[float, ...]) -> str:
    return "|".join(map(str, numbers))


def _patterns(word: str) -> tuple[str, ...]:
    return tuple(pattern for pattern in word.split("|") if pattern)


def _bool(word: str) -> bool:
    if word.lower() not in _TRUE + _FALSE:
        raise ValueError(word)
    return word.lower() in _TRUE


def _dtype(word: str) -> torch.dtype:
    return _DTYPES[word.lower().removeprefix("torch.")]


def _dtypes(word: str) -> torch.dtype | Mapping[str, torch.dtype]:
    if ":" not in word:
        return _dtype(word)
    pairs = (pair.split(":") for pair in word.split("|"))
    return {name: _dtype(dtype) for name, dtype in pairs}


_PARSERS: dict[str, Callable[[str], Any]] = {"state_dtype": _dtypes, "max_grad_norm": float, "first_parameter": int}
_BY_TYPE: dict[type, Callable[[str], Any]] = {bool: _bool, int: int, float: float, str: str}
_EXPECTED: dict[Callable[[str], Any], str] = {
    _bool: "give True or False",
    int: "give an integer",
    float: "give a number",
    _dtypes: "give bfloat16, float32, or a dtype per state as exp_avg:bfloat16|exp_avg_sq:float32",
}
