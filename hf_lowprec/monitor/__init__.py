"""Measures, for any optimizer, how much of each step the stored weights and states take in.

Names are imported on first use, since `tensor_names.py` serves programs that need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_lowprec.monitor.findings_catalogue import Finding
    from hf_lowprec.monitor.precision_monitor import PrecisionMonitor
    from hf_lowprec.monitor.step_precision import StepPrecision

__all__ = ["Finding", "PrecisionMonitor", "StepPrecision"]

_DEFINED_IN = {
    "Finding": "findings_catalogue",
    "PrecisionMonitor": "precision_monitor",
    "StepPrecision": "step_precision",
}


def __getattr__(name: str) -> Any:
    if name in _DEFINED_IN:
        return getattr(import_module(f"hf_lowprec.monitor.{_DEFINED_IN[name]}"), name)
    raise AttributeError(f"module 'hf_lowprec.monitor' has no attribute {name!r}")
