"""The catalogue of findings: all that can be wrong with a run, or with what it left in files.

Whether it is measured during training or read from checkpoints, the same fault has the same code and words.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


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

    @classmethod
    def of(cls, code: str, evidence: str, tensors: Iterable[str] = (), remedy: str | None = None) -> Finding:
        """A finding whose message begins with what is wrong, followed by the evidence and the remedy.

        Args:
            code: one of `FAULTS`.
            evidence: what shows the fault, without a period at the end.
            tensors: see `Finding`.
            remedy: what to do, without a period at the end; None for that of the catalogue.
        """
        fault = FAULTS[code]
        remedy = fault.remedy if remedy is None else remedy
        return cls(code, f"{fault.what}: {evidence}." + (f" {remedy}." if remedy else ""), tuple(tensors))

    def __str__(self) -> str:
        return self.message
