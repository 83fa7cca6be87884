"""What is being reduced, and what it costs: the answer to "is it active?"."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_lowprec.reduction.micro_batches import MicroBatches
from hf_lowprec.reduction.scratch import Scratch


@dataclass(frozen=True)
class Wrapped:
    """A model whose gradients are reduced.

    Attributes:
        kind: `"DDP"`, `"FSDP2"` or `"HSDP"`.
        ranks: how many processes share a sum.
        scratch: the memory it needs in addition to the gradients.
    """

    kind: str
    ranks: int
    scratch: Scratch


@dataclass
class Reduction:
    """What `prepare_accelerator` does; filled as models are prepared.

    Attributes:
        grad_accumulation: how micro-batches are added up.
        wrapped: the models whose gradients are summed in FP32 over ranks.
        sums: the sums over micro-batches.
        fp32_modules: names of the modules that FSDP2 shards as one group in FP32.
        notes: what else was changed.
    """

    grad_accumulation: str
    wrapped: list[Wrapped] = field(default_factory=list)
    sums: list[MicroBatches] = field(default_factory=list)
    fp32_modules: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """One line per thing that is done; none where there is nothing to do."""
        lines = [
            f"{one.kind}: FP32 sums over {one.ranks} ranks, 16-bit gradients on the wire{_scratch(one.scratch.nbytes)}"
            for one in self.wrapped
        ]
        if self.grad_accumulation != "nearest":
            extra = {"kahan": "a 16-bit residual, 2 bytes", "fp32": "an FP32 sum, 4 bytes"}[self.grad_accumulation]
            lines.append(f"micro-batches: {extra} per parameter in addition to the gradient, from the second one on")
        return lines + self.notes

    def __str__(self) -> str:
        return "\n".join(self.lines()) or "nothing is reduced: one process, or no model was prepared yet"


def _scratch(size: int) -> str:
    return f", {size / 2**20:,.1f} MiB of scratch memory" if size else ""
