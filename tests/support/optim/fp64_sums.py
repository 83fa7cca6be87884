"""How far a backend's sum over a tensor, in FP64 or as pairs of FP32 numbers, may be from the exact sum."""

BOUND = 2.0**-41
"""Relative error that `square_sum` in `backends/triton/square_sum.py` derives for pairs of FP32 numbers."""
USUAL_ERROR = 2.0**-45
"""n additions in FP64 whose errors do not conspire are off by √n·2⁻⁵³; `eager` adds chunks of 2¹⁶, the others less."""
