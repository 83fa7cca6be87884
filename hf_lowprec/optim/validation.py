"""Checks of param groups, and of the parameters and gradients in them.

`optimizer.py` calls the checks of groups, and `step/step_plan.py` those of parameters and gradients; `ParamEntry`
checks that a parameter, its gradient and its states match.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_lowprec.optim.arguments import EXECUTION_ARGUMENTS, LARGEST, Argument, hint
from hf_lowprec.optim.sharding import check_placements, full_shape, is_sharded, local_shard
from hf_lowprec.rounding import MODES

if TYPE_CHECKING:
    from hf_lowprec.optim.algorithm_interface import Algorithm, ParamGroup

PARAM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STATE_DTYPES = (torch.bfloat16, torch.float32, torch.int8)


def group_keys(optimizer: Algorithm) -> set[str]:
    """Return the arguments of `optimizer` that are keys of its param groups.

    `optimizer.defaults` may have further keys: torch adds some when an optimizer is unpickled.
    """
    return optimizer.defaults.keys() & optimizer.arguments.keys()


def check_new_group(optimizer: Algorithm, group: ParamGroup, where: str) -> None:
    """Raise ValueError if a new group has an unsupported key, setting or parameter.

    Args:
        optimizer: the optimizer to which it was added.
        group: the group, with defaults filled in.
        where: its name in messages, such as "param group 0".
    """
    check_group_keys(optimizer, group, where)
    Argument(float, default=0.0, ge=0).check("lr", group["lr"])
    check_group(optimizer, group, where)
    if optimizer.error_feedback and not optimizer.feeds_back(group):
        needed = "an update that is linear in a momentum"
        if not MODES[group["rounding"]].random:
            needed = "rounding='stochastic'"
        elif optimizer.feed_back and not optimizer.orthogonalizes(group):
            needed = "a momentum that decays"
        raise ValueError(
            f"error_feedback=True needs {needed}, which {where} of {type(optimizer).__name__} lacks; leave "
            "it out: errors are fed back wherever that is possible"
        )
    if not isinstance(group["lr"], Tensor) or group["lr"].device.type == "cpu":
        check_scalars(group, optimizer.scalars(group, float(group["lr"]), 1))
    for param in group["params"]:
        check_param(param, group, where)


def check_scalars(group: ParamGroup, scalars: Mapping[str, float]) -> None:
    """Raise ValueError if a step's scalar is not finite in FP32, although each hyperparameter is."""
    for name, value in scalars.items():
        if not abs(value) <= LARGEST:
            reason = "is not finite in FP32" if value != value else "FP32 cannot hold (up to 3.4e38)"
            raise ValueError(
                f"lr={group['lr']!r} and the other hyperparameters give {name}={value:g}, which {reason}; "
                "use smaller values"
            )


def check_group_keys(optimizer: Algorithm, group: ParamGroup, where: str) -> None:
    """Raise ValueError if a key of `group` is an argument that groups cannot have, or looks like a misspelled one.

    Other unknown keys belong to the user and are not checked.
    """
    name = type(optimizer).__name__
    arguments = group_keys(optimizer)
    for key in sorted(map(str, group.keys() - optimizer.defaults.keys() - arguments - {"params"})):
        if key in EXECUTION_ARGUMENTS:
            raise ValueError(f"{key!r} in {where} cannot be set per group; pass it to {name}(...)")
        if way_out := hint(key, arguments, cutoff=0.85):
            raise ValueError(f"{key!r} in {where} is not an argument of {name}{way_out}")


def check_group(optimizer: Algorithm, group: ParamGroup, where: str) -> None:
    """Raise ValueError if a setting of `group` is not supported. Its parameters are not checked.

    It is called before every step, since schedulers and users change groups.
    """
    if isinstance(group["state_rounding"], str) and group["state_rounding"].startswith("{"):
        raise ValueError(
            f"state_rounding={group['state_rounding']!r} in {where} comes from a group of state_dict(), which "
            "cannot be put into param_groups; use load_state_dict"
        )
    place = f" in {where}"
    arguments = optimizer.arguments
    for name, value in group.items():
        if name in arguments:
            arguments[name].check(name, value, place)
    if optimizer.offload_states and (optimizer.takes_means(group) or optimizer.orthogonalizes(group)):
        raise ValueError(
            f"{type(optimizer).__name__} needs whole tensors, so offload_states=True cannot step it; use AdamW or Adam "
            "without factored=True, RAdam, Lion, Adan or SGD"
        )
    optimizer.check_hyperparameters(group)
    _check_state_dtype(optimizer, group, where)


def requests_8_bits(group: ParamGroup) -> bool:
    """Return whether the `state_dtype` of `group` stores some states in 8 bits."""
    requested = group["state_dtype"]
    return torch.int8 in (requested.values() if isinstance(requested, Mapping) else [requested])


def _check_state_dtype(optimizer: Algorithm, group: ParamGroup, where: str) -> None:
    requested = group["state_dtype"]
    if requested is None:
        return
    states = optimizer.states(group)
    by_state = requested if isinstance(requested, Mapping) else {}
    if by_state:  # it may be meant for all groups, whose states may differ from this one's
        others = (optimizer.defaults | dict.fromkeys(optimizer.flags, flag) for flag in (True, False))
        possible = chain(states, *map(optimizer.states, others))
        names = dict.fromkeys(state.name for state in possible if state.dtype is None)
        for name in by_state.keys() - names.keys():
            raise ValueError(
                f"state_dtype names the state {name!r} in {where}; this optimizer has {', '.join(names) or 'none'}"
            )
    for dtype in by_state.values() if isinstance(requested, Mapping) else [requested]:
        if dtype is not None and dtype not in STATE_DTYPES:
            raise ValueError(
                f"state_dtype={dtype!r} in {where} is not supported; use bfloat16, float32 or int8, or one for each "
                "state, as in {'exp_avg': 'int8', 'exp_avg_sq': 'float32'}"
            )
    if requests_8_bits(group) and group["state_rounding"] == "nearest":
        raise ValueError(
            f"state_rounding='nearest' in {where} is not supported with state_dtype={requested!r}: states in 8 bits "
            "are always rounded stochastically; use state_rounding='stochastic', or state_dtype=torch.bfloat16"
        )
    for state in states:
        if not state.accumulates and by_state.get(state.name) == torch.int8:
            raise ValueError(
                f"state_dtype={requested!r} in {where} is not supported: {state.name} does not average over steps, so "
                "the errors of 8 bits would not average out; use torch.bfloat16 or torch.float32 for it"
            )


def check_param(param: Tensor, group: ParamGroup, where: str) -> None:
    """Raise ValueError if `param` cannot be stepped with the settings of `group`."""
    # Subclasses of Tensor other than DTensor store something other than the numbers that they represent.
    quantized = type(param.data) is not Tensor and not is_sharded(param)
    if (quantized or not param.is_floating_point() or param.itemsize == 1) and not param.requires_grad:
        return  # a frozen quantized weight, which is never stepped
    if param.device.type == "mps":
        raise ValueError(
            f"a parameter in {where} is on {param.device}, and Apple's GPUs have no FP64, which gradient norms and "
            "correctly rounded square roots need; train on the CPU: model.to('cpu'), or TrainingArguments(use_cpu=True)"
        )
    if quantized:
        raise ValueError(
            f"a parameter in {where} is quantized ({type(param.data).__name__} of {param.dtype}) and cannot be "
            "trained; freeze it (requires_grad_(False)) and train adapters"
        )
    check_placements(param, f"a parameter in {where}")
    if any(stride == 0 and size > 1 for stride, size in zip(param.stride(), param.shape, strict=True)):
        raise ValueError(f"a parameter in {where} is expanded: several elements share the same memory; clone it")
    if param.dtype not in PARAM_DTYPES:
        raise ValueError(
            f"a parameter in {where} has dtype {param.dtype}; supported are bfloat16, float16 and float32 (cast "
            "the model with cast_model, or pass only parameters of these dtypes)"
        )
    if param.dtype not in MODES[group["rounding"]].dtypes:
        raise ValueError(
            f"rounding={group['rounding']!r} in {where} does not support {param.dtype} parameters; use rounding='kahan'"
            " or cast the model to bfloat16"
        )


def warn_of_fp32_weights(optimizer: Algorithm) -> None:
    """Warn if all weights are FP32 although the rounding mode is only for BF16; a few FP32 vectors are norms."""
    modes = {group["rounding"] for group in optimizer.param_groups if optimizer.warns_of_fp32} & {"split", "stochastic"}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if modes and all(param.dtype == torch.float32 for param in params) and any(param.dim() > 1 for param in params):
        warnings.warn(
            f"rounding={min(modes)!r} has no effect on float32 parameters, and this {type(optimizer).__name__} has no "
            "others: it trains in plain FP32. Cast the model first: cast_model(model). If you want FP32, pass "
            "rounding='nearest'",
            RuntimeWarning,
            stacklevel=2,
        )


def check_apart(params: Mapping[int, Tensor]) -> None:
    """Raise ValueError if two parameters, by their position in the optimizer, share memory.

    Each would hold its own low bits for the same weights.
    """
    spans = []
    for index, param in params.items():
        part = local_shard(param)
        if part.is_contiguous() and (address := part.data_ptr()):  # 0 if empty or freed
            spans.append((str(part.device), address, address + part.nbytes, index))
    for (device, _, end, index), (other_device, begin, _, other) in pairwise(sorted(spans)):
        if device == other_device and begin < end:
            raise ValueError(
                f"parameters {index} and {other} are two objects that share memory; each would be stepped with its own "
                "low bits and moments. Tie them: let both names refer to one Parameter"
            )


def check_matrix(param: Tensor) -> None:
    """Raise ValueError unless `param` is a matrix or a stack of matrices."""
    if len(full_shape(param)) not in (2, 3):
        raise ValueError(
            f"Muon steps matrices and stacks of them, not a parameter of shape {tuple(param.shape)}; pass "
            "matrices=hf_lowprec.hidden_matrices(model), or put it in a group with use_muon=False"
        )


def check_gradient(grad: Tensor) -> None:
    """Raise RuntimeError unless `grad` is a dense tensor of a supported dtype."""
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"a gradient is sparse ({grad.layout}); only dense gradients are supported (for nn.Embedding: sparse=False)"
        )
    if grad.dtype not in PARAM_DTYPES:
        raise RuntimeError(f"a gradient has dtype {grad.dtype}; supported are bfloat16, float16 and float32")


def check_not_capturing() -> None:
    """Raise RuntimeError while a CUDA graph is captured: replays would repeat one step's scalars without its hooks."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph cannot capture a step, nor a backward pass with gradient_release or offload_gradients; end "
            "the capture before it"
        )
