"""Finds the names of an optimizer's parameters by their order, for checkpoints that do not have the names.

Trainer and most scripts pass the parameters in the order of the model. That this was so is checked against the values:
a compensation is smaller than the spacing of its weight, which the compensation of another weight is not everywhere.
Remainders do not show whose they are; checkpoints that have them also have names.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel, Trainer

from hf_lowprec.integrations.export.saved_optimizer import SavedParameter
from hf_lowprec.rounding.nearest import spacing
from hf_lowprec.tools.export.weight_layout import WeightLayout

_FEWEST = 256
"""The number of elements of a compensation that are not zero, below which its size shows nothing."""


def names_by_order(groups: list[list[SavedParameter]], layout: WeightLayout) -> list[list[str | None]] | None:
    """The names of the parameters of each group; None if no usual order fits the compensations.

    Args:
        groups: the parameters of each param group.
        layout: the model and its weights.
    """
    for names in usual_orders(layout.model):
        if [*map(len, names)] == [*map(len, groups)] and all(
            _belongs(parameter, layout, name)
            for of_group, group in zip(names, groups, strict=True)
            for name, parameter in zip(of_group, group, strict=True)
        ):
            return [[*of_group] for of_group in names]
    return None


def usual_orders(model: PreTrainedModel) -> Iterator[list[list[str]]]:
    """The names of a model's parameters, grouped as Trainer does, and ungrouped."""
    names = [name for name, _ in model.named_parameters()]
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    yield [[name for name in names if name in decayed], [name for name in names if name not in decayed]]
    yield [names]


def _belongs(parameter: SavedParameter, layout: WeightLayout, name: str) -> bool:
    """Return whether a compensation, if there is one, can be that of the weight `name`."""
    info = layout.infos.get(name)
    if info is None or (parameter.shape is not None and parameter.shape != info.shape):
        return False
    if parameter.compensation is None:
        return parameter.low_bits is None and info.dtype == torch.float32
    compensation = parameter.compensation()
    if not compensation.is_floating_point():
        return False
    weight = layout.read(name)
    fits = compensation.float().abs() <= spacing(weight, weight.dtype)
    return bool(fits.all()) and int(compensation.count_nonzero()) >= _FEWEST
