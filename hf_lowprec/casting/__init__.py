"""Cast a model to 16 bits in place, keeping in FP32 what needs it.

`cast_model` makes a plan, carries it out (`cast.py`) and returns a report (`cast_report.py`). The plan
(`cast_plan.py`) says which dtype every tensor gets, by the rules in `fp32_rules.py`, and which hooks let modules of
both dtypes work together. transformers is not imported: its modules are recognized by class name and attributes.
"""

from hf_lowprec.casting.cast import cast_model, uncast_model
from hf_lowprec.casting.cast_plan import CastPlan, make_plan
from hf_lowprec.casting.cast_report import CastReport
from hf_lowprec.casting.losses import return_float32

__all__ = ["CastPlan", "CastReport", "cast_model", "make_plan", "return_float32", "uncast_model"]
