"""Measures, for any optimizer, how much of each step reaches the stored weights and states."""

from hf_lowprec.monitor.precision_monitor import PrecisionMonitor
from hf_lowprec.monitor.rules import Finding
from hf_lowprec.monitor.step_precision import StepPrecision

__all__ = ["Finding", "PrecisionMonitor", "StepPrecision"]
