"""Adds our optimizer names to those that `TrainingArguments(optim=…)` accepts, without importing Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.training_args import OptimizerNames

from hf_lowprec.oldest_versions import OLDEST, outdated
from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES, nearest_name
from hf_lowprec.wrapped_method import wrap_method


def check_versions() -> None:
    """Raise RuntimeError if the installed transformers or accelerate is too old for `optim=`."""
    for needed in filter(None, map(outdated, OLDEST)):
        raise RuntimeError(
            f"the optim= names of hf_lowprec need {needed}; install a newer one or, in a loop of your own, use the "
            "optimizer's class, such as hf_lowprec.AdamW(…, rounding='split')"
        )


def import_trainer() -> None:
    """Import Trainer before the modules of this package that import it: its import wraps it, which needs them ready."""
    import transformers.trainer  # noqa: F401


def add_optimizer_names() -> None:
    """Add our names to `OptimizerNames`, the enum whose members `TrainingArguments` accepts.

    There is no public way to extend an enum. Calling this again has no effect. Our members pickle as text, so that
    `training_args.bin` can be read without this package.
    """
    _explain_unknown_names()
    check_versions()
    for name in OPTIMIZER_NAMES:
        if name not in OptimizerNames._value2member_map_:
            _add_member(name)
    torch.serialization.add_safe_globals([str])  # for weights_only=True


def _add_member(name: str) -> None:
    member = str.__new__(OptimizerNames, name)
    member._name_, member._value_ = name.upper(), name
    member.__objclass__ = OptimizerNames
    member.__reduce_ex__ = lambda protocol: (str, (name,))
    member._sort_order_ = len(OptimizerNames._member_names_)
    OptimizerNames._member_names_.append(member._name_)
    OptimizerNames._member_map_[member._name_] = member
    OptimizerNames._value2member_map_[name] = member
    type.__setattr__(OptimizerNames, member._name_, member)


def _explain_unknown_names() -> None:
    """Let the error about an unknown name end with the closest known one, or with the reason why ours are unknown."""
    if "_missing_" in vars(OptimizerNames):
        return

    def missing(original: Callable, cls: type[OptimizerNames], value: Any) -> Any:
        if value in OPTIMIZER_NAMES:
            check_versions()
        try:
            return original(cls, value)
        except ValueError as error:
            near = nearest_name(str(value), map(str, cls._value2member_map_))
            raise ValueError(f"{error}" + (f". Did you mean {near!r}?" if near else "")) from None

    wrap_method(OptimizerNames, "_missing_", missing)
