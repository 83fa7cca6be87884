"""Former paths of classes and functions: pickles of earlier versions refer to them, and must load."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

_ACCELERATOR = "hf_lowprec.integrations.accelerate.accelerator"
FORMER_NAMES: dict[str, dict[str, str]] = {
    "hf_lowprec.integrations.accelerator": {
        "_Method": "hf_lowprec.integrations.wrapped_method.WrappedMethod",
        "_Models": f"{_ACCELERATOR}.PreparedModels",
        "_prepare": f"{_ACCELERATOR}._prepare",
        "_prepare_model": f"{_ACCELERATOR}._prepare_model",
        "_prepare_optimizer": f"{_ACCELERATOR}._prepare_optimizer",
        "_no_sync": f"{_ACCELERATOR}._no_sync",
        "_clip_grad_norm_": f"{_ACCELERATOR}._clip_grad_norm_",
    },
    "hf_lowprec.integrations.callback": {
        "LowPrecisionCallback": "hf_lowprec.integrations.transformers.callback.LowPrecisionCallback",
    },
    "hf_lowprec.integrations.rank_comparison": {
        "RankComparison": "hf_lowprec.integrations.accelerate.rank_comparison.RankComparison",
    },
}
"""Former module -> former name -> where the object is defined now."""


def install() -> None:
    """Put stand-ins for the former modules into `sys.modules`, so that unpickling finds them. Imports nothing yet."""
    for path, names in FORMER_NAMES.items():
        vars(sys.modules.setdefault(path, ModuleType(path)))["__getattr__"] = _Lookup(names)


class _Lookup:
    """The `__getattr__` of a former module."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def __call__(self, name: str) -> Any:
        if name not in self._names:
            raise AttributeError(f"{name!r} is not a former name of hf_lowprec")
        module, _, attribute = self._names[name].rpartition(".")
        return getattr(import_module(module), attribute)
