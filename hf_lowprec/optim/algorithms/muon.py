"""Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon; Liu et al., arXiv:2502.16982).

It updates matrices with their orthogonalized momentum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hf_lowprec.optim.algorithm_interface import ParamGroup, Step, Values
from hf_lowprec.optim.algorithms._hidden_matrices import split_group
from hf_lowprec.optim.algorithms._newton_schulz import (
    batch_keeps_bits,
    matrices_at_once,
    newton_schulz,
    with_equal_rows,
)
from hf_lowprec.optim.algorithms.adamw import AdamW
from hf_lowprec.optim.arguments import Argument, Shared
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer
from hf_lowprec.optim.validation import check_matrix
from hf_lowprec.rounding import State

AdjustLr = Literal["original", "match_rms_adamw"]
"""The values of the argument `adjust_lr_fn`."""
_LR_SCALES: dict[AdjustLr, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / max(columns, 1))),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


class Muon(AdamW):
    """`torch.optim.Muon` for weights stored in BF16, with AdamW for all parameters that are not hidden matrices.

    Differences from torch's Muon: `adjust_lr_fn` is `"match_rms_adamw"` by default, and `eps` is AdamW's (the
    Newton–Schulz iteration uses `ns_eps`). A group with both matrices and other parameters is split in two, so
    `param_groups` may have more groups than you passed.

    A three-dimensional parameter is a stack of matrices, such as the experts of a layer. Newton–Schulz runs in BF16,
    with torch's matrix products: on a GPU, parts of a sum may be added in BF16 unless
    `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` is False.

    Under FSDP2 and DeepSpeed, and under DDP with Accelerate or Trainer, ranks share the work: each matrix is gathered
    in BF16 and orthogonalized on one rank, as a single process would, and the result is sent back. Meanwhile, the next
    matrices are being gathered.

    States: `momentum_buffer` for matrices and the states of `AdamW` for other parameters, in the parameter's shape and
    in BF16 by default; `compensation` (BF16) with `rounding="kahan"`, `remainder` (int16) with `rounding="split"`;
    `step`, an int64 scalar.

    Bytes per element of a matrix, gradient included: 8 with `kahan` and `split`, 6 with the other modes. A step
    orthogonalizes one matrix at a time, or several small ones. On one GPU, it temporarily takes 2 bytes per element of
    the largest matrix and up to 151 MB of FP32 values (5 MB on a CPU), or 8 bytes per element if that is more. If GPUs
    share the work, it takes up to 6 bytes per element more (`hf-lowprec estimate` prints both). Matrix products may
    need further scratch memory.

    Args:
        params: parameters or parameter groups. A group may set `use_muon` to True or False.
        lr: learning rate, a number or a one-element tensor.
        weight_decay: decoupled decay; a step multiplies weights by `1 - lr·weight_decay`.
        momentum: decay rate of the momentum, in [0, 1). `OneCycleLR` and `CyclicLR` cycle momentum by writing to
            `betas[0]`, so with these schedulers, matrices use `betas[0]` of their group. This lasts even after the
            scheduler has ended, until you delete the key 'base_momentum' from the group.
        nesterov: use Nesterov momentum.
        ns_coefficients: coefficients of the Newton–Schulz polynomial `a·X + b·X³ + c·X⁵`.
        ns_steps: number of Newton–Schulz iterations.
        ns_eps: lower bound of the norm by which a matrix is divided before the first iteration.
        adjust_lr_fn: `"match_rms_adamw"` multiplies the learning rate by `0.2·√max(rows, columns)`, so that the same
            learning rate suits matrices and other parameters (Liu et al., eq. 4); `"original"` multiplies it by
            `√max(1, rows/columns)`.
        betas: decay rates for the parameters trained with AdamW.
        eps: `eps` for the parameters trained with AdamW.
        matrices: the parameters that are hidden matrices, as `hidden_matrices(model)` returns them; None means all
            parameters of groups that do not set `use_muon`.
        normalize_rows: scale the rows of each orthogonalized matrix to the same length (Muon+, arXiv:2602.21545). This
            needs no state, and lowers the loss as much as NorMuon (arXiv:2510.05491) in this package's measurements.
        maximize: maximize the objective instead of minimizing it.

    The keyword arguments of every optimizer (`rounding`, `state_dtype`, `seed`, …) and the errors raised are described
    in `LowPrecisionOptimizer` and, in the documentation, under "Arguments of every optimizer".

    Raises:
        ValueError: a matrix does not have two or three dimensions, or none of `matrices` is among `params`.
    """

    flags = ("use_muon",)
    arguments: ClassVar = {
        "momentum": Argument(float, ge=0, lt=1),
        "ns_steps": Argument(int, ge=1, lt=100),
        "ns_eps": Argument(float, ge=0),
        "adjust_lr_fn": Argument(get_args(AdjustLr)),
    }
    _matrices: list[Tensor] | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        ns_eps: float = 1e-7,
        adjust_lr_fn: AdjustLr = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        *,
        matrices: Iterable[Tensor] | None = None,
        normalize_rows: bool = False,
        maximize: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        self._matrices = None if matrices is None else list(matrices)
        del matrices  # groups have `use_muon`
        LowPrecisionOptimizer.__init__(self, params, {**locals(), "use_muon": True}, **shared)
        if self._matrices and not any(group["use_muon"] for group in self.param_groups):
            raise ValueError(
                "none of matrices= is among the parameters; pass parameters of the same model, as returned by "
                "hf_lowprec.hidden_matrices(model)"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_matrices": self._matrices}

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group, split into matrices and other parameters. Nothing of an invalid group is added."""
        before = len(self.param_groups)
        try:
            for part in split_group(param_group, self._matrices):
                super().add_param_group(part)
                for param in part["params"] if part["use_muon"] else ():
                    check_matrix(param)
        except Exception:
            del self.param_groups[before:]
            raise

    def states(self, group: ParamGroup) -> tuple[State, ...]:
        """Return the momentum of matrices, or AdamW's moments."""
        return (State("momentum_buffer", role=1),) if group["use_muon"] else super().states(group)

    def orthogonalizes(self, group: ParamGroup) -> bool:
        """Return True for groups of matrices."""
        return bool(group["use_muon"])

    def momentum_decay(self, group: ParamGroup) -> float:
        """Return `betas[0]` for AdamW's parameters; 0 for matrices, whose steps are not linear in the momentum."""
        return 0.0 if group["use_muon"] else super().momentum_decay(group)

    def options(self, group: ParamGroup) -> dict[str, bool]:
        """Return the options `use_muon` (parameters are matrices) and `nesterov`, and those of AdamW."""
        muon = {"use_muon": bool(group["use_muon"]), "nesterov": bool(group["nesterov"])}
        return {"amsgrad": False, "decoupled": True, **muon}

    def scalars(self, group: ParamGroup, lr: float, step: int) -> dict[str, float]:
        """Return the scalars of a matrix's step, or AdamW's."""
        if not group["use_muon"]:
            return super().scalars(group, lr, step)
        # Schedulers that cycle momentum put this key into the group, and write to `betas` if the group has them.
        beta = group["betas"][0] if "base_momentum" in group else group["momentum"]
        return {"momentum": beta, "gain": 1 - beta, "lr": lr, "decay": lr * group["weight_decay"]}

    @staticmethod
    def momentum_matrix(grad: Tensor, state: Values, scalars: Values, nesterov: bool, **options: bool) -> Tensor:
        """Return the matrix to orthogonalize: `μ·m' + (1-μ)·g` with Nesterov momentum, else `m'`."""
        momentum = _momentum(grad, state, scalars)
        return momentum * scalars.momentum + grad * scalars.gain if nesterov else momentum

    batch_keeps_bits = staticmethod(batch_keeps_bits)
    matrices_at_once = staticmethod(matrices_at_once)

    def orthogonalize(self, group: ParamGroup, matrix: Tensor) -> Tensor:
        """Bring all singular values of `matrix` (BF16, or a stack) close to 1 by Newton–Schulz iterations."""
        found = newton_schulz(matrix, group["ns_coefficients"], group["ns_steps"], group["ns_eps"])
        return with_equal_rows(found) if group["normalize_rows"] else found

    def lr_scale(self, group: ParamGroup, shape: torch.Size) -> float:
        """Return the factor of the learning rate for a matrix of `shape`, by `adjust_lr_fn`."""
        return _LR_SCALES[group["adjust_lr_fn"]](*shape[-2:])

    @staticmethod
    def update(  # type: ignore[override]
        weight: Tensor, grad: Tensor, state: Values, scalars: Values, use_muon: bool, nesterov: bool, **options: bool
    ) -> Step:
        """`m' = μ·m + (1-μ)·g; u = -lr·(lr_scale·O + wd·w)`, `O = state.orthogonalized`; AdamW's unless `use_muon`."""
        if not use_muon:
            return AdamW.update(weight, grad, state, scalars, **options)
        step_size = scalars.lr * scalars.lr_scale
        change = state.orthogonalized * step_size + weight * scalars.decay
        return -change, {"momentum_buffer": _momentum(grad, state, scalars)}


def _momentum(grad: Tensor, state: Values, scalars: Values) -> Tensor:
    return state.momentum_buffer * scalars.momentum + grad * scalars.gain
