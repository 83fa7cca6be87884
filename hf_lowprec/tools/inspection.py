"""Inspects one checkpoint of a model, or two, in one pass: a table of the parts, and findings.

One pass over a tensor counts its facts and compares it with an earlier version, if there is one. Findings say what is
wrong in a checkpoint or between two. Untrained models and frozen layers give no findings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Trainer

from hf_lowprec.integrations.checkpoint_files.input_files import InputError, explain_input_errors
from hf_lowprec.integrations.checkpoint_files.stored_optimizer import StoredOptimizer, StoredParameter, read_optimizers
from hf_lowprec.integrations.checkpoint_files.stored_tensors import LazyTensors, open_weights
from hf_lowprec.integrations.export.parameter_names import read_parameter_names
from hf_lowprec.integrations.transformers.named_models import build_empty_model, find_model_folder, load_config
from hf_lowprec.monitor.rules import FAULTS, LOST, Finding, fp32_among_16_bits, names_to_cast, report
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, dtype_name, recommended_mode
from hf_lowprec.rounding.nearest import EXPONENTS
from hf_lowprec.tensor_names import PARAMETER_KINDS, parameter_kinds

SECOND_MOMENT = "exp_avg_sq"
USUAL_RATE = 2e-5
"""The learning rate if neither the user nor the checkpoint gives one: usual in fine-tuning."""
CHUNK = 1 << 20
"""The number of elements converted to FP32 at a time."""
_MOST = 0.9
_NEARLY_ALL, _NEARLY_NONE = 0.8, 0.02
"""Shares of moved weights, at one magnitude and at four times that magnitude. If weights move by normally distributed
amounts before they are rounded, and 0.8 move at one magnitude, 0.3 move at four times that magnitude."""
_FEWEST_IN_BIN = 100
_FEWEST_LOST = 0.05
"""The share of weights that did not follow updates below which there is no report."""


class Inspection(NamedTuple):
    """The result of an inspection.

    Attributes:
        rate: the learning rate assumed by `lost` in `parts` and by the findings.
        parts: for each part of the model and dtype, the number of weights, the share that would lose updates, the share
            that moved, and the relative distance. The last two are None for one checkpoint.
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
        rate: the learning rate; by default, the one in the checkpoint.

    Raises:
        InputError: a checkpoint cannot be read, or the two do not belong together.
    """
    first = open_checkpoint(model, "MODEL")
    last = open_checkpoint(later, "LATER") if later else first
    if rate is None:
        rate = max((trained.rate for trained in last.trained.values()), default=0.0) or USUAL_RATE
    old, new = first.weights.infos, last.weights.infos
    facts: dict[str, TensorFacts] = {}
    for name, info in new.items():
        if info.dtype.is_floating_point:
            # The names of a base model lack the first part, such as "bert.", that a model with a head adds.
            pair = next((other for other in (name, name.partition(".")[2]) if other in old), name)
            same = later is not None and pair in old and old[pair].shape == info.shape
            with explain_input_errors(f"{name} cannot be read"):
                facts[name] = tensor_facts(last.weights.read(name), rate, first.weights.read(pair) if same else None)
    if later and all(fact.moved is None for fact in facts.values()):
        raise InputError(f"{model!r} and {later!r} have no tensor of the same name and shape: not the same model")
    kinds = parameter_kinds({name: info.shape for name, info in new.items()})
    return Inspection(rate, _parts(facts, kinds), _findings(last, facts, kinds, rate))


class Trained(StoredParameter):
    """What saved options and states say about the training of a weight."""

    @property
    def rate(self) -> float:
        """The learning rate from which a scheduler computes; the group's own if there is no scheduler."""
        return float(self.group.get("initial_lr") or self.group.get("lr") or 0.0)

    @property
    def is_torch(self) -> bool:
        """True for an optimizer of torch, which rounds weights and states to nearest."""
        return "differentiable" in self.group

    @property
    def rounding(self) -> str | None:
        """The rounding mode of 16-bit weights; None if the group's keys do not show it."""
        return self.group.get("rounding", "nearest" if self.is_torch else None)

    @property
    def is_frozen(self) -> bool:
        """True if rounding to nearest undoes the decay of the second moment: half a spacing is at least eps / 4."""
        info, betas = self.infos.get(SECOND_MOMENT), self.group.get("betas")
        nearest = self.is_torch or self.group.get("state_rounding") == "nearest"
        if info is None or info.dtype not in LOW_PRECISION_DTYPES or not betas or not nearest:
            return False
        return (self.step or 0) > 1 and 1 - float(betas[1]) < torch.finfo(info.dtype).eps / 4

    def loses_decay(self, dtype: torch.dtype, rate: float) -> bool:
        """Return whether torch's factor for 16-bit weights, `1 - rate * weight_decay`, rounds to 1."""
        if not self.is_torch or not self.group.get("decoupled_weight_decay") or self.group.get("fused"):
            return False
        return 0 < rate * float(self.group.get("weight_decay") or 0.0) < torch.finfo(dtype).eps / 4

    def should_have_moved(self, dtype: torch.dtype) -> bool:
        """Return whether it got gradients, and neither chance nor a compensation can have kept it in place."""
        if not self.rate or self.is_pending or (self.rounding == "stochastic" and dtype in LOW_PRECISION_DTYPES):
            return False
        return any(bool(self.read(name).any()) for name in self.infos if name != self.compensation)

    @property
    def is_pending(self) -> bool:
        """True if a compensation or remainder holds movements that the weight does not show yet."""
        return self.compensation is not None and bool(self.read(self.compensation).any())


class Checkpoint(NamedTuple):
    """A checkpoint.

    Attributes:
        folder: where its files are.
        weights: its weights.
        trained: how its optimizer, of any library, has trained them, by name; empty without an optimizer.
    """

    folder: Path
    weights: LazyTensors
    trained: dict[str, Trained]


def open_checkpoint(name: str, argument: str) -> Checkpoint:
    """Open a checkpoint.

    Args:
        name: a folder, or a model on the Hub. Only its safetensors files and configurations are downloaded.
        argument: the argument that it was passed as, for messages.

    Raises:
        InputError: there is no such folder or model, or its weights or its optimizer cannot be read.
    """
    folder = find_model_folder(name, argument)
    trained: dict[str, Trained] = {}
    with explain_input_errors(f"{argument}: {name!r} cannot be read"):
        weights, names = open_weights(folder), read_parameter_names(folder)
        stored_names = {p: stored for adapter in names.adapters.values() for stored, p in adapter.items()}
        for optimizer in read_optimizers(folder, names):
            named = optimizer.names or _names_by_order(folder, optimizer)
            for parameter_name, parameter in zip(named, optimizer.parameters, strict=False):
                if parameter_name is not None:
                    trained[stored_names.get(parameter_name, parameter_name)] = Trained(*parameter)
    return Checkpoint(folder, weights, trained)


def _names_by_order(folder: Path, optimizer: StoredOptimizer) -> list[str | None]:
    """Guess the names of the parameters if the checkpoint has none, as in checkpoints of other libraries.

    They are the model's names, grouped as Trainer does or ungrouped, if the shapes match; otherwise, the list is empty.
    """
    try:
        model = build_empty_model(*load_config(str(folder)))
    except InputError:
        return []
    shapes = {name: param.shape for name, param in model.named_parameters()}
    decayed = {*Trainer.get_decay_parameter_names(None, model)}  # type: ignore[arg-type]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved = [next((info.shape for info in parameter.infos.values()), None) for parameter in optimizer.parameters]
    for names in ([[n for n in shapes if n in decayed], [n for n in shapes if n not in decayed]], [[*shapes]]):
        if [*map(len, names)] == sizes and all(
            shape in (None, shapes[n]) for n, shape in zip(chain(*names), saved, strict=True)
        ):
            return [*chain(*names)]
    return []


class TensorFacts(NamedTuple):
    """A stored tensor in numbers. The last four compare it with an earlier version, if there is one.

    Attributes:
        shape: its shape.
        dtype: the dtype in which it is stored, to which the earlier version is rounded.
        nonfinite: number of NaNs and infinities.
        at_start: whether all elements are exactly 1, or exactly 0 as in biases and norms that multiply by `1 + weight`.
        lost: number of elements that an update as large as the learning rate does not change, rounded to nearest.
        moved: number of elements that differ; None without an earlier version.
        distance: the sum of the squares of the differences.
        norm: the sum of the squares of the earlier elements.
        exponents: for each exponent field of FP32 in the earlier version, numbers of elements that stayed and moved.
    """

    shape: torch.Size
    dtype: torch.dtype
    nonfinite: int
    at_start: bool
    lost: int
    moved: int | None
    distance: float
    norm: float
    exponents: Tensor


@torch.no_grad()
def tensor_facts(tensor: Tensor, rate: float, earlier: Tensor | None = None) -> TensorFacts:
    """Count the facts of a floating-point tensor.

    Args:
        tensor: the tensor.
        rate: the size of an update.
        earlier: an earlier version of it, of the same shape.
    """
    ones = zeros = nonfinite = lost = moved = 0
    distance = norm = 0.0
    counts = torch.zeros(2, EXPONENTS, dtype=torch.int64)
    for start in range(0, tensor.numel(), CHUNK):
        chunk = tensor.reshape(-1)[start : start + CHUNK]
        values = chunk.float()
        ones += int((values == 1).sum())
        zeros += int((values == 0).sum())
        nonfinite += int((~values.isfinite()).sum())
        lost += int(((values + rate).to(tensor.dtype) == chunk).sum())
        if earlier is None:
            continue
        before = earlier.reshape(-1)[start : start + CHUNK].to(tensor.dtype)
        changed, old = before != chunk, before.float()
        moved += int(changed.sum())
        distance += float((values - old).square().sum())
        norm += float(old.square().sum())
        exponents = (old.view(torch.int32) >> 23) & 0xFF
        counts += torch.bincount(exponents + EXPONENTS * changed, minlength=2 * EXPONENTS).view(2, EXPONENTS)
    at_start = tensor.numel() > 0 and tensor.numel() in (ones, zeros)
    compared = None if earlier is None else moved
    return TensorFacts(tensor.shape, tensor.dtype, nonfinite, at_start, lost, compared, distance, norm, counts)


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


def _findings(
    checkpoint: Checkpoint, facts: Mapping[str, TensorFacts], kinds: Mapping[str, str], rate: float
) -> list[Finding]:
    """Find everything that is wrong.

    Args:
        checkpoint: the checkpoint, or the later one of two.
        facts: the facts of its weights, with what moved since the earlier one.
        kinds: the part of the model that each weight belongs to.
        rate: the learning rate.
    """
    narrow = {name: fact for name, fact in facts.items() if fact.dtype in LOW_PRECISION_DTYPES}
    mode = recommended_mode({fact.dtype for fact in facts.values()})
    retrain = (
        f'Train with optim="adamw_bf16_{mode}" (hf_lowprec.AdamW with rounding="{mode}"), whose norms stay in FP32'
    )
    trained = {name: weight for name, weight in checkpoint.trained.items() if name in facts}
    compared = {name: fact for name, fact in facts.items() if fact.moved is not None}
    moved = {n for n, fact in compared.items() if fact.moved or (n in trained and trained[n].is_pending)}
    if compared and not moved:
        remedy = f"Check that the second one was saved after training. If it was, and in 16 bits: {retrain}"
        return report("nothing_moved", compared, "both checkpoints have the same values in {names}", remedy)

    still = [name for name, fact in facts.items() if (fact.at_start if fact.moved is None else name not in moved)]
    still = [name for name in still if name in trained and trained[name].should_have_moved(facts[name].dtype)]
    still = still if trained else _all_norms(compared, moved, kinds)
    norms = [name for name in facts if kinds[name] == "norms"]
    narrow_norms = [name for name in norms if name in narrow]
    return [
        *report(
            "not_finite",
            (name for name, fact in facts.items() if fact.nonfinite),
            "{names}",
            FAULTS["not_finite"].remedy + '; optim_args="skip_nonfinite=True" skips such steps',
        ),
        *report(
            "norms_never_moved",
            (name for name in still if kinds[name] == "norms"),
            "{names} did not move, although they, or the weights around them, were trained. In 16 bits, updates "
            "smaller than half the spacing (0.002 below 1.0 in BF16) do not move a norm at 1.0",
            retrain,
        ),
        *report(
            "never_moved",
            (name for name in still if kinds[name] != "norms"),
            "{names} did not move, although they had gradients",
            f"Check that nothing resets them. For 16-bit weights whose optimizer rounds to nearest: {retrain}",
        ),
        *(_lost_by_rate(narrow, trained, rate, retrain) or _lost_by_magnitude(narrow, retrain)),
        *report(
            "weight_decay_lost",
            (name for name, fact in narrow.items() if name in trained and trained[name].loses_decay(fact.dtype, rate)),
            "the optimizer multiplies {names} by 1 - lr * weight_decay, and rounding restores the old values",
            retrain,
        ),
        *report(
            "second_moment_frozen",
            (name for name, weight in trained.items() if weight.is_frozen),
            "rounded to nearest, multiplying by beta2 changes nothing in {names}",
        ),
        *report("left_in_fp32", _left_in_fp32(checkpoint.folder, facts, kinds), "{names}"),
        *report("norms_of_16_bits", narrow_norms if 2 * len(narrow_norms) <= len(norms) else (), "{names}"),
    ]


def _all_norms(compared: Mapping[str, TensorFacts], moved: set[str], kinds: Mapping[str, str]) -> list[str]:
    """Return unmoved norms, if nearly all norms stayed, but nearly all matrices, and embeddings or the head, moved.

    Adapters that were merged into the weights do not move embeddings and heads.
    """
    norms = [name for name in compared if kinds[name] == "norms"]
    matrices = [n for n, f in compared.items() if len(f.shape) > 1 and kinds[n] in ("attention", "mlp", "other")]
    ends = [name for name in compared if kinds[name] in ("embeddings", "head")]
    if len(moved.intersection(norms)) > (1 - _MOST) * len(norms) or (ends and not moved.intersection(ends)):
        return []
    return [n for n in norms if n not in moved] if len(moved.intersection(matrices)) >= _MOST * len(matrices) else []


def _lost_by_rate(
    narrow: Mapping[str, TensorFacts], trained: Mapping[str, Trained], rate: float, remedy: str
) -> list[Finding]:
    """Report weights rounded to nearest whose spacing is too large for the learning rate, Adam's usual update size."""
    names = [name for name, weight in trained.items() if name in narrow and weight.rounding == "nearest"]
    lost = sum(narrow[name].lost for name in names) / max(sum(narrow[name].shape.numel() for name in names), 1)
    shown = f"rounding to nearest loses updates of {rate:.2g} in {lost:.1%} of the weights of {{names}}"
    return report("updates_lost", names if lost >= LOST else (), shown, remedy)


def _lost_by_magnitude(narrow: Mapping[str, TensorFacts], remedy: str) -> list[Finding]:
    """Report tensors of 16-bit weights in which nearly all small weights moved, and nearly none four times as large.

    The spacing of a number is proportional to it. Rounding to nearest loses every update that is smaller than half the
    spacing, so above some magnitude nothing moves. Stochastic rounding moves a weight of twice the spacing half as
    often, and Kahan summation half as far; FP32 weights that were rounded afterwards moved by amounts that vary much
    more.
    """
    names = [name for name, fact in narrow.items() if fact.moved]
    counts = sum((narrow[name].exponents for name in names), torch.zeros(2, EXPONENTS, dtype=torch.int64))
    every, moved = counts.sum(0), counts[1]  # by exponent of the weight
    shares = moved / every.clamp(min=1)
    sharp = (shares[:-2] > _NEARLY_ALL) & (shares[2:] < _NEARLY_NONE)
    sharp &= (every[:-2] >= _FEWEST_IN_BIN) & (every[2:] >= _FEWEST_IN_BIN)
    if not bool(sharp.any()):
        return []
    first = int(sharp.nonzero()[-1]) + 2
    share = float(every[first:].sum() / every.sum())
    limit = 2.0 ** (first - 127)
    shown = f"in {{names}}, nearly all small weights moved, but nearly none above {limit:.2g} ({share:.1%} of all) did"
    return report("updates_lost", names if share > _FEWEST_LOST else (), shown, remedy)


def _left_in_fp32(folder: Path, facts: Mapping[str, TensorFacts], kinds: Mapping[str, str]) -> list[str]:
    """Return FP32 matrices among 16-bit ones, unless the model's class requires FP32."""
    wide = fp32_among_16_bits({name: fact.dtype for name, fact in facts.items() if len(fact.shape) > 1})
    if not wide:
        return []
    try:
        with explain_input_errors("no plan"):
            cast = names_to_cast(build_empty_model(*load_config(str(folder))))
    except InputError:
        return [name for name in wide if kinds[name] != "other"]
    return [name for name in wide if name in cast]
