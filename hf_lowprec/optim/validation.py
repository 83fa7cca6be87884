"""What the optimizers accept; every refusal names the argument, the value and what would be right."""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
import operator
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from hf_lowprec.optim.sharding import check_placements, is_sharded
from hf_lowprec.rounding import MODES

if TYPE_CHECKING:
    from hf_lowprec.optim.algorithm import Algorithm, ParamGroup

PARAM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STATE_DTYPES = (torch.bfloat16, torch.float32)
STATE_ROUNDINGS = ("stochastic", "nearest")
LARGEST = torch.finfo(torch.float32).max
"""The arithmetic is FP32: a larger number would be infinite there."""
IMPLEMENTATIONS = {"foreach", "fused", "differentiable"}
"""Arguments of torch's optimizers that choose between implementations of one step."""
_NOT_NEEDED = "every backend is fused, and steps are not differentiable"
EXECUTION = {"backend", "capturable", "max_grad_norm", "skip_nonfinite"}
"""Arguments of the optimizers that belong to no parameter group."""


def check_range(name: str, value: Any, low: float, high: float = float("inf")) -> None:
    """Raise ValueError unless `value` is a number with `low <= value < high` that is finite in FP32."""
    number = _number(value)
    if not (low <= number < high and abs(number) <= LARGEST):
        above = "" if low == float("-inf") else f" >= {low:g}"
        below = "" if high == float("inf") else f" and < {high:g}"
        hint = f"; give {float(value)!r} without the quotes" if isinstance(value, str) and _is_float(value) else ""
        held = " that FP32 can hold (up to 3.4e38)" if abs(number) > LARGEST else ""
        raise ValueError(f"{name}={_shown(value)} is invalid; it must be a number{above}{below}{held}{hint}")


def _number(value: Any) -> float:
    """`value` as a float; NaN if it is no real number, or more than one."""
    if type(value) is float:
        return value
    if hasattr(value, "item"):  # a tensor, or NumPy's
        try:
            value = value.item()
        except (RuntimeError, ValueError):
            return float("nan")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return float("nan")
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _shown(value: Any) -> str:
    """`repr` of a value that may be an integer of more digits than Python writes."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"<an integer of {value.bit_length()} bits>"
    return repr(value)


def check_betas(betas: Iterable[Any]) -> None:
    """Raise ValueError unless every one of `betas` is a decay rate in [0, 1)."""
    for k, beta in enumerate(betas):
        check_range(f"betas[{k}]", beta, 0.0, 1.0)


def check_execution(capturable: Any, max_grad_norm: Any, skip_nonfinite: Any) -> None:
    """Raise ValueError unless these arguments, which belong to no parameter group, make sense."""
    for name, value in (("capturable", capturable), ("skip_nonfinite", skip_nonfinite)):
        if not is_boolean(value):
            raise ValueError(f"{name}={value!r} is not True or False")
    if max_grad_norm is not None:
        check_max_norm("max_grad_norm", max_grad_norm)


def is_boolean(value: Any) -> bool:
    """Whether `value` is True or False, or NumPy's."""
    return isinstance(value, bool) or (type(value).__module__, type(value).__name__.rstrip("_")) == ("numpy", "bool")


def check_max_norm(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a norm to which gradients can be clipped."""
    check_range(name, value, 0.0)
    if value == 0:
        raise ValueError(f"{name}={value!r} would take no step at all; it must be above 0")


def keywords(cls: Any) -> dict[str, Any]:
    """The keyword arguments of an optimizer class, with their defaults; not to be changed."""
    return _keywords(cls)


@functools.cache  # apart, since type checkers do not take an optimizer class for hashable, which this asks for
def _keywords(cls: Any) -> dict[str, Any]:
    parameters = inspect.signature(cls).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name != "params"}


def group_keys(optimizer: Algorithm) -> set[str]:
    """The arguments of an optimizer that its parameter groups have; torch adds to the defaults of an unpickled one."""
    return optimizer.defaults.keys() & {*keywords(type(optimizer)), *optimizer.flags}


def check_keywords_of(cls: type, unexpected: Iterable[str]) -> None:
    """Raise TypeError, naming the first of `unexpected` and what to do, if there is one."""
    for name in unexpected:
        if name in IMPLEMENTATIONS:
            raise TypeError(f"{cls.__name__} takes no {name}=: {_NOT_NEEDED}; remove it")
        near = difflib.get_close_matches(name, keywords(cls), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"{cls.__name__} got an unexpected keyword argument {name!r}{hint}")


def check_new_group(optimizer: Algorithm, group: ParamGroup, where: str) -> None:
    """Raise ValueError unless `group`, which is being added, is as a group should be when training begins."""
    check_keys(optimizer, group, where)
    check_group(optimizer, group, where, least_lr=0.0)
    if not isinstance(group["lr"], Tensor) or group["lr"].device.type == "cpu":
        refuse_overflow(group, optimizer.scalars(group, float(group["lr"]), 1))
    for param in group["params"]:
        check_param(param, group, where)


def refuse_overflow(group: ParamGroup, scalars: Mapping[str, float]) -> None:
    """Raise ValueError if a factor of a step, made of hyperparameters that are finite in FP32, is not."""
    for name, value in scalars.items():
        if not abs(value) <= LARGEST:
            why = "is not finite in FP32" if value != value else "FP32 cannot hold (up to 3.4e38)"
            raise ValueError(
                f"lr={group['lr']!r} and the other hyperparameters give {name}={value:g}, which {why}; "
                "use smaller values"
            )


def check_keys(optimizer: Algorithm, group: ParamGroup, where: str) -> None:
    """Raise ValueError if a key of `group` asks for something that a group cannot have, or looks like a misspelt
    argument; other foreign keys are the user's affair.
    """
    known = group_keys(optimizer)
    name = type(optimizer).__name__
    given = group.keys() - optimizer.defaults.keys() - known  # torch adds to the defaults of an unpickled one
    for key in sorted(map(str, given - {"params"})):
        if key in IMPLEMENTATIONS:
            raise ValueError(f"{key!r} in {where} is not an option of {name}: {_NOT_NEEDED}; remove it")
        if key in EXECUTION:
            raise ValueError(f"{key!r} in {where} cannot be set per group; pass it to {name}(...)")
        if near := difflib.get_close_matches(key, known, n=1, cutoff=0.85):
            raise ValueError(f"{key!r} in {where} is not an argument of {type(optimizer).__name__}; is it {near[0]!r}?")


def check_group(optimizer: Algorithm, group: ParamGroup, where: str, least_lr: float = float("-inf")) -> None:
    """Raise ValueError if a setting of `group` is not supported; its parameters are not looked at.

    In training a scheduler may take the learning rate below zero, as with torch's optimizers.
    """
    check_one_of("rounding", group["rounding"], tuple(MODES), where)
    if isinstance(group["state_rounding"], str) and group["state_rounding"].startswith("{"):
        raise ValueError(
            f"state_rounding={group['state_rounding']!r} in {where} is of a group of state_dict(), which cannot be "
            "put into param_groups; use load_state_dict"
        )
    check_one_of("state_rounding", group["state_rounding"], STATE_ROUNDINGS, where)
    check_integer("seed", group["seed"], where)
    first = first_parameter(group)
    check_integer("first_parameter", first, where)
    if first < 0:
        raise ValueError(f"first_parameter={first!r} in {where} is invalid; it must be an integer >= 0")
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise ValueError(f"lr in {where} is a tensor of {group['lr'].numel()} elements; it must have one")
    if not isinstance(group["lr"], Tensor) or group["lr"].device.type == "cpu":  # no device is asked in a step
        check_range("lr", group["lr"], least_lr)
    for name, default in {**keywords(type(optimizer)), **dict.fromkeys(optimizer.flags, True)}.items():
        if isinstance(default, bool) and name in group and not is_boolean(group[name]):
            raise ValueError(f"{name}={group[name]!r} in {where} is not True or False")
        if isinstance(default, tuple) and name in group:
            _check_length(name, group[name], default, where)
    optimizer.check_hyperparameters(group)
    _check_state_dtype(group["state_dtype"], [state.name for state in optimizer.states(group)], where)


def first_parameter(group: ParamGroup) -> int:
    """The number of the first parameter of the optimizer of `group` in the random stream."""
    first = group.get("first_parameter")
    return 0 if first is None else first


def check_integer(name: str, value: Any, where: str) -> None:
    """Raise ValueError unless `value` is an integer, of any kind."""
    try:
        if isinstance(value, bool):
            raise TypeError
        operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} in {where} is not an integer") from None


def _check_length(name: str, value: Any, default: tuple[float, ...], where: str) -> None:
    if not isinstance(value, tuple | list) or len(value) != len(default):
        raise ValueError(f"{name}={value!r} in {where} is invalid; it must be {len(default)} numbers, as {default}")


def check_one_of(name: str, value: Any, valid: tuple[str, ...], where: str) -> None:
    """Raise ValueError if `value` is none of the words in `valid`."""
    if value not in valid:
        raise ValueError(f"{name}={value!r} in {where} is unknown; valid are {', '.join(map(repr, valid))}")


def _check_state_dtype(requested: Any, names: list[str], where: str) -> None:
    if isinstance(requested, Mapping):
        for name, dtype in requested.items():
            if name not in names:
                raise ValueError(
                    f"state_dtype names the state {name!r} in {where}; this optimizer has {', '.join(names) or 'none'}"
                )
            _check_state_dtype(dtype, names, where)
    elif requested is not None and requested not in STATE_DTYPES:
        raise ValueError(
            f"state_dtype={requested!r} in {where} is not supported; use torch.bfloat16 or torch.float32, or a mapping "
            "from state name to one of them"
        )


def check_param(param: Tensor, group: ParamGroup, where: str) -> None:
    """Raise ValueError if `param` cannot be stepped with the settings of `group`."""
    # The memory of a subclass that is no shard holds something else than the numbers that it presents.
    codes = type(param.data) is not Tensor and not is_sharded(param)
    if (codes or not param.is_floating_point() or param.itemsize == 1) and not param.requires_grad:
        return  # a quantized weight, frozen: no step reaches it
    if codes:
        raise ValueError(
            f"a parameter in {where} is quantized ({type(param.data).__name__} of {param.dtype}), and its codes cannot "
            "be stepped; freeze it (requires_grad_(False)) and train adapters"
        )
    check_placements(param, f"a parameter in {where}")
    if any(stride == 0 and size > 1 for stride, size in zip(param.stride(), param.shape, strict=True)):
        raise ValueError(f"a parameter in {where} is expanded: several elements share one place in memory; clone it")
    if param.dtype not in PARAM_DTYPES:
        raise ValueError(
            f"a parameter in {where} has dtype {param.dtype}; supported are bfloat16, float16 and float32 (cast_model "
            "casts a model, or pass only parameters of these dtypes)"
        )
    if param.dtype not in MODES[group["rounding"]].dtypes:
        raise ValueError(
            f"rounding={group['rounding']!r} in {where} does not support {param.dtype} parameters; use rounding='kahan'"
            " or cast the model to bfloat16"
        )


def check_placement(index: int, param: Tensor, other: Tensor) -> None:
    """Raise ValueError unless a gradient or state is distributed as its parameter is."""
    found, expected = (getattr(tensor, "placements", None) for tensor in (other, param))
    if found != expected:
        raise ValueError(
            f"parameter {index} is placed as {expected or 'a plain tensor'} and its gradient or a state as "
            f"{found or 'a plain tensor'}; these must agree (reduce the gradient first, or build a new optimizer)"
        )


def check_gradient(grad: Tensor) -> None:
    """Raise RuntimeError unless `grad` is a dense floating-point tensor."""
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"a gradient is sparse ({grad.layout}); these optimizers need dense ones (for nn.Embedding: sparse=False)"
        )
    if grad.dtype not in PARAM_DTYPES:
        raise RuntimeError(f"a gradient has dtype {grad.dtype}; supported are bfloat16, float16 and float32")


def check_compensation(index: int, param: Tensor, state: dict[str, Any]) -> None:
    """Raise ValueError if `param` became FP32 after steps in 16 bits: the compensation would be silently lost."""
    if param.dtype != torch.float32:
        return
    for name in {spec.name for mode in MODES.values() for spec in mode.auxiliary} & state.keys():
        raise ValueError(
            f"parameter {index} is float32 and its state has a {name!r}: it was cast after its first step. Add what it "
            f"holds to the weight, param.data.add_(optimizer.state[param].pop({name!r})), or build a new optimizer"
        )


def check_memory(group: ParamGroup, place: int, index: int, what: str, tensor: Tensor) -> None:
    """Raise RuntimeError if `tensor`, of a parameter at `place` of `group`, has memory that was freed."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size() if tensor.numel() else 0
    held = tensor.untyped_storage().nbytes()
    if held < needed:
        name = f" ({group['param_names'][place]})" if "param_names" in group else ""
        raise RuntimeError(
            f"parameter {index}{name} cannot be stepped: the memory of {what} was freed (its storage has {held} bytes "
            f"and {needed} are needed), as by untyped_storage().resize_(0); step while it is there"
        )


def refuse_mismatch(index: int, param: Tensor, state: dict[str, Any]) -> NoReturn:
    """Raise ValueError: the gradient or a state does not have the parameter's shape or device."""
    others = {"grad": param.grad, **{name: value for name, value in state.items() if name != "step"}}
    found = ", ".join(f"{name} {tuple(t.shape)} on {t.device}" for name, t in others.items() if t is not None)
    raise ValueError(
        f"parameter {index} has shape {tuple(param.shape)} on {param.device} and {found}: it was resized or moved "
        "after its first step; build a new optimizer, or change its state along"
    )


def state_dtype(name: str, param_dtype: torch.dtype, group: ParamGroup) -> torch.dtype:
    """The dtype in which a parameter of `param_dtype` stores its state `name`."""
    if param_dtype == torch.float32:
        return torch.float32
    requested = group["state_dtype"]
    if any(name == state.name for state in MODES[group["rounding"]].auxiliary):
        return torch.bfloat16
    if isinstance(requested, Mapping):
        return requested.get(name, torch.bfloat16)
    return requested or torch.bfloat16
