"""The status of FP32 reductions: which models use them, and the memory they take."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_lowprec.reduction.collectives import ScratchBuffers
from hf_lowprec.reduction.fsdp2 import Reduction
from hf_lowprec.reduction.grad_accumulation import GradientAccumulator


@dataclass(frozen=True)
class ReducedModel:
    """A model whose gradients are reduced in FP32.

    Attributes:
        wrapper: `"DDP"`, `"FSDP2"` or `"HSDP"`.
        ranks: the number of processes over which gradients are summed.
        scratch: the memory needed in addition to the gradients.
    """

    wrapper: str
    ranks: int
    scratch: ScratchBuffers


@dataclass
class ReductionStatus:
    """The reductions that `prepare_accelerator` has set up so far. It is filled in as models are prepared; `print` it.

    Attributes:
        grad_accumulation: how gradients of micro-batches are accumulated: `"nearest"` or `"fp32"`.
        reduction: how gradients are summed over ranks: `"rank_order"` or `"nccl"`.
        models: the models whose gradients are summed in FP32 over ranks.
        accumulators: one for each model whose micro-batches are not accumulated by torch.
        fp32_modules: names of the modules that FSDP2 shards as one group in FP32.
        notes: other changes to the accelerator, one sentence each.
    """

    grad_accumulation: str
    reduction: Reduction = "rank_order"
    models: list[ReducedModel] = field(default_factory=list)
    accumulators: list[GradientAccumulator] = field(default_factory=list)
    fp32_modules: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return the lines of the report, one for each reduction and each note; empty if there is nothing to report."""
        by = " by NCCL" if self.reduction == "nccl" else ""
        lines = [
            f"{model.wrapper}: FP32 sums{by} over {model.ranks} ranks, 16-bit gradients on the wire"
            + (f", {nbytes / 2**20:,.1f} MiB of scratch memory" if (nbytes := model.scratch.nbytes) else "")
            for model in self.models
        ]
        if self.grad_accumulation == "fp32":
            lines.append(
                "micro-batches: FP32 sums from the second one on, 4 bytes per parameter in addition to the gradient"
            )
        return lines + self.notes

    def __str__(self) -> str:
        return "\n".join(self.lines()) or "nothing is reduced: one process, or no model prepared yet"
