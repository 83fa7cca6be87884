"""Finds weight matrices that are FP32 in a 16-bit model although no rule of the cast keeps them there."""

from __future__ import annotations

from torch import nn

from hf_lowprec.casting import make_plan
from hf_lowprec.monitor.tensor_names import parameter_kinds
from hf_lowprec.rounding import LOW_PRECISION_DTYPES

_KEPT_BY_PEFT = "modules_to_save"


def uncast_matrices(model: nn.Module) -> list[str]:
    """The names of trained FP32 matrices that `cast_model` would cast, if the other trained matrices are 16-bit.

    Adapters, and the trained copies of modules that PEFT makes, are FP32 on purpose. Entries of `keep_fp32` of earlier
    casts are respected.
    """
    matrices = {name: param for name, param in model.named_parameters() if param.requires_grad and param.dim() >= 2}
    kinds = parameter_kinds({name: param.shape for name, param in model.named_parameters()})
    narrow = [param for param in matrices.values() if param.dtype in LOW_PRECISION_DTYPES]
    wide = {
        name
        for name, param in matrices.items()
        if param.dtype.itemsize > 2 and kinds[name] not in ("norms", "adapters") and _KEPT_BY_PEFT not in name
    }
    if not wide or len(wide) >= len(narrow):
        return []
    plan = make_plan(model, narrow[0].dtype)
    return [tensor.name for tensor in plan.tensors if tensor.action == "cast" and tensor.name in wide]
