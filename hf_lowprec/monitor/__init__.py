"""Measures, for any optimizer, how much of each step the stored weights and states take in."""

from hf_lowprec.monitor.findings_catalogue import Finding
from hf_lowprec.monitor.precision_monitor import PrecisionMonitor
from hf_lowprec.monitor.step_precision import StepPrecision

__all__ = ["Finding", "PrecisionMonitor", "StepPrecision"]
