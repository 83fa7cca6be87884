"""The arithmetic of low-precision storage: rounding, compensated addition, split weights, and random bits.

Everything is written once, in torch. The functions use only operators, `Tensor.view(dtype)`, `torch.where`, `sqrt_rn`
and `quiet_nan`, so that the same source runs on tensors (the `eager` backend) and can be traced and rendered as C or
Triton (`optim/backends`).
"""

from hf_lowprec.rounding.fp32_math import quiet_nan, sqrt_rn
from hf_lowprec.rounding.kahan import kahan_add
from hf_lowprec.rounding.low_bits import fp32_value
from hf_lowprec.rounding.modes import MODES, Mode, Rounding, State, StateRounding, mode_name, recommended_mode
from hf_lowprec.rounding.nearest import LOW_PRECISION_DTYPES, dtype_name, round_nearest
from hf_lowprec.rounding.random_bits import random_word, step_keys, stream_keys
from hf_lowprec.rounding.split import join, split
from hf_lowprec.rounding.stochastic import round_stochastic

__all__ = [
    "LOW_PRECISION_DTYPES",
    "MODES",
    "Mode",
    "Rounding",
    "State",
    "StateRounding",
    "dtype_name",
    "fp32_value",
    "join",
    "kahan_add",
    "mode_name",
    "quiet_nan",
    "random_word",
    "recommended_mode",
    "round_nearest",
    "round_stochastic",
    "split",
    "sqrt_rn",
    "step_keys",
    "stream_keys",
]
