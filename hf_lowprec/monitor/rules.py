"""What can be wrong with a run, and when a share of it counts as lost.

Whether it is measured during training, read from checkpoints or predicted, the same fault has the same code, words and
limits.

A share counts as lost if it is above one half by three standard errors. Rounding that is unbiased loses nothing on
average, so it would have to be off by 0.5 plus three standard errors of chance. Rounding to nearest that still works
(updates of a spacing or more) loses a few percent; where updates are below half a spacing it loses nearly all. Few runs
are between the two, and they lose at least half of what they were meant to learn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from hf_lowprec.casting import make_plan
from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.tensor_names import listed, parameter_kinds

LOST = 0.5
"""The share from which on something counts as lost, see above."""
STANDARD_ERRORS = 3


def is_lost(numbers: Mapping[str, float], name: str, more_than: float = LOST) -> bool:
    """Return whether a share is above `more_than` by three standard errors."""
    return numbers.get(name, 0.0) - STANDARD_ERRORS * numbers.get(f"{name}_error", 0.0) > more_than


class Fault(NamedTuple):
    """A kind of finding.

    Attributes:
        what: what is wrong; begins each message.
        remedy: what to do, where that does not depend on how the fault was found.
    """

    what: str
    remedy: str = ""


FAULTS = {
    "updates_lost": Fault("Weight updates are lost in rounding"),
    "weight_decay_lost": Fault("Weight decay is lost in rounding"),
    "second_moment_frozen": Fault(
        "The second moment does not decay, so steps stay too short after large gradients",
        'Use state_rounding="stochastic", the default of hf_lowprec\'s optimizers, or FP32 states',
    ),
    "norms_never_moved": Fault(
        "Norms do not move",
        "Cast the model with hf_lowprec.cast_model, which keeps norms in FP32: near 1, 16-bit numbers are far apart",
    ),
    "never_moved": Fault("Weights do not move"),
    "nothing_moved": Fault("No weight has moved"),
    "not_trained": Fault("Weights are not trained"),
    "not_finite": Fault(
        "Weights are NaN or infinite",
        "Find the batch or layer where it starts, and resume from an earlier checkpoint",
    ),
    "left_in_fp32": Fault(
        "Matrices are FP32 in a 16-bit model",
        "Cast the model with hf_lowprec.cast_model before the optimizer is built, or if FP32 is intended, name them in "
        "keep_fp32",
    ),
    "norms_of_16_bits": Fault(
        "Norms are in 16 bits, although others are FP32",
        "Load the checkpoint with dtype=torch.float32, and let hf_lowprec.cast_model cast the rest",
    ),
}
"""Every kind of finding by its code. Codes are stable, for programs."""


class Finding(NamedTuple):
    """Something that is wrong.

    Attributes:
        code: names the kind of finding; stable, for programs.
        message: what is wrong, why, and what to do.
        tensors: the names of all tensors concerned; empty if it concerns the whole model.
    """

    code: str
    message: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.message


def report(code: str, tensors: Iterable[str] | None, evidence: str, remedy: str | None = None) -> list[Finding]:
    """A finding, or none if it is about tensors and there are none.

    Args:
        code: one of `FAULTS`.
        tensors: the names of the tensors concerned; None if it concerns the whole model.
        evidence: what shows the fault, without a period at the end. `{names}` in it stands for those of the tensors.
        remedy: what to do, without a period at the end; None for that of `FAULTS`.
    """
    names = tuple(tensors or ())
    if tensors is not None and not names:
        return []
    fault = FAULTS[code]
    remedy = fault.remedy if remedy is None else remedy
    message = f"{fault.what}: {evidence.format(names=listed(names))}." + (f" {remedy}." if remedy else "")
    return [Finding(code, message, names)]


def fp32_among_16_bits(matrices: Mapping[str, torch.dtype]) -> list[str]:
    """The names of FP32 matrices, if more matrices are 16-bit.

    Adapters, and the trained copies of modules that PEFT makes, are FP32 on purpose.
    """
    narrow = sum(dtype in LOW_PRECISION_DTYPES for dtype in matrices.values())
    wide = [name for name, dtype in matrices.items() if dtype.itemsize > 2]
    kinds = parameter_kinds(dict.fromkeys(wide, (0, 0)))
    wide = [name for name in wide if kinds[name] != "adapters" and "modules_to_save" not in name]
    return wide if len(wide) < narrow else []


def names_to_cast(model: nn.Module) -> set[str]:
    """The names of the tensors that `cast_model` would cast. Entries of `keep_fp32` of earlier casts are respected."""
    return {tensor.name for tensor in make_plan(model).tensors if tensor.action == "cast"}
