"""Carries out the plan of a cast: converts tensors, installs hooks, and reports what has changed; and undoes it."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_lowprec.casting.cast_plan import CastPlan, HookKind, TensorPlan
from hf_lowprec.casting.cast_report import CastReport, dtype_totals
from hf_lowprec.casting.earlier_casts import marks_in, remove_mark
from hf_lowprec.casting.input_downcast import forget_numbers, install_input_downcast
from hf_lowprec.casting.losses import (
    install_fp32_loss,
    install_fp32_torch_losses,
    install_loss_warning,
    remove_fp32_losses,
)
from hf_lowprec.casting.lost_digits import rounded_number_warnings, rounded_weight_warnings
from hf_lowprec.casting.module_hooks import (
    install_input_upcast,
    install_output_downcast,
    install_output_upcast,
    remove_hooks,
    remove_model_output_upcast,
)
from hf_lowprec.casting.module_kinds import is_rotary
from hf_lowprec.casting.module_tree import ModuleTree
from hf_lowprec.casting.quantized import frozen_tensors
from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.rounding.attached_low_bits import attach_rounded_off, remove_low_bits

INSTALL: dict[HookKind, Callable[[nn.Module, torch.dtype], bool]] = {
    "upcast inputs": lambda module, dtype: install_input_upcast(module),
    "downcast outputs": install_output_downcast,
    "upcast outputs": lambda module, dtype: install_output_upcast(module),
    "downcast inputs": install_input_downcast,
    "loss function in FP32": lambda module, dtype: install_fp32_loss(module),
    "torch losses in FP32": lambda module, dtype: install_fp32_torch_losses(module),
    "warn of 16-bit losses": lambda module, dtype: install_loss_warning(module),
}
"""The function that installs each kind of hook; it returns whether the hook is new."""


def apply_plan(model: nn.Module, plan: CastPlan, keep_low_bits: bool) -> CastReport:
    """Give every tensor its planned dtype, recompute rotary tables that had been rounded, and install the hooks.

    With `keep_low_bits`, trainable parameters that are cast from FP32, or from FP16 to BF16, keep what is rounded off.
    """
    already_cast = bool(marks_in(model))
    targets = [planned.target for planned in plan.tensors]
    dtypes_before, before = {target.name: target.tensor.dtype for target in targets}, dtype_totals(targets)
    number_warnings = list(rounded_number_warnings(plan))
    low_bits = [planned.name for planned in plan.tensors if _convert(planned, keep_low_bits)]
    tables = {
        planned.name: _restore_table(planned.target.owner, planned.name.rpartition(".")[2], planned.target.tensor)
        for planned in plan.tensors
        if planned.action == "keep" and is_rotary(planned.target.owner)
    }
    lost = [name for name, outcome in tables.items() if outcome == "lost"]
    restored = tuple(name for name, outcome in tables.items() if outcome == "recomputed")
    converted = [planned for planned in plan.tensors if dtypes_before[planned.name] != planned.dtype]
    upcast_inputs, downcast_outputs = plan.hooks_of("upcast inputs"), plan.hooks_of("downcast outputs")
    return CastReport(
        dtype=plan.dtype,
        cast=tuple(planned.name for planned in converted if planned.action == "cast"),
        kept=plan.kept,
        boundaries=tuple(upcast_inputs),
        inputs=tuple(plan.hooks_of("downcast inputs")),
        heads=plan.heads,
        losses=plan.losses,
        results={name: why for name, why in downcast_outputs.items() if name not in upcast_inputs},
        predictions=plan.hooks_of("upcast outputs"),
        upcast={planned.name: dtypes_before[planned.name] for planned in converted if planned.action == "keep"},
        restored=restored,
        low_bits=tuple(low_bits),
        untouched={planned.name: planned.reason for planned in plan.tensors if planned.action == "leave"},
        warnings=(
            *(f"{name} looks rounded to 16 bits and could not be recomputed" for name in lost),
            *rounded_weight_warnings(model, plan, dtypes_before),
            *number_warnings,
        ),
        before=before,
        after=dtype_totals(targets),
        already_cast=already_cast,
        changed=install_hooks(model, plan) or bool(converted or restored),
    )


def _convert(planned: TensorPlan, keep_low_bits: bool) -> bool:
    """Give a tensor its planned dtype. Return whether its low bits are kept."""
    tensor = planned.target.tensor
    stored = getattr(tensor, "ds_tensor", tensor)  # this rank's partition, under DeepSpeed's ZeRO 3
    exact = stored.data
    if planned.action != "leave":
        convert_in_place(tensor, planned.dtype)
    has_low_bits = planned.action == "cast" and planned.target.is_trainable and _has_more_digits(exact, stored.dtype)
    return keep_low_bits and has_low_bits and attach_rounded_off(stored, exact)


def _restore_table(module: nn.Module, attribute: str, table: Tensor) -> Literal["not rounded", "recomputed", "lost"]:
    """Recompute a table if all of its values fit 16 bits and the config gives the values they were rounded from.

    Args:
        module: owns the table; made again from `module.config`, as transformers makes it.
        attribute: the table's name in `module`.
        table: the buffer, in FP32 already; changed in place.

    Returns:
        "lost" if the table looks rounded and the config gives others.
    """
    if table.is_meta:
        return "not rounded"
    rounded_to = [dtype for dtype in LOW_PRECISION_DTYPES if torch.equal(table, table.to(dtype).float())]
    if not rounded_to:
        return "not rounded"
    exact = _table_from_config(module, attribute)
    if exact is None or not any(torch.equal(table.cpu(), exact.to(dtype).float()) for dtype in rounded_to):
        return "lost"
    if torch.equal(table.cpu(), exact):
        return "not rounded"
    table.data.copy_(exact)
    return "recomputed"


def _table_from_config(module: nn.Module, attribute: str) -> Tensor | None:
    """The buffer in a second module of that class, made from the same config."""
    try:
        with torch.device("cpu"):
            second: Any = type(module)(module.config)  # type: ignore[arg-type]
    except Exception:  # the constructor may be anyone's
        return None
    table = second._buffers.get(attribute)
    return table.float() if isinstance(table, Tensor) else None


def _has_more_digits(exact: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a cast of `exact` to `dtype` rounds: of FP32 to 16 bits, and of FP16 to BF16."""
    return torch.finfo(exact.dtype).eps < torch.finfo(dtype).eps and exact.dtype != torch.float64 and not exact.is_meta


def convert_in_place(tensor: Tensor, dtype: torch.dtype) -> None:
    """Convert a tensor and its gradient in place, since optimizers and tied modules hold the tensor object."""
    if hasattr(tensor, "device_mesh"):
        _convert_dtensor(tensor, dtype)
        return
    tensor.data = tensor.data.to(dtype)
    if hasattr(tensor, "ds_tensor"):  # under DeepSpeed's ZeRO 3, which leaves the parameter itself empty
        tensor.ds_tensor.data = tensor.ds_tensor.data.to(dtype)
    if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
        tensor.grad.data = tensor.grad.data.to(dtype)


def _convert_dtensor(tensor: Tensor, dtype: torch.dtype) -> None:
    """`convert_in_place` for a DTensor, whose description of itself an assignment to `.data` would leave as it is."""
    if tensor.dtype == dtype:
        return
    converted = tensor.detach().to(dtype)
    if isinstance(tensor, nn.Parameter):
        converted = nn.Parameter(converted, requires_grad=tensor.requires_grad)
        converted.grad = None if tensor.grad is None else tensor.grad.to(dtype)
    attributes = vars(converted)
    for name, value in vars(tensor).items():  # those of FSDP2 and transformers, for example
        attributes.setdefault(name, value)
    torch.utils.swap_tensors(tensor, converted)


def install_hooks(model: nn.Module, plan: CastPlan) -> bool:
    """Install the planned hooks that are not there yet. Return whether any was missing.

    If a model has become part of a larger one, the upcast of its outputs is removed: the larger model takes 16 bits.
    """
    tree = ModuleTree.of(model)
    removed = [remove_model_output_upcast(module) for module in tree.modules.values() if module is not tree.root]
    for module in tree.modules.values() if any(removed) else ():
        forget_numbers(module)
    new = [INSTALL[hook.kind](tree.modules[hook.module], plan.dtype) for hook in plan.hooks]
    return any(removed) or any(new)


def uncast_model(model: nn.Module) -> None:
    """Turn a cast model back into an FP32 model, in place: convert 16-bit tensors to FP32 and remove the hooks.

    Values that the cast has rounded stay rounded. `Parameter` objects and tied weights are preserved; quantized weights
    are not changed. A model that was not cast keeps its values and computes in FP32.
    """
    for module in model.modules():
        remove_hooks(module)
        forget_numbers(module)
        remove_fp32_losses(module)
        remove_mark(module)
    tensors = ModuleTree.of(model).tensors
    frozen = frozen_tensors(tensors)
    for target in tensors:
        if target.name not in frozen and target.tensor.dtype in LOW_PRECISION_DTYPES:
            convert_in_place(target.tensor, torch.float32)
            remove_low_bits(target.tensor)
