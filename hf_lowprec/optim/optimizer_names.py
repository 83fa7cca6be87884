"""The registered `optim=` strings, and the optimizer class and keywords that each stands for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import torch

from hf_lowprec.optim.algorithms import ALGORITHMS
from hf_lowprec.optim.arguments import hint, keywords, values_of
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer
from hf_lowprec.rounding.modes import SHORT_NAMES

_CLASSES = {name.lower(): cls for name, cls in ALGORITHMS.items()}
SUFFIXES = {"kahan": "kahan", "split": "split", **SHORT_NAMES}
"""Rounding modes by the suffix of the registered name."""

OPTIMIZER_NAMES: tuple[str, ...] = tuple(f"{algorithm}_bf16_{suffix}" for algorithm in _CLASSES for suffix in SUFFIXES)
"""Every registered `optim=` string: `<algorithm>_bf16_<suffix>` for each algorithm and each of `SUFFIXES`."""


def optimizer_factory(name: str, **overrides: Any) -> tuple[type[LowPrecisionOptimizer], dict[str, Any]]:
    """Return the optimizer class and keyword arguments that an `optim=` string stands for.

    Pass the result as `Trainer(optimizer_cls_and_kwargs=…)`. Trainer then adds no keyword arguments, so pass `lr` here.
    Set `weight_decay` in `TrainingArguments`: Trainer writes it into every param group.

    Args:
        name: one of `OPTIMIZER_NAMES`.
        overrides: keyword arguments of the class. Values may be text.

    Returns:
        `(cls, kwargs)`, with Python values.

    Raises:
        ValueError: the name or a keyword is unknown, or a value is invalid.
        RuntimeError: `backend` cannot run here.
    """
    if name not in OPTIMIZER_NAMES:
        near = nearest_name(name, OPTIMIZER_NAMES)
        raise ValueError(
            f"optimizer name {name!r} is unknown{f' (did you mean {near!r}?)' if near else ''}; valid are "
            f"<algorithm>_bf16_<mode> with the algorithms {', '.join(_CLASSES)} and the modes {', '.join(SUFFIXES)}"
        )
    algorithm, suffix = name.split("_bf16_")
    cls = _CLASSES[algorithm]
    check_keywords(overrides, keywords(cls), f"{name!r}")
    kwargs = values_of(cls, {**cls.named_defaults, "rounding": SUFFIXES[suffix], **overrides})
    checked = {name: value for name, value in kwargs.items() if name != "matrices"}  # these are checked with `params`
    param = torch.zeros(1, 1, dtype=torch.bfloat16, device="cpu", requires_grad=True)
    # An explicit index, so that this optimizer is not counted when one-parameter optimizers are numbered.
    cls([param], **{"first_parameter": 0, **checked})
    return cls, kwargs


def nearest_name(name: str, valid: Iterable[str]) -> str | None:
    """Return the name in `valid`, which contains ours, that `name` may stand for, of the same algorithm if possible."""
    words = name.lower().replace("-", "_")
    algorithm, _, suffix = words.partition("bf16")
    algorithm, suffix = algorithm.strip("_"), suffix.strip("_")
    if algorithm not in _CLASSES:
        near = next(iter(difflib.get_close_matches(words, [*valid], n=1)), None)
        if near not in OPTIMIZER_NAMES or suffix:
            return near
        algorithm = near.partition("_bf16_")[0]
    # "split" if no mode is similar to the one that was meant.
    mode = difflib.get_close_matches(suffix, [*SUFFIXES, *SUFFIXES.values()], n=1) or ["split"]
    return next(f"{algorithm}_bf16_{short}" for short, full in SUFFIXES.items() if mode[0] in (short, full))


def check_keywords(names: Iterable[str], valid: Iterable[str], where: str) -> None:
    """Raise ValueError for the first of `names` that is not in `valid`, with the closest valid name or the way out."""
    valid = list(valid)
    for name in names:
        if name not in valid:
            raise ValueError(f"{name!r} is not an argument of {where}{hint(name, valid)}; valid are {', '.join(valid)}")
