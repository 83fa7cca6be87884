"""A checkpoint: its weights, how the optimizer in it has trained each of them, and facts of each tensor.

An optimizer is read whichever library saved it. One pass over a tensor counts its facts and compares it with an earlier
version, if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Trainer

from hf_lowprec.integrations.checkpoint_files.input_files import InputError, explain_input_errors
from hf_lowprec.integrations.checkpoint_files.stored_optimizer import StoredOptimizer, StoredParameter, read_optimizers
from hf_lowprec.integrations.checkpoint_files.stored_tensors import StoredTensors
from hf_lowprec.integrations.checkpoint_files.stored_weights import open_weights
from hf_lowprec.integrations.export.parameter_names import read_parameter_names
from hf_lowprec.integrations.transformers.named_models import build_empty_model, find_model_folder, load_config
from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.rounding.nearest import EXPONENTS

SECOND_MOMENT = "exp_avg_sq"
USUAL_RATE = 2e-5
"""The learning rate if neither the user nor the checkpoint says one: a usual one of fine-tuning."""
CHUNK = 1 << 20
"""Elements that are converted to FP32 at a time."""


class Trained(NamedTuple):
    """The training of one weight.

    Attributes:
        group: its saved param group.
        stored: its saved states.
    """

    group: Mapping[str, Any]
    stored: StoredParameter

    @property
    def rate(self) -> float:
        """The learning rate from which a scheduler computes; that of the group if there is no scheduler."""
        return float(self.group.get("initial_lr", self.group.get("lr", 0.0)))

    @property
    def is_torch(self) -> bool:
        """True for an optimizer of torch, which rounds weights and states to nearest."""
        return "differentiable" in self.group

    @property
    def rounding(self) -> str | None:
        """The rounding mode of 16-bit weights; None if the keys of the group do not tell."""
        return self.group.get("rounding", "nearest" if self.is_torch else None)

    @property
    def is_frozen(self) -> bool:
        """True if rounding to nearest undoes the decay of the second moment: half a spacing is at least eps / 4."""
        info, betas = self.stored.infos.get(SECOND_MOMENT), self.group.get("betas")
        nearest = self.is_torch or self.group.get("state_rounding") == "nearest"
        if info is None or info.dtype not in LOW_PRECISION_DTYPES or not betas or not nearest:
            return False
        return (self.stored.step or 0) > 1 and 1 - float(betas[1]) < torch.finfo(info.dtype).eps / 4

    def should_have_moved(self, dtype: torch.dtype) -> bool:
        """Return whether it got gradients, and neither chance nor a compensation may have kept it in place."""
        if not self.rate or self.is_pending or (self.rounding == "stochastic" and dtype in LOW_PRECISION_DTYPES):
            return False
        return any(self._any(name) for name in self.stored.infos if name != self.stored.compensation)

    @property
    def is_pending(self) -> bool:
        """True if a compensation or remainder holds movements that the weight does not show yet."""
        return self.stored.compensation is not None and self._any(self.stored.compensation)

    def _any(self, name: str) -> bool:
        return bool(self.stored.read(name).any())


class Checkpoint(NamedTuple):
    """A checkpoint.

    Attributes:
        name: as the user named it.
        folder: where its files are.
        weights: its weights.
        trained: by the names of weights; empty without an optimizer.
    """

    name: str
    folder: Path
    weights: StoredTensors
    trained: dict[str, Trained]

    @property
    def rate(self) -> float:
        """The highest learning rate of the optimizer, or a usual one."""
        return max((trained.rate for trained in self.trained.values()), default=0.0) or USUAL_RATE


def open_checkpoint(name: str, argument: str) -> Checkpoint:
    """Open a checkpoint.

    Args:
        name: a folder, or a model on the Hub. Only its safetensors files and configurations are downloaded.
        argument: the argument that it was passed as, for messages.

    Raises:
        InputError: there is no such folder or model, or its weights or its optimizer cannot be read.
    """
    folder = find_model_folder(name, argument)
    with explain_input_errors(f"{argument}: {name!r} cannot be read"):
        return Checkpoint(name, folder, open_weights(folder), _read_trained(folder))


def _read_trained(folder: Path) -> dict[str, Trained]:
    found = {}
    names = read_parameter_names(folder)
    adapters = chain.from_iterable(map(dict.items, names.adapters.values() if names else ()))
    stored_names = {parameter: stored for stored, parameter in adapters}
    for optimizer in read_optimizers(folder, names):
        named = optimizer.names or _names_by_order(folder, optimizer)
        for group, of_group, parameters in zip(optimizer.param_groups, named, optimizer.parameters, strict=False):
            for name, parameter in zip(of_group, parameters, strict=True):
                if name is not None:
                    found[stored_names.get(name, name)] = Trained(group, parameter)
    return found


def _names_by_order(folder: Path, optimizer: StoredOptimizer) -> list[list[str | None]]:
    """The names of the parameters of each group, where checkpoints have none, as those of other libraries.

    They are those of the model, grouped as Trainer does or ungrouped, if the shapes are; empty otherwise.
    """
    try:
        model = build_empty_model(*load_config(str(folder)))
    except InputError:
        return []
    shapes = {name: param.shape for name, param in model.named_parameters()}
    decayed = {*Trainer.get_decay_parameter_names(None, model)}  # type: ignore[arg-type]
    saved = [next((info.shape for info in one.infos.values()), None) for one in chain(*optimizer.parameters)]
    for names in ([[n for n in shapes if n in decayed], [n for n in shapes if n not in decayed]], [[*shapes]]):
        same_sizes = [*map(len, names)] == [*map(len, optimizer.parameters)]
        if same_sizes and all(shape in (None, shapes[n]) for n, shape in zip(chain(*names), saved, strict=True)):
            return [[*of_group] for of_group in names]
    return []


class TensorFacts(NamedTuple):
    """A stored tensor in numbers. The last four compare it with an earlier version, if there is one.

    Attributes:
        shape: its shape.
        dtype: the dtype in which it is stored, to which the earlier version is rounded.
        nonfinite: number of NaNs and infinities.
        at_start: whether all elements are exactly 1, or exactly 0 as in biases and norms that multiply by `1 + weight`.
        lost: number of elements that an update of the learning rate leaves as they are, rounded to nearest.
        moved: number of elements that differ; None without an earlier version.
        distance: the sum of the squares of the differences.
        norm: the sum of the squares of the earlier elements.
        exponents: number of elements that stayed and that moved, for each exponent field of FP32 before they moved.
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
    """Count what is in a floating-point tensor.

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
