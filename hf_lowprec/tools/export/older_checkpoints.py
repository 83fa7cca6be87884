"""Finds the names of an optimizer's parameters by their order, for checkpoints that do not have the names.

Trainer and most scripts pass the parameters in the order of the model. That this was so is checked against the values:
a compensation is smaller than the spacing of its weight, which the compensation of another weight is not everywhere.
Remainders do not show whose they are; checkpoints that have them also have names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel, Trainer

from hf_lowprec.integrations.checkpoint_files.stored_optimizer import StoredOptimizer, StoredParameter
from hf_lowprec.rounding.nearest import spacing
from hf_lowprec.tools.export.weight_layout import WeightLayout

_FEWEST = 256
"""The number of elements of a compensation that are not zero, below which its size shows nothing."""


def names_by_order(
    optimizer: StoredOptimizer, model: PreTrainedModel, belongs: Callable[[StoredParameter, str], bool]
) -> list[list[str | None]] | None:
    """The names of the parameters of each group in the first usual order in which all `belongs`; None if none does."""
    for names in _usual_orders(model):
        if [*map(len, names)] == [*map(len, optimizer.parameters)] and all(
            belongs(parameter, name)
            for of_group, group in zip(names, optimizer.parameters, strict=True)
            for name, parameter in zip(of_group, group, strict=True)
        ):
            return [[*of_group] for of_group in names]
    return None


def _usual_orders(model: PreTrainedModel) -> Iterator[list[list[str]]]:
    """The names of a model's parameters, grouped as Trainer does, and ungrouped."""
    names = [name for name, _ in model.named_parameters()]
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    yield [[name for name in names if name in decayed], [name for name in names if name not in decayed]]
    yield [names]


def compensation_belongs(layout: WeightLayout, parameter: StoredParameter, name: str) -> bool:
    """Return whether the compensation of `parameter`, if there is one, can be that of the weight `name`."""
    info = layout.infos.get(name)
    if info is None:
        return False
    if parameter.compensation is None:
        return parameter.low_bits is None and info.dtype == torch.float32
    stored = parameter.infos[parameter.compensation]
    if stored.shape != info.shape or not stored.dtype.is_floating_point:
        return False
    compensation, weight = parameter.read(parameter.compensation), layout.read(name)
    fits = compensation.float().abs() <= spacing(weight, weight.dtype)
    return bool(fits.all()) and int(compensation.count_nonzero()) >= _FEWEST
