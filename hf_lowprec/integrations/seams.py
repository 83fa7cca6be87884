"""The one module that touches private names of transformers; `tests/integrations/test_seams.py` fails when one goes
away."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import transformers
from transformers import trainer_optimizer
from transformers.training_args import OptimizerNames

OptimizerHandler = Callable[[Any], tuple[Any, dict[str, Any]]]


def add_optimizer_names(names: Iterable[str], handler: OptimizerHandler) -> None:
    """Make `OptimizerNames` and Trainer's dispatch table know `names`; a name that is known already is left alone.

    An enum cannot be extended by public means, and `TrainingArguments` accepts only its members.

    Raises:
        RuntimeError: this transformers has no such seam.
    """
    try:
        handlers = trainer_optimizer._OPTIMIZER_HANDLERS
        for name in names:
            if name not in OptimizerNames._value2member_map_:
                _add_member(name)
            handlers[OptimizerNames(name)] = handler
    except AttributeError as error:
        raise RuntimeError(
            f"transformers {transformers.__version__} has changed where optimizer names live ({error}), so `optim=` "
            "names of hf_lowprec cannot be registered; use Trainer(optimizer_cls_and_kwargs="
            "hf_lowprec.optimizer_factory(…), callbacks=[hf_lowprec.LowPrecisionCallback()]) or another version of "
            "transformers"
        ) from error


def _add_member(name: str) -> None:
    member = str.__new__(OptimizerNames, name)
    member._name_, member._value_ = name.upper(), name
    member.__objclass__ = OptimizerNames
    member._sort_order_ = len(OptimizerNames._member_names_)
    OptimizerNames._member_names_.append(member._name_)
    OptimizerNames._member_map_[member._name_] = member
    OptimizerNames._value2member_map_[name] = member
    type.__setattr__(OptimizerNames, member._name_, member)
