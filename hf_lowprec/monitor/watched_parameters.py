"""The parameters that a monitor watches: their names and kinds, and their values when training began."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.monitor.missing_gradients import GradientRecord
from hf_lowprec.monitor.parameter_samples import ParameterSamples, row_size
from hf_lowprec.optim.sharding import local_shard, sharding_of
from hf_lowprec.optim.state.states_of_other_libraries import COMPENSATIONS
from hf_lowprec.tensor_names import parameter_kinds

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


class WatchedParameters:
    """The parameters that an optimizer has now; a parameter's row is its position among them.

    Args:
        optimizer: the optimizer.
        model: the model, for names and kinds.

    Attributes:
        params: the parameters.
        row: the row of each.
        names: the name of each row.
        kinds: the kind of each row, see `tensor_names.py`.
        sample_size: elements that are sampled of each.
        gradients: which of them have had gradients in measured steps.
        first_weights: by row, the sampled weights as they were at the beginning, in their dtype.
        first_low_bits: by row, the sampled compensations or remainders as they were then.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module | None) -> None:
        self._optimizer = optimizer
        self.params: list[Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
        self.row = {param: row for row, param in enumerate(self.params)}
        self.names, self.kinds = _names_and_kinds(optimizer, model)
        self.sample_size = row_size(len(self.params), sum(param.numel() for param in self.params))
        self.gradients = GradientRecord(self.names, self.params, model)
        self.first_weights: dict[int, Tensor] = {}
        self.first_low_bits: dict[int, Tensor] = {}
        for rows in self.divide(range(len(self.params))):
            self.first_weights |= self._samples(rows, [local_shard(self.params[row]) for row in rows])
        self.record_first_low_bits()

    def is_current(self) -> bool:
        """Return whether the optimizer still has the same parameters in the same order."""
        current = [param for group in self._optimizer.param_groups for param in group["params"]]
        return len(current) == len(self.params) and all(map(operator.is_, current, self.params))

    def divide(self, rows: Iterable[int], *keys: Any) -> list[list[int]]:
        """Divide `rows` by dtype, device and sharding of their parameters, and by what each of `keys` maps them to."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for row in rows:
            param = self.params[row]
            groups[(param.dtype, param.device, sharding_of(param), *(key[row] for key in keys))].append(row)
        return list(groups.values())

    def low_bits(self, row: int) -> Tensor | None:
        """This rank's shard of the compensation or remainder that a parameter has now, if it has one."""
        param = self.params[row]
        state = self._optimizer.state.get(param, {})
        for name in COMPENSATIONS:
            tensor = state.get(name)
            if isinstance(tensor, Tensor) and tensor.shape == param.shape:
                return local_shard(tensor)
        return None

    def record_first_low_bits(self, rows: Iterable[int] | None = None) -> None:
        """Before a step: record the low bits of `rows`, or of all, that are new, or have a new dtype.

        A parameter's first step creates them, and so does its first one in another rounding mode.
        """
        rows = self.row.values() if rows is None else rows
        shards = {row: shard for row in rows if (shard := self.low_bits(row)) is not None}
        dtypes = {row: shard.dtype for row, shard in shards.items()}
        known = {row: first.dtype for row, first in self.first_low_bits.items()}
        for new in self.divide((row for row, dtype in dtypes.items() if dtype != known.get(row)), dtypes):
            self.first_low_bits |= self._samples(new, [shards[row] for row in new])

    def _samples(self, rows: list[int], shards: list[Tensor]) -> dict[int, Tensor]:
        """The samples of `shards`, by row."""
        matrix = ParameterSamples(shards, self.sample_size).gather(shards)
        return dict(zip(rows, matrix.unbind(), strict=True))


def _names_and_kinds(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> tuple[list[str], list[str]]:
    """The name and the kind of each parameter, in the optimizer's order."""
    named = {} if model is None else {param: _plain_name(name) for name, param in model.named_parameters()}
    names = [
        named.get(param, f"param_groups[{g}]['params'][{k}]")
        for g, group in enumerate(optimizer.param_groups)
        for k, param in enumerate(group["params"])
    ]
    kinds = parameter_kinds({name: param.shape for param, name in named.items()})
    return names, [kinds.get(name, "other") for name in names]


def _plain_name(name: str) -> str:
    """A parameter's name without the wrappers of DDP, torch.compile and activation checkpointing."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")
