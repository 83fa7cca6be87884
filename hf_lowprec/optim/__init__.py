"""Optimizers whose weights are stored in 16 bits: one file per algorithm, one shell, several backends."""

from hf_lowprec.optim.adamw import AdamW
from hf_lowprec.optim.base import LowPrecisionOptimizer
from hf_lowprec.optim.sgd import SGD

__all__ = ["SGD", "AdamW", "LowPrecisionOptimizer"]
