"""Do all ranks train with the same settings? Digests are exchanged; the settings themselves only where they differ."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_lowprec.reduction.lost_ranks import exchanging
from hf_lowprec.rounding import dtype_name

_SHOWN = 3
"""How many differences, and how many ranks of one value, a message names."""

_MISSING = "missing"


def check_same_settings(settings: Mapping[str, Any]) -> None:
    """Compare settings between all ranks; every rank must call it.

    Args:
        settings: values by name, made of what `plain` returns.

    Raises:
        RuntimeError: on every rank, with the names and values of what differs and the ranks.
    """
    every = gather_where_different(dict(settings))
    if every is None:
        return
    names = dict.fromkeys(name for one in every for name in one)
    different = [found for name in names if (found := _difference(name, [_shown(one, name) for one in every]))]
    if different:
        more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        raise RuntimeError(
            f"ranks train with different settings: {'; '.join(different[:_SHOWN])}{more}. Replicas would "
            "diverge; give every rank the same settings"
        )


def gather_where_different(value: Any, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """`value` of every rank of `group` in rank order; None where all are the same, which costs 16 bytes per rank.

    Args:
        value: an object that pickles, and whose `repr` shows all of it.
        group: all ranks by default.

    Raises:
        RuntimeError: a rank was lost.
    """
    group = group or dist.group.WORLD
    assert group is not None
    digest = hashlib.blake2b(repr(value).encode(), digest_size=16).digest()
    digests: list[Any] = [None] * group.size()
    with exchanging(group, "comparing settings and weights"):
        dist.all_gather_object(digests, digest, group=group)
        if all(other == digest for other in digests):
            return None
        every: list[Any] = [None] * group.size()
        dist.all_gather_object(every, value, group=group)
    return every


def on_every_rank(value: Any, purpose: str = "comparing settings and weights") -> list[Any]:
    """`value` of every rank in rank order; without ranks, of this process alone.

    Args:
        value: an object that pickles.
        purpose: of the exchange, for the error.

    Raises:
        RuntimeError: a rank was lost.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    group = dist.group.WORLD
    assert group is not None
    values: list[Any] = [None] * group.size()
    with exchanging(group, purpose):
        dist.all_gather_object(values, value)
    return values


def model_settings(model: nn.Module) -> dict[str, Any]:
    """Names, dtypes, shapes and order of the parameters of a model that is not wrapped yet."""
    kind = type(model).__name__
    return {
        f"parameter {k} of {kind}": _described(name, param) + ("" if param.requires_grad else ", frozen")
        for k, (name, param) in enumerate(model.named_parameters())
    }


def optimizer_settings(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """Class of an optimizer, every setting of its groups and the order of its parameters, which have `names`."""
    cls = type(optimizer)
    settings: dict[str, Any] = {
        "the optimizer": f"{cls.__module__}.{cls.__qualname__}",
        "skip_nonfinite": getattr(optimizer, "skip_nonfinite", None),
        "the number of param_groups": len(optimizer.param_groups),
    }
    for k, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                settings[f"param_groups[{k}][{key!r}]"] = plain(value)
        for i, param in enumerate(group["params"]):
            settings[f"param_groups[{k}]['params'][{i}]"] = _described(names.get(param, "a parameter"), param)
    return settings


def plain(value: Any) -> Any:
    """`value` in objects that compare, pickle and print alike in every process; of others, the name of their class."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, torch.device):
        return value.type  # the index is each rank's own
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return type(value).__qualname__


def _described(name: str, param: Tensor) -> str:
    return f"{name}: {dtype_name(param.dtype)} {tuple(param.shape)}"


def _shown(settings: Mapping[str, Any], name: str) -> Any:
    return settings.get(name, _MISSING)


def _difference(name: str, values: list[Any]) -> str | None:
    """What the ranks have, `values` in rank order; None if all have the same."""
    if all(value == values[0] for value in values):
        return None
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(_MISSING if value is _MISSING else repr(value), []).append(rank)
    first, *others = (f"{value} on {named_ranks(found)}" for value, found in ranks.items())
    return f"{name} is {', '.join(others[:_SHOWN])} and {first}"


def named_ranks(ranks: list[int]) -> str:
    """`ranks` in words, the first of them by number."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"ranks {', '.join(map(str, ranks[:_SHOWN]))}{more}"
