"""Modules whose quantized weights act as FP32 tensors stay in FP32: operations with 16-bit inputs would fail."""

from hf_lowprec.casting.fp32_rules.fp32_parts import Fp32Parts, Reason
from hf_lowprec.casting.module_tree import ModuleTree
from hf_lowprec.casting.quantized import acts_as_fp32


def quantized_as_fp32(tree: ModuleTree) -> Fp32Parts:
    """Keep every module that owns a quantized weight which acts as FP32."""
    parts = Fp32Parts()
    for target in tree.tensors:
        if acts_as_fp32(target.tensor):
            text = f"weights quantized as {type(target.tensor.data).__name__} of {target.tensor.dtype}"
            parts.modules |= {owner.module: Reason("quantized", text) for owner in target.owners}
    return parts
