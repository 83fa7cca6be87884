"""The parameters that a monitor watches: names, kinds, values when training began, and which have had gradients."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.monitor.parameter_samples import ParameterSamples, row_size
from hf_lowprec.optim.gradient_release.collector import GradientCollector
from hf_lowprec.optim.sharding import flat_part, full_shape, local_shard, sharding_of
from hf_lowprec.rounding.modes import LOW_BITS_STATES
from hf_lowprec.tensor_names import layer_number, name_pattern, parameter_kinds

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
        is_cut: whether they are parts of parameters, others on each rank; see `FlatPart`.
        sample_size: elements that are sampled of each.
        gradients: which of them have had gradients in measured steps.
        first_weights: by row, the sampled weights as they were at the beginning, in their dtype.
        first_low_bits: by row, the sampled compensations or remainders as they were then.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module | None) -> None:
        self._optimizer = optimizer
        self.params: list[Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
        self.row = {param: row for row, param in enumerate(self.params)}
        self.is_cut = any(flat_part(param) is not None for param in self.params)
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
        for name in LOW_BITS_STATES:
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
        """The samples of `shards`, by row, on the device of the parameters; states may be on the host."""
        matrix = ParameterSamples(shards, self.sample_size).gather(shards).to(self.params[rows[0]].device)
        return dict(zip(rows, matrix.unbind(), strict=True))


def _names_and_kinds(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> tuple[list[str], list[str]]:
    """The name and the kind of each parameter, in the optimizer's order."""
    named = {} if model is None else {param: _plain_name(name) for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    named |= {param: _plain_name(part.name) for param in params if (part := flat_part(param)) is not None}
    names = [
        named.get(param, f"param_groups[{g}]['params'][{k}]")
        for g, group in enumerate(optimizer.param_groups)
        for k, param in enumerate(group["params"])
    ]
    kinds = parameter_kinds({name: full_shape(param) for param, name in named.items()})
    return names, [kinds.get(name, "other") for name in names]


def _plain_name(name: str) -> str:
    """A parameter's name without the wrappers of DDP, torch.compile and activation checkpointing."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


class GradientRecord:
    """Which parameters have had gradients in the measured steps, and of which of the others this is a mistake.

    In a quarter of transformers' model classes, some parameters have none by design: BERT's pooler if the loss does not
    use it, the last layer of LLaVA's vision tower, the cross-attention of a decoder on its own, an image tower while
    all inputs are texts. So a missing gradient alone is no reason to warn.

    Attributes:
        steps: the number of measured steps.
        present: for each parameter of the optimizer, whether it has had a gradient.
        nonzero: whether it has had one that is not zero.

    Args:
        names: the names of the optimizer's parameters.
        params: these parameters.
        model: the model, if it is known.
    """

    def __init__(self, names: Sequence[str], params: Sequence[Tensor], model: nn.Module | None) -> None:
        self.steps = 0
        self.present = [False] * len(names)
        self.nonzero = [False] * len(names)
        self._names = names
        self._params = params
        self._elements = sum(param.numel() for param in params)
        self._in_model = None if model is None else set(model.parameters())
        self._left_out = {} if model is None else parameters_left_out(model, params)
        self._left_out_present = [False] * len(self._left_out)

    def present_now(self, collector: GradientCollector | None) -> list[bool]:
        """Which parameters have a gradient now: those of the optimizer, then those that it lacks.

        Args:
            collector: has taken gradients that are in `param.grad` no more.
        """
        taken = (lambda param: False) if collector is None else collector.has_taken
        return [param.grad is not None or taken(param) for param in (*self._params, *self._left_out.values())]

    def add(self, present: Sequence[bool], nonzero: Sequence[bool]) -> None:
        """Add a measured step.

        Args:
            present: what `present_now` has returned before it.
            nonzero: for each parameter of the optimizer, whether its gradient was not zero.
        """
        self.steps += 1
        count = len(self._params)
        self.present = _either(self.present, present[:count])
        self._left_out_present = _either(self._left_out_present, present[count:])
        self.nonzero = _either(self.nonzero, nonzero)

    def left_out_of_optimizer(self) -> list[str]:
        """Parameters that have had a gradient, but the optimizer does not have them."""
        return [name for name, present in zip(self._left_out, self._left_out_present, strict=True) if present]

    def zero(self) -> list[str]:
        """Parameters whose gradients were all zero."""
        return self._select(lambda row: self.present[row] and not self.nonzero[row])

    def replaced(self) -> list[str]:
        """Parameters without gradient that the model does not have, or no longer."""
        in_model = self._in_model
        return [] if in_model is None else self._missing(lambda row: self._params[row] not in in_model)

    def cut_off(self) -> list[str]:
        """Parameters without gradient although the same tensor of a later layer has had one.

        What a task does not use are last layers; what `detach()` cuts off are first ones.
        """
        if all(self.present):  # nearly always, and names take time
            return []
        last_layer: dict[str, int] = defaultdict(lambda: -1)  # that has had a gradient, by pattern of names
        for name in self._select(self.present.__getitem__):
            last_layer[name_pattern(name)] = max(last_layer[name_pattern(name)], layer_number(name))
        return self._missing(lambda row: layer_number(self._names[row]) < last_layer[name_pattern(self._names[row])])

    def most_of_all(self) -> list[str]:
        """The parameters without gradient, if they have more than half of all elements."""
        missing = sum(param.numel() for param, present in zip(self._params, self.present, strict=True) if not present)
        return self._missing(lambda _: 2 * missing > self._elements)

    def _missing(self, condition: Callable[[int], bool]) -> list[str]:
        return self._select(lambda row: not self.present[row] and condition(row))

    def _select(self, condition: Callable[[int], bool]) -> list[str]:
        return [name for row, name in enumerate(self._names) if condition(row)]


def _either(earlier: Sequence[bool], now: Sequence[bool]) -> list[bool]:
    return [a or b for a, b in zip(earlier, now, strict=True)]


def parameters_left_out(model: nn.Module, params: Sequence[Tensor]) -> dict[str, nn.Parameter]:
    """The trainable parameters of a model that are not among an optimizer's `params`, if these are more than half.

    An optimizer with fewer was given them on purpose: another one trains the rest, or nothing does.
    """
    stepped = set(params)
    trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
    missing = {name: param for name, param in trainable.items() if param not in stepped}
    return missing if 2 * len(missing) < len(trainable) else {}
