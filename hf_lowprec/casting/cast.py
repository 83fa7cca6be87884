"""`cast_model` plans a cast, carries it out and reports it; `uncast_model` undoes it."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_lowprec.casting.cast_plan import CastPlan, HookKind, TensorPlan, make_plan
from hf_lowprec.casting.cast_report import CastReport, dtype_totals
from hf_lowprec.casting.earlier_casts import check_model_and_dtype, marks_in, remove_mark, set_marks
from hf_lowprec.casting.fp32_rules import KeepFp32, as_entries
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
    install_output_conversion,
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
    "downcast outputs": install_output_conversion,
    "upcast outputs": lambda module, dtype: install_output_conversion(module, torch.float32),
    "downcast inputs": install_input_downcast,
    "loss function in FP32": lambda module, dtype: install_fp32_loss(module),
    "torch losses in FP32": lambda module, dtype: install_fp32_torch_losses(module),
    "warn of 16-bit losses": lambda module, dtype: install_loss_warning(module),
}
"""The function that installs each kind of hook; it returns whether the hook is new."""


def cast_model(
    model: nn.Module, dtype: torch.dtype | str = torch.bfloat16, keep_fp32: KeepFp32 = (), keep_low_bits: bool = True
) -> CastReport:
    """Cast a model to BF16 or FP16 in place, keep norms and other sensitive parts in FP32, and report what was done.

    **Cast to 16 bits**: all floating-point parameters and buffers that no rule keeps in FP32, and the gradients of
    these parameters. `Parameter` objects and tied weights are preserved. Quantized weights and their scales are not
    changed. Casting a model again changes nothing, unless modules were added to it.

    **Kept in FP32**, with every module that shares a tied weight with one of them:

    - norms, by class or by name;
    - rotary embeddings, Fourier features, and other modules with a buffer named `inv_freq`;
    - loss modules, by name, if they have no parameters or only scalar ones (a temperature);
    - biases that select experts, such as `e_score_correction_bias`, as single tensors;
    - layers that compute a matrix function that torch does not support in 16 bits, such as orthogonal parametrizations;
    - the modules listed in the model's `_keep_in_fp32_modules` and `_keep_in_fp32_modules_strict`;
    - a few transformers classes whose code computes in FP32;
    - quantized modules whose weights present themselves as FP32;
    - everything that `keep_fp32` matches.

    **Hooks** let modules of both dtypes work together:

    - A module kept in FP32 gets its inputs in FP32 and returns `dtype` to the next module. Losses and output heads
      return FP32; a head is what `get_output_embeddings()` returns, or the model's last layer if `keep_fp32` names it.
    - A model that holds 16-bit tensors, and each model inside it, rounds the activations among its arguments to
      `dtype`. Labels, targets, positions, timesteps, weights, counts and all tensors with fewer than two dimensions are
      not rounded; timesteps and guidance scales stay FP32 even where the `forward` of a model outside transformers
      converts them. What a module computes from such numbers is FP32, so the first call with some installs hooks on its
      children, which round their inputs. Make one such call before `torch.compile(fullgraph=True)`, and before any
      `torch.compile` if a model outside transformers takes integer timesteps.
    - The `loss_function` of transformers models and the distributions that they predict compute in FP32. So do torch's
      loss functions while `forward` runs in your own model, or in a module whose code names one of them. This adds
      about a microsecond to each torch call, and does not reach code inside `torch.utils.checkpoint`.

    If `forward` writes into an argument that a hook converts, or into a list or dict with such entries, the caller's
    object is updated when the call ends, except in code that torch has compiled and, for tensors, in
    `torch.inference_mode()`.

    Hooks run only when a module itself is called, not one of its other methods. If a module multiplies FP32 numbers by
    its own 16-bit parameters (`points @ self.weight`), pass those numbers in 16 bits.

    Args:
        model: any module on any device, meta included, before DDP or FSDP wraps it. Tensor parallelism may have made
            DTensors of its parameters, and transformers may have sharded it while loading it (`DistributedConfig`).
        dtype: `torch.bfloat16` or `torch.float16`, or its name as a string.
        keep_fp32: one or more entries, each a string or a module class. A string is a case-sensitive glob (`fnmatch`;
            `*` also matches dots) that must match the whole name of a module, parameter or buffer, or everything after
            one of the dots in it: `"lm_head"`, `"layers.0.*"`, `"*.mlp.down_proj"`. A module is kept with all its
            submodules. If the module that owns a matching tensor has no children, the whole module is kept; otherwise,
            only the tensor is kept, without hooks. A class keeps its instances.
        keep_low_bits: keep the low bits that the cast rounds off trainable FP32 parameters, and off FP16 ones that
            become BF16. This takes 2 bytes per parameter until the first step. An hf_lowprec optimizer with Kahan
            summation or split weights uses it as the first compensation or remainder; one in another rounding mode
            drops it. All ranks must have the same weights. Set it to False if no such optimizer follows and memory is
            short.

    Returns:
        A report of the dtypes, the parts kept in FP32 with reasons, and the hooks; `print` it.

    Raises:
        ValueError: `dtype` is unsupported or differs from that of an earlier cast; an entry of `keep_fp32` matches
            nothing, covers quantized weights, or names a tensor that an earlier cast has rounded; the model is already
            wrapped or prepared for training, or runs under autocast, or it has run since transformers sharded it.
        TypeError: an entry of `keep_fp32` is neither a string nor a module class.
    """
    dtype = check_model_and_dtype(model, dtype)
    entries = as_entries(keep_fp32)
    report = _carry_out(make_plan(model, dtype, entries), model, keep_low_bits)
    set_marks(model, dtype, entries)
    return report


@torch.no_grad()
def cast_like_trained(
    model: nn.Module, trained: nn.Module | None, cast: Callable[[nn.Module], CastReport]
) -> CastReport:
    """Cast a model that is evaluated alongside the trained one, such as a reference, a teacher or a judge.

    Without a cast, it would compute in the dtype in which it was loaded, and a reference that is a copy of the trained
    model would give different log-probabilities.

    TRL loads a reference in the trained model's dtype, which rounds the reference's norms to 16 bits; in the trained
    model, they are FP32. So a tensor of `model` that the cast has upcast takes the value of the tensor with the same
    name in `trained` if the two differ only by rounding.

    Args:
        model: the model to cast, not sharded yet.
        trained: the model being trained, already cast; None if there is none.
        cast: a function that casts a model in place.

    Returns:
        The report of `cast`.
    """
    report = cast(model)
    tensors, exact_tensors = model.state_dict(), {} if trained is None else trained.state_dict()
    for name, loaded_dtype in report.upcast.items():
        exact, rounded = exact_tensors.get(name), tensors.get(name)
        if exact is None or rounded is None or exact.shape != rounded.shape:
            continue
        exact = exact.to(rounded.device, torch.float32)
        if torch.equal(exact.to(loaded_dtype).float(), rounded):
            rounded.copy_(exact)
    return report


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


def _carry_out(plan: CastPlan, model: nn.Module, keep_low_bits: bool) -> CastReport:
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
        changed=_install_hooks(model, plan) or bool(converted or restored),
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
        module: the module that owns the table; transformers' code recomputes it from `module.config`.
        attribute: the table's name in `module`.
        table: the buffer, in FP32 already; changed in place.

    Returns:
        "lost" if the table looks rounded and the config gives other values.
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
    """Build a second module of that class from the same config, and return its buffer."""
    try:
        with torch.device("cpu"):
            second: Any = type(module)(module.config)  # type: ignore[arg-type]
    except Exception:  # the constructor may be user code
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
    """Do what `convert_in_place` does for a DTensor: assigning to `.data` would leave its description unchanged."""
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


def _install_hooks(model: nn.Module, plan: CastPlan) -> bool:
    """Install the planned hooks that are not there yet. Return whether any was missing.

    If a model has become part of a larger one, the upcast of its outputs is removed: the larger model takes 16 bits.
    """
    tree = ModuleTree.of(model)
    removed = [remove_model_output_upcast(module) for module in tree.modules.values() if module is not tree.root]
    for module in tree.modules.values() if any(removed) else ():
        forget_numbers(module)
    new = [INSTALL[hook.kind](tree.modules[hook.module], plan.dtype) for hook in plan.hooks]
    return any(removed) or any(new)
