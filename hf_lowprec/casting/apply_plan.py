"""Carries out the plan of a cast: converts tensors and installs hooks."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_lowprec.casting.cast_plan import CastPlan, TensorPlan
from hf_lowprec.casting.earlier_casts import remove_mark, was_cast
from hf_lowprec.casting.fp32_rules import is_rotary
from hf_lowprec.casting.hooks.hook_placement import HookKind
from hf_lowprec.casting.hooks.input_downcast import forget_numbers, install_input_downcast, remove_input_downcast
from hf_lowprec.casting.hooks.losses import (
    install_fp32_loss,
    install_fp32_torch_losses,
    install_loss_warning,
    remove_fp32_loss,
    remove_fp32_torch_losses,
    remove_loss_warning,
)
from hf_lowprec.casting.hooks.module_hooks import (
    install_input_upcast,
    install_output_downcast,
    install_output_upcast,
    remove_conversion_hooks,
    remove_model_output_upcast,
)
from hf_lowprec.casting.lost_digits import LoadedTensor, rounded_number_warnings, rounded_weight_warnings
from hf_lowprec.casting.module_tree import ModuleTree
from hf_lowprec.casting.quantized import frozen_tensors, holds_quantized_weights
from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.rounding.attached_low_bits import attach_rounded_off, remove_low_bits

Restoration = Literal["not rounded", "recomputed", "lost"]

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


@dataclass(frozen=True)
class ConvertedTensors:
    """The result of converting a model's tensors."""

    cast: tuple[str, ...]  # tensors that were converted to 16 bits
    upcast: dict[str, torch.dtype]  # tensors that were converted to FP32 -> the dtype they came in
    restored: tuple[str, ...]  # rotary tables that were recomputed
    low_bits: tuple[str, ...]  # parameters whose low bits are kept
    warnings: tuple[str, ...]


def convert_tensors(model: nn.Module, plan: CastPlan, keep_low_bits: bool) -> ConvertedTensors:
    """Give every tensor its planned dtype, recompute rotary tables that had been rounded, and warn of lost digits.

    With `keep_low_bits`, trainable parameters that are cast from FP32, or from FP16 to BF16, keep what is rounded off.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    dtypes_before = {planned.name: planned.target.tensor.dtype for planned in plan.tensors}
    to_cast = [planned for planned in plan.tensors if planned.action == "cast"]
    maybe_numbers = {p.name: p.target.tensor for p in to_cast if not _is_buffer_of_transformers(p, modules)}
    number_warnings = tuple(rounded_number_warnings(maybe_numbers, plan.dtype))
    low_bits = [planned.name for planned in plan.tensors if _convert(planned, keep_low_bits)]
    tables = _restore_rotary_tables(plan, modules)
    converted = [planned for planned in plan.tensors if dtypes_before[planned.name] != planned.dtype]
    return ConvertedTensors(
        cast=tuple(planned.name for planned in converted if planned.action == "cast"),
        upcast={planned.name: dtypes_before[planned.name] for planned in converted if planned.action == "keep"},
        restored=tuple(name for name, outcome in tables.items() if outcome == "recomputed"),
        low_bits=tuple(low_bits),
        warnings=(
            *(
                f"{name} looks rounded to 16 bits and could not be recomputed"
                for name, outcome in tables.items()
                if outcome == "lost"
            ),
            *_loading_warnings(plan, modules, dtypes_before),
            *number_warnings,
        ),
    )


def _convert(planned: TensorPlan, keep_low_bits: bool) -> bool:
    """Give a tensor its planned dtype. Return whether its low bits are kept."""
    tensor = planned.target.tensor
    stored = getattr(tensor, "ds_tensor", tensor)  # this rank's partition, under DeepSpeed's ZeRO 3
    exact = stored.data
    if planned.action != "leave":
        convert_in_place(tensor, planned.dtype)
    has_low_bits = planned.action == "cast" and _is_trainable(tensor) and _has_more_digits(exact, stored.dtype)
    return keep_low_bits and has_low_bits and attach_rounded_off(stored, exact)


def _restore_rotary_tables(plan: CastPlan, modules: Mapping[str, nn.Module]) -> dict[str, Restoration]:
    """Recompute the rotary tables that were rounded before the cast: name → outcome."""
    return {
        planned.name: _restore_table(_owner(planned, modules), planned.name.rpartition(".")[2], planned.target.tensor)
        for planned in plan.tensors
        if planned.action == "keep" and is_rotary(_owner(planned, modules))
    }


def _restore_table(module: nn.Module, attribute: str, table: Tensor) -> Restoration:
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


def _loading_warnings(
    plan: CastPlan, modules: Mapping[str, nn.Module], dtypes_before: Mapping[str, torch.dtype]
) -> Iterable[str]:
    """The warning about tensors that were rounded when they were loaded; empty if there are none.

    `rounded_weight_warnings` finds them, by their dtypes in the checkpoint, among the candidates collected here. Rotary
    tables are none: they are recomputed.
    """
    # Norms of quantized models are loaded in 16 bits, as the guide says. They lose less by that than quantized weights.
    if any(map(holds_quantized_weights, modules.values())):
        return ()
    kept_in_fp32, trained_in_16_bits = list[LoadedTensor](), list[LoadedTensor]()
    for planned in plan.tensors:
        owner, tensor = _owner(planned, modules), planned.target.tensor
        loaded = LoadedTensor(planned.name, tensor, dtypes_before[planned.name])
        if planned.action == "keep" and not is_rotary(owner):
            kept_in_fp32.append(loaded)
        elif planned.action == "cast" and _is_trainable(tensor) and not was_cast(owner):
            trained_in_16_bits.append(loaded)
    return rounded_weight_warnings(modules.values(), kept_in_fp32, trained_in_16_bits)


def _owner(planned: TensorPlan, modules: Mapping[str, nn.Module]) -> nn.Module:
    return modules[planned.target.owners[0].module]


def _has_more_digits(exact: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a cast of `exact` to `dtype` rounds: of FP32 to 16 bits, and of FP16 to BF16."""
    return torch.finfo(exact.dtype).eps < torch.finfo(dtype).eps and exact.dtype != torch.float64 and not exact.is_meta


def _is_trainable(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _is_buffer_of_transformers(planned: TensorPlan, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a tensor is a buffer of a transformers class. These classes convert buffers where they need to."""
    owner = type(_owner(planned, modules))
    return not isinstance(planned.target.tensor, nn.Parameter) and owner.__module__.startswith("transformers.")


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


def remove_cast(model: nn.Module) -> None:
    """Remove all hooks and marks of casts, and convert 16-bit tensors to FP32, except for quantized data."""
    for module in model.modules():
        remove_conversion_hooks(module)
        remove_input_downcast(module)
        remove_loss_warning(module)
        remove_fp32_loss(module)
        remove_fp32_torch_losses(module)
        remove_mark(module)
    tensors = ModuleTree.of(model).tensors
    frozen = frozen_tensors(tensors)
    for target in tensors:
        if target.name not in frozen and target.tensor.dtype in LOW_PRECISION_DTYPES:
            convert_in_place(target.tensor, torch.float32)
            remove_low_bits(target.tensor)
