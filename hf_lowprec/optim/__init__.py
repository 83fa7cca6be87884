"""Optimizers whose weights are stored in 16 bits: one file per algorithm, a common base class, several backends."""

from typing import TYPE_CHECKING

from hf_lowprec.optim.algorithms import ALGORITHMS
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer

if TYPE_CHECKING:  # for editors; at run time, every algorithm is found automatically
    from hf_lowprec.optim.algorithms.adafactor import Adafactor as Adafactor
    from hf_lowprec.optim.algorithms.adam import Adam as Adam
    from hf_lowprec.optim.algorithms.adamw import AdamW as AdamW
    from hf_lowprec.optim.algorithms.adan import Adan as Adan
    from hf_lowprec.optim.algorithms.lion import Lion as Lion
    from hf_lowprec.optim.algorithms.muon import Muon as Muon
    from hf_lowprec.optim.algorithms.prodigy import Prodigy as Prodigy
    from hf_lowprec.optim.algorithms.radam import RAdam as RAdam
    from hf_lowprec.optim.algorithms.schedulefreeadamw import ScheduleFreeAdamW as ScheduleFreeAdamW
    from hf_lowprec.optim.algorithms.sgd import SGD as SGD
    from hf_lowprec.optim.algorithms.stableadamw import StableAdamW as StableAdamW

__all__ = ["ALGORITHMS", "LowPrecisionOptimizer"]
__all__.extend(ALGORITHMS)
globals().update(ALGORITHMS)
