"""Inspects a checkpoint, or two of a model, in one pass: a table of the parts, and findings.

Findings are what is wrong in a checkpoint, and between two. A fresh model and frozen layers give no findings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_lowprec.casting.cast_plan import make_plan
from hf_lowprec.integrations.checkpoint_files.input_files import InputError, explain_input_errors
from hf_lowprec.integrations.transformers.named_models import build_empty_model, load_config
from hf_lowprec.monitor.findings_catalogue import FAULTS, Finding
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, dtype_name, recommended_mode
from hf_lowprec.tensor_names import PARAMETER_KINDS, listed, parameter_kinds
from hf_lowprec.tools.inspection.checkpoint_facts import Checkpoint, TensorFacts, open_checkpoint, tensor_facts

_LOST = 0.5
"""The share of weights that lose updates of the learning rate, from which on rounding to nearest is reported."""
_MOST = 0.9
_NEARLY_ALL, _NEARLY_NONE = 0.8, 0.02
"""Shares of weights that moved, of a magnitude and of four times that. If weights move by normally distributed amounts
before they are rounded, and 0.8 of a magnitude move, 0.3 of four times the magnitude do."""
_FEWEST_IN_BIN = 100
_FEWEST_LOST = 0.05
"""A share of weights that did not follow updates, below which it is not reported."""

_Facts = Mapping[str, TensorFacts]


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
    return Inspection(rate, _parts(facts, kinds), _findings(last, facts, kinds, rate))


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


def _findings(checkpoint: Checkpoint, facts: _Facts, kinds: Mapping[str, str], rate: float) -> list[Finding]:
    """Everything that is wrong.

    Args:
        checkpoint: the checkpoint, or the later one of two.
        facts: those of its weights, with what moved since the earlier one.
        kinds: the part of the model that each weight belongs to.
        rate: the learning rate.
    """
    narrow = {name: fact for name, fact in facts.items() if fact.dtype in LOW_PRECISION_DTYPES}
    mode = recommended_mode({fact.dtype for fact in facts.values()})
    train = f'Train with optim="adamw_bf16_{mode}" (hf_lowprec.AdamW with rounding="{mode}"), whose norms stay in FP32'
    trained = {name: one for name, one in checkpoint.trained.items() if name in facts}
    nearest = {name: one for name, one in trained.items() if name in narrow and one.rounding == "nearest"}
    compared = {name: fact for name, fact in facts.items() if fact.moved is not None}
    moved = {n for n, fact in compared.items() if fact.moved or (n in trained and trained[n].is_pending)}
    if compared and not moved:
        remedy = f"Check that the second one was saved after training. If it was, in 16 bits: {train}"
        return _finding("nothing_moved", compared, "both checkpoints have the same values in {names}", remedy)

    still = [name for name, fact in facts.items() if (fact.at_start if fact.moved is None else name not in moved)]
    still = [name for name in still if name in trained and trained[name].should_have_moved(facts[name].dtype)]
    still = still if trained else _all_norms(compared, moved, kinds)
    decays = {name: rate * float(one.group.get("weight_decay") or 0.0) for name, one in nearest.items()}
    frozen = [name for name, one in trained.items() if one.is_frozen]
    return [
        *_finding(
            "not_finite",
            (name for name, fact in facts.items() if fact.nonfinite),
            "{names}",
            FAULTS["not_finite"].remedy + '; optim_args="skip_nonfinite=True" skips such steps',
        ),
        *_finding(
            "norms_never_moved",
            (name for name in still if kinds[name] == "norms"),
            "{names} stayed where they were, although they, or the weights around them, were trained. In 16 bits, a "
            "norm at 1.0 does not move by updates smaller than half its spacing (0.002 below 1.0 in BF16)",
            train,
        ),
        *_finding(
            "never_moved",
            (name for name in still if kinds[name] != "norms"),
            "{names} stayed where they were, although gradients arrived",
            f"Check that nothing resets them. For 16-bit weights whose optimizer rounds to nearest: {train}",
        ),
        *(_lost_by_rate(narrow, nearest, rate, train) or _lost_by_magnitude(narrow, train)),
        *_finding(
            "weight_decay_lost",
            (
                name
                for name, one in nearest.items()
                if one.is_torch
                and one.group.get("decoupled_weight_decay")
                and not one.group.get("fused")
                and 0 < decays[name] < torch.finfo(narrow[name].dtype).eps / 4
            ),
            "the optimizer multiplies {names} by 1 - lr * weight_decay, and rounding to nearest gives the same again",
            train,
        ),
        *_finding("second_moment_frozen", frozen, "rounded to nearest, a factor of beta2 changes nothing in {names}"),
        *_finding("left_in_fp32", _left_in_fp32(checkpoint.folder, facts, kinds), "{names}"),
        *_norms_of_16_bits(facts, kinds),
    ]


def _finding(code: str, tensors: Iterable[str], evidence: str, remedy: str | None = None) -> list[Finding]:
    """One finding about some tensors, of which `evidence` contains `{names}`; none if there are no tensors."""
    names = [*tensors]
    return [Finding.of(code, evidence.format(names=listed(names)), names, remedy)] if names else []


def _all_norms(compared: _Facts, moved: set[str], kinds: Mapping[str, str]) -> list[str]:
    """All norms, if nearly none moved, but nearly all matrices did, in layers as well as in embeddings or the head.

    Adapters that were merged into the weights do not move embeddings and heads.
    """
    norms = [name for name in compared if kinds[name] == "norms"]
    matrices = [n for n, f in compared.items() if len(f.shape) > 1 and kinds[n] in ("attention", "mlp", "other")]
    ends = [name for name in compared if kinds[name] in ("embeddings", "head")]
    if len(moved.intersection(norms)) > (1 - _MOST) * len(norms) or (ends and not moved.intersection(ends)):
        return []
    return [n for n in norms if n not in moved] if len(moved.intersection(matrices)) >= _MOST * len(matrices) else []


def _lost_by_rate(narrow: _Facts, nearest: Iterable[str], rate: float, train: str) -> list[Finding]:
    """Weights rounded to nearest whose spacing is too large for the learning rate, about the size of Adam's updates."""
    names = [*nearest]
    lost, total = sum(narrow[name].lost for name in names), sum(narrow[name].shape.numel() for name in names)
    shown = f"rounding to nearest loses updates of {rate:.2g} in {lost / max(total, 1):.1%} of the weights of {{names}}"
    return _finding("updates_lost", names if lost >= _LOST * total else (), shown, train)


def _lost_by_magnitude(narrow: _Facts, train: str) -> list[Finding]:
    """16-bit weights that moved if they are small, and did not if they are four times as large.

    The spacing of a number is proportional to it. Rounding to nearest loses every update that is smaller than half the
    spacing, so above some magnitude nothing moves. Stochastic rounding moves a weight of twice the spacing half as
    often, and Kahan summation half as far; FP32 weights that were rounded afterwards moved by amounts that differ much
    more from one another.
    """
    names = [name for name, fact in narrow.items() if fact.moved]
    counts = sum((narrow[name].exponents for name in names), torch.zeros(2, 256, dtype=torch.int64))
    every, shares = counts.sum(0), counts[1] / counts.sum(0).clamp(min=1)
    sharp = (shares[:-2] > _NEARLY_ALL) & (shares[2:] < _NEARLY_NONE)
    sharp &= (every[:-2] >= _FEWEST_IN_BIN) & (every[2:] >= _FEWEST_IN_BIN)
    if not bool(sharp.any()):
        return []
    first = int(sharp.nonzero()[-1]) + 2
    share = float(every[first:].sum() / every.sum())
    limit = 2.0 ** (first - 127)
    shown = f"in {{names}}, nearly all small weights moved and none of those above {limit:.2g}, {share:.1%} of all"
    return _finding("updates_lost", names if share > _FEWEST_LOST else (), shown, train)


def _left_in_fp32(folder: Path, facts: _Facts, kinds: Mapping[str, str]) -> list[str]:
    """FP32 matrices in a model whose other matrices are in 16 bits, unless the model's class asks for them."""
    matrices = {name: fact for name, fact in facts.items() if len(fact.shape) > 1}
    low = sum(fact.shape.numel() for fact in matrices.values() if fact.dtype in LOW_PRECISION_DTYPES)
    high = [name for name, fact in matrices.items() if fact.dtype == torch.float32 and kinds[name] != "adapters"]
    if not high or 2 * low < sum(fact.shape.numel() for fact in matrices.values()):
        return []
    try:
        model = build_empty_model(*load_config(str(folder)))
        with explain_input_errors("no plan"):
            cast = {tensor.name for tensor in make_plan(model).tensors if tensor.action == "cast"}
    except InputError:
        return [name for name in high if kinds[name] != "other"]
    return [name for name in high if name in cast]


def _norms_of_16_bits(facts: _Facts, kinds: Mapping[str, str]) -> list[Finding]:
    norms = {name: fact for name, fact in facts.items() if kinds[name] == "norms"}
    low = [name for name, fact in norms.items() if fact.dtype in LOW_PRECISION_DTYPES]
    return _finding("norms_of_16_bits", low if len(low) <= len(norms) - len(low) else (), "{names}")
