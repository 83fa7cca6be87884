"""Cast a model to a 16-bit format in place, keeping what needs FP32 in FP32.

A kept module gets a boundary (floating inputs to FP32, floating outputs to the 16-bit format), so that its
neighbours see one format, and the model gets one for its inputs. transformers is not imported: its modules are
known by class name and attributes.
"""

from hf_lowprec.casting.cast import cast_model, uncast_model
from hf_lowprec.casting.outputs import return_float32
from hf_lowprec.casting.report import CastReport

__all__ = ["CastReport", "cast_model", "return_float32", "uncast_model"]
