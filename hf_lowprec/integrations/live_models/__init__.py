"""What optimizers, which are given only parameters, learn from the live models of the process."""

from hf_lowprec.integrations.live_models.collect_after_reduction import collect_after_reduction
from hf_lowprec.integrations.live_models.setup_warnings import warn_before_first_step
from hf_lowprec.optim import LowPrecisionOptimizer


def add_checks() -> None:
    """Let every optimizer check the live models before its first gradient and step. Calling it again has no effect."""
    if warn_before_first_step not in LowPrecisionOptimizer.first_step_checks:
        LowPrecisionOptimizer.first_step_checks.append(warn_before_first_step)
        LowPrecisionOptimizer.first_gradient_checks.append(collect_after_reduction)
