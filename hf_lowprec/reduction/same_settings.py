"""Check that all ranks train with the same settings: model, optimizer and options.

Ranks exchange digests; the settings themselves are exchanged only if the digests differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.reduction.collectives import gather_if_different
from hf_lowprec.rounding import dtype_name

_SHOWN = 3
"""The number of differences, and of ranks with one value, that a message names."""

_MISSING = "missing"


def check_same_settings(settings: Mapping[str, Any]) -> None:
    """Check that all ranks have the same settings. Every rank must call it.

    Args:
        settings: values by name, as `to_plain_value` returns them.

    Raises:
        RuntimeError: settings differ. Raised on every rank; the message gives the names and values that differ, and
            the ranks that have them.
    """
    by_rank = gather_if_different(dict(settings))
    if by_rank is None:
        return
    names = dict.fromkeys(name for of_rank in by_rank for name in of_rank)
    differences = []
    for name in names:
        difference = _describe_difference(name, [of_rank.get(name, _MISSING) for of_rank in by_rank])
        if difference is not None:
            differences.append(difference)
    if differences:
        more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise RuntimeError(
            f"ranks train with different settings: {'; '.join(differences[:_SHOWN])}{more}. Replicas would "
            "diverge; use the same settings on every rank"
        )


def model_settings(model: nn.Module) -> dict[str, Any]:
    """The names, dtypes, shapes and order of a model's parameters, before DDP or FSDP2 wraps it."""
    cls = type(model).__name__
    return {
        f"parameter {k} of {cls}": _describe_parameter(name, param) + ("" if param.requires_grad else ", frozen")
        for k, (name, param) in enumerate(model.named_parameters())
    }


def optimizer_settings(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """An optimizer's class, all settings of its groups, and the order of its parameters.

    Args:
        optimizer: any optimizer with torch's interface.
        names: qualified names of the parameters.
    """
    cls = type(optimizer)
    settings: dict[str, Any] = {
        "the optimizer": f"{cls.__module__}.{cls.__qualname__}",
        "skip_nonfinite": getattr(optimizer, "skip_nonfinite", None),
        "gradient_release": getattr(optimizer, "gradient_release", None),
        "clip": getattr(optimizer, "clip", None),
        "the number of param_groups": len(optimizer.param_groups),
    }
    for k, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                settings[f"param_groups[{k}][{key!r}]"] = to_plain_value(value)
        for i, param in enumerate(group["params"]):
            settings[f"param_groups[{k}]['params'][{i}]"] = _describe_parameter(names.get(param, "a parameter"), param)
    return settings


def to_plain_value(value: Any) -> Any:
    """Convert a setting to built-in objects, which compare, pickle and print the same in every process.

    Objects of other types are represented by the name of their class.
    """
    if isinstance(value, Tensor):
        return to_plain_value(value.tolist())
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, torch.device):
        return value.type  # the index differs between ranks
    if isinstance(value, Mapping):
        return {str(key): to_plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_value(item) for item in value]
    return type(value).__qualname__


def _describe_parameter(name: str, param: Tensor) -> str:
    return f"{name}: {dtype_name(param.dtype)} {tuple(param.shape)}"


def _describe_difference(name: str, values: list[Any]) -> str | None:
    """Say which ranks have which value of a setting; None if all have the same. `values` are in rank order."""
    if all(value == values[0] for value in values):
        return None
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(_MISSING if value is _MISSING else repr(value), []).append(rank)
    first, *rest = (f"{value} on {_describe_ranks(having)}" for value, having in ranks.items())
    return f"{name} is {', '.join(rest[:_SHOWN])} and {first}"


def _describe_ranks(ranks: list[int]) -> str:
    """Name the first few of `ranks`, and the number of the others."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"ranks {', '.join(map(str, ranks[:_SHOWN]))}{more}"
