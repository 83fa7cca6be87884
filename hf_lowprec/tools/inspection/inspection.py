"""Reads a checkpoint, or two of a model, in one pass: facts of each tensor, a table of the parts, and findings."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from hf_lowprec.integrations.checkpoint_files.input_errors import InputError, explain_input_errors
from hf_lowprec.monitor.findings_catalogue import Finding
from hf_lowprec.rounding import dtype_name
from hf_lowprec.tensor_names import PARAMETER_KINDS, parameter_kinds
from hf_lowprec.tools.inspection.checkpoint import open_checkpoint
from hf_lowprec.tools.inspection.findings import find
from hf_lowprec.tools.inspection.tensor_facts import TensorFacts, tensor_facts


class Inspection(NamedTuple):
    """The result of an inspection.

    Attributes:
        rate: the learning rate that `lost` in `parts` and the findings are about.
        parts: for each part of the model and dtype, the number of weights, the share that would lose updates, and the
            share that moved and the relative distance, which are None for one checkpoint.
        findings: what is wrong.
    """

    rate: float
    parts: list[dict[str, Any]]
    findings: list[Finding]


def inspect_checkpoints(model: str, later: str | None = None, rate: float | None = None) -> Inspection:
    """Inspect a checkpoint, or compare it with a later one.

    Args:
        model: a folder, or a model on the Hub.
        later: a later checkpoint of the same model.
        rate: the learning rate; by default that in the checkpoint.

    Raises:
        InputError: a checkpoint cannot be read, or the two do not belong together.
    """
    first = open_checkpoint(model, "MODEL")
    last = open_checkpoint(later, "LATER") if later else first
    rate = last.rate if rate is None else rate
    old, new = first.weights.infos, last.weights.infos
    facts: dict[str, TensorFacts] = {}
    for name, info in new.items():
        if info.dtype.is_floating_point:
            # The names of a base model lack the first part, such as "bert." of those of a model with a head.
            pair = next((other for other in (name, name.partition(".")[2]) if other in old), name)
            same = later is not None and pair in old and old[pair].shape == info.shape
            with explain_input_errors(f"{name} cannot be read"):
                facts[name] = tensor_facts(last.weights.read(name), rate, first.weights.read(pair) if same else None)
    if later and all(fact.moved is None for fact in facts.values()):
        raise InputError(f"{model!r} and {later!r} have no tensor of the same name and shape: not the same model")
    kinds = parameter_kinds({name: info.shape for name, info in new.items()})
    return Inspection(rate, _parts(facts, kinds), find(last, facts, kinds, rate))


def _parts(facts: dict[str, TensorFacts], kinds: dict[str, str]) -> list[dict[str, Any]]:
    rows: dict[tuple[int, str], list[TensorFacts]] = {}
    for name, fact in facts.items():
        rows.setdefault((PARAMETER_KINDS.index(kinds[name]), dtype_name(fact.dtype)), []).append(fact)
    found = []
    for (kind, dtype), tensors in sorted(rows.items()):
        weights, compared = sum(t.shape.numel() for t in tensors), [t for t in tensors if t.moved is not None]
        part = {"part": PARAMETER_KINDS[kind], "dtype": dtype, "weights": weights}
        part |= {"lost": sum(t.lost for t in tensors) / max(weights, 1), "moved": None, "distance": None}
        if compared:
            part["moved"] = sum(t.moved or 0 for t in compared) / max(sum(t.shape.numel() for t in compared), 1)
            distance, norm = sum(t.distance for t in compared), sum(t.norm for t in compared)
            part["distance"] = math.sqrt(distance / norm) if norm and math.isfinite(distance / norm) else None
        found.append(part)
    return found
