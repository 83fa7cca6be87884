"""Cast a model to 16 bits in place, keeping in FP32 what needs it.

`cast_model` makes a plan (`plan.py`: the dtype of every tensor by the rules in `fp32_rules/`, and the hooks that let
modules of both dtypes work together), carries it out (`apply.py`) and returns a report (`report.py`). transformers is
not imported: its modules are recognized by class name and attributes.
"""

from hf_lowprec.casting.cast import cast_model, uncast_model
from hf_lowprec.casting.fp32_outputs import return_float32
from hf_lowprec.casting.plan import CastPlan, make_plan
from hf_lowprec.casting.report import CastReport

__all__ = ["CastPlan", "CastReport", "cast_model", "make_plan", "return_float32", "uncast_model"]
