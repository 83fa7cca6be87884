"""The parameters that a monitor watches: their names and kinds, and their values when training began."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.diagnostics.parameter_kinds import parameter_kinds
from hf_lowprec.monitor.parameter_samples import ParameterSamples, row_size
from hf_lowprec.monitor.replayed_update import is_elementwise
from hf_lowprec.optim.foreign_states import COMPENSATIONS
from hf_lowprec.optim.sharding import local_shard, sharding_of

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
        kinds: the kind of each row, see `parameter_kinds.py`.
        sample_size: elements that are sampled of each.
        first_weights: by row, the sampled weights as they were at the beginning, in their dtype.
        first_compensations: by row, the sampled compensations or remainders as they were after the first step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module | None) -> None:
        self._optimizer = optimizer
        self.params: list[Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
        self.row = {param: row for row, param in enumerate(self.params)}
        self.names, self.kinds = _names_and_kinds(optimizer, model)
        self.sample_size = row_size(len(self.params), sum(param.numel() for param in self.params))
        self.first_weights: dict[int, Tensor] = {}
        self.first_compensations: dict[int, Tensor] = {}
        for rows in self.alike(range(len(self.params))):
            self.first_weights |= self._samples(rows, [local_shard(self.params[row]) for row in rows])

    def are_current(self) -> bool:
        """Return whether the optimizer still has the same parameters in the same order."""
        current = [param for group in self._optimizer.param_groups for param in group["params"]]
        return len(current) == len(self.params) and all(map(operator.is_, current, self.params))

    def alike(self, rows: Iterable[int], *keys: Any) -> list[list[int]]:
        """Divide `rows` by dtype, device and sharding of their parameters, and by each of `keys`."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for row in rows:
            param = self.params[row]
            groups[(param.dtype, param.device, sharding_of(param), *(key[row] for key in keys))].append(row)
        return list(groups.values())

    def record_first_compensations(self) -> None:
        """After the first step: take the compensations as those at the beginning, where there are none yet."""
        states = {row: self._optimizer.state.get(param, {}) for param, row in self.row.items()}
        for name in COMPENSATIONS:
            new = [
                row
                for row, state in states.items()
                if row not in self.first_compensations and is_elementwise(state.get(name), self.params[row])
            ]
            for rows in self.alike(new):
                self.first_compensations |= self._samples(rows, [local_shard(states[row][name]) for row in rows])

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
