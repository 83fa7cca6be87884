"""The optimizer that `TrainingArguments` select."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import TrainingArguments

from hf_lowprec.integrations.transformers.optim_args import optim_args_of, optimizer_name
from hf_lowprec.integrations.transformers.refusals import check_arguments
from hf_lowprec.optim.arguments import keywords
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer
from hf_lowprec.optim.optimizer_names import optimizer_factory

_REPLACED_FIELDS = {"lr": "learning_rate", "weight_decay": "weight_decay"}
"""Keys of `optim_args` whose value replaces that of a field, which must then have its default or the same value."""
_ADAM_FIELDS = ("adam_beta1", "adam_beta2", "adam_epsilon")


def optimizer_arguments(args: Any) -> tuple[type[LowPrecisionOptimizer], dict[str, Any]]:
    """The optimizer class and keyword arguments for `TrainingArguments` with one of our `optim` names.

    `optim_args` takes precedence over the dedicated fields (`adam_beta1`, …). These take precedence over the class's
    defaults only if they were changed: Adam's default β2 of 0.999 must not become every algorithm's β2. A field without
    a counterpart in the algorithm is ignored, as in Trainer.

    Raises:
        ValueError: `optim_args` has an unknown key or a value that cannot be parsed, or one that differs from that of
            a field in `_REPLACED_FIELDS`; or `adam_beta1` or `adam_beta2` was set for an algorithm with three betas.
            The message names it.
    """
    cls, kwargs = optimizer_factory(optimizer_name(args))
    options = optim_args_of(args).optimizer
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for key, field in _REPLACED_FIELDS.items():
        value = getattr(args, field)
        if value not in (defaults[field], options.get(key, value)):
            raise ValueError(f"{field}={value} and {key}={options[key]} in optim_args differ; remove one of them")
    kwargs |= {"lr": args.learning_rate, "seed": args.seed}
    kwargs |= _adam_fields(args, {key: value for key, value in keywords(cls).items() if key not in options})
    if options.get("clip") == "delayed" and args.max_grad_norm:
        kwargs["max_grad_norm"] = args.max_grad_norm  # known before the backward pass, unlike in other modes
    kwargs |= copy.deepcopy(dict(options))  # a copy, because the parsed options are cached
    if kwargs.get("max_grad_norm") == 0:  # as in Trainer's field, for no clipping
        del kwargs["max_grad_norm"]
    return cls, kwargs


def checked_arguments(args: Any) -> dict[str, Any]:
    """The optimizer's keyword arguments. Raises the errors of its constructor before any model is changed.

    Raises:
        ValueError: see `optimizer_arguments` and `check_arguments`; or a value is out of range.
    """
    _, kwargs = optimizer_arguments(args)
    check_arguments(args, kwargs)
    return optimizer_factory(optimizer_name(args), **kwargs)[1]


def copy_to_fields(args: TrainingArguments, options: Mapping[str, Any]) -> None:
    """Copy the options of `optim_args` that Trainer reads from `args` to `args`.

    Trainer writes its `weight_decay` into the parameter groups, and its `max_grad_norm` decides whether it clips.
    Unless told otherwise, its DDP looks for unused parameters, which excludes taking gradients in the backward pass.
    """
    for key, field in _REPLACED_FIELDS.items():
        setattr(args, field, options.get(key, getattr(args, field)))
    if "max_grad_norm" in options:
        args.max_grad_norm = options["max_grad_norm"]
    takes_gradients = options.get("gradient_release") or options.get("offload_gradients")
    if takes_gradients and args.ddp_find_unused_parameters is None:
        args.ddp_find_unused_parameters = False


def _adam_fields(args: Any, open_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments from Trainer's changed `adam_…` fields.

    Args:
        args: Trainer's arguments.
        open_defaults: the algorithm's keywords and defaults, without those that `optim_args` sets.
    """
    stock = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    changed = {name: getattr(args, name) for name in _ADAM_FIELDS if getattr(args, name) != stock[name]}
    kwargs = {}
    if "eps" in open_defaults and "adam_epsilon" in changed:
        kwargs["eps"] = changed["adam_epsilon"]
    if "betas" in open_defaults and (changed_betas := changed.keys() & {"adam_beta1", "adam_beta2"}):
        if len(open_defaults["betas"]) != 2:
            as_text = "|".join(map(str, open_defaults["betas"]))
            raise ValueError(
                f"{' and '.join(sorted(changed_betas))} cannot be used with optim={optimizer_name(args)!r}, which has "
                f"{len(open_defaults['betas'])} betas; set optim_args='betas={as_text}'"
            )
        first, second = open_defaults["betas"]
        kwargs["betas"] = (changed.get("adam_beta1", first), changed.get("adam_beta2", second))
    return kwargs
