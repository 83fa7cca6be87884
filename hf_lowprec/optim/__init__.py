"""Optimizers whose weights are stored in 16 bits: one file per algorithm, one shell, several backends."""

from hf_lowprec.optim.algorithms import ALGORITHMS
from hf_lowprec.optim.algorithms.adamw import AdamW
from hf_lowprec.optim.algorithms.sgd import SGD
from hf_lowprec.optim.base import LowPrecisionOptimizer

__all__ = ["ALGORITHMS", "SGD", "AdamW", "LowPrecisionOptimizer"]
