"""The registered `optim=` strings, and the optimizer class and keywords that each stands for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from hf_lowprec.optim.algorithms import ALGORITHMS
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer
from hf_lowprec.optim.validation import keywords
from hf_lowprec.rounding.modes import SHORT_NAMES

_CLASSES = {name.lower(): cls for name, cls in ALGORITHMS.items()}
SUFFIXES = {"kahan": "kahan", **SHORT_NAMES}
"""Rounding modes by the suffix of the registered name."""

OPTIMIZER_NAMES: tuple[str, ...] = tuple(f"{algorithm}_bf16_{suffix}" for algorithm in _CLASSES for suffix in SUFFIXES)
"""Every registered `optim=` string: `<algorithm>_bf16_kahan` and `<algorithm>_bf16_sr` for each algorithm."""


def optimizer_factory(name: str, **overrides: Any) -> tuple[type[LowPrecisionOptimizer], dict[str, Any]]:
    """Return the optimizer class and keyword arguments that an `optim=` string stands for.

    Pass the result as `Trainer(optimizer_cls_and_kwargs=…)`. Trainer then adds no arguments of its own, so pass `lr`
    here.

    Args:
        name: one of `OPTIMIZER_NAMES`.
        overrides: keyword arguments of the class.

    Returns:
        `(cls, kwargs)`.

    Raises:
        ValueError: the name or a keyword is unknown.
    """
    if name not in OPTIMIZER_NAMES:
        raise ValueError(f"optimizer name {name!r} is unknown; valid are {', '.join(map(repr, OPTIMIZER_NAMES))}")
    algorithm, suffix = name.split("_bf16_")
    cls = _CLASSES[algorithm]
    check_keywords(overrides, keywords(cls), f"{name!r}")
    return cls, {"rounding": SUFFIXES[suffix], **overrides}


def check_keywords(names: Iterable[str], valid: Iterable[str], where: str) -> None:
    """Raise ValueError, with the closest valid name, for the first of `names` that is not in `valid`."""
    valid = list(valid)
    for name in names:
        if name not in valid:
            near = difflib.get_close_matches(name, valid, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"{name!r} is not an argument of {where}{hint}; valid are {', '.join(valid)}")
