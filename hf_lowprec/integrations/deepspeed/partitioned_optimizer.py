"""The optimizer that DeepSpeed holds instead of one of ours. It steps flat partitions instead of parameters.

DeepSpeed flattens the parameters of each param group and cuts the result into one partition per rank, even inside a
parameter. This optimizer turns a partition back into parts of parameters, each of which knows its elements. So random
bits, blocks of states in 8 bits and the norm equal those of one process.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_lowprec.integrations.carry_low_bits import TakenLowBits, low_bits_of_rank_0
from hf_lowprec.integrations.deepspeed import private_apis
from hf_lowprec.integrations.deepspeed.config import check_optimizer
from hf_lowprec.integrations.deepspeed.private_apis import Partition
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.param_groups import params_of
from hf_lowprec.optim.sharding import FlatPart, part_of, set_flat_part
from hf_lowprec.optim.state.fp32_weights import fp32_estimator
from hf_lowprec.optim.step.backend_step import square_sum_of
from hf_lowprec.optim.step.step_plan import StepPlan
from hf_lowprec.reduction.rank_mean import mean_of_slices
from hf_lowprec.rounding.attached_low_bits import attach_low_bits, attached_low_bits

PARTS, WEIGHTS = "parts", "weights"
"""Keys of the state dict: which elements of which parameter each part holds, and its 16-bit weights."""


_DTYPES = (torch.bfloat16, torch.float32)
"""The parameters' dtypes. The first group must have the first one, which DeepSpeed takes as the model's dtype."""


class _Part(NamedTuple):
    """A part of a parameter, and where its flat partition holds it."""

    param: nn.Parameter
    where: slice


class _SharedGroup(UserDict):
    """DeepSpeed's view of a param group: the parameters of one dtype. It shares everything else with the group.

    DeepSpeed replaces the parameters with its partitions. Learning rates may be set in the view or in the group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, position: int, dtype: torch.dtype) -> None:
        self._optimizer, self._position = optimizer, position
        self._params = [param for param in self.data["params"] if param.dtype == dtype]

    @property
    def data(self) -> dict[str, Any]:  # type: ignore[override]
        """The group itself; loading a state dict replaces it."""
        return self._optimizer.param_groups[self._position]

    def __getitem__(self, key: str) -> Any:
        return self._params if key == "params" else self.data[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            self._params = value
        else:
            self.data[key] = value


class PartitionedOptimizer(torch.optim.Optimizer):
    """Steps flat partitions of the parameters of one of our optimizers.

    Args:
        optimizer: the optimizer, with the parameters of the model and no states yet. After `partition`, its parameters
            are this rank's parts of them.
        model: the model, for their names.

    Raises:
        ValueError: the optimizer has states, or takes means over whole tensors, or releases gradients.
    """

    def __init__(self, optimizer: LowPrecisionOptimizer, model: nn.Module) -> None:
        check_optimizer(optimizer)
        params = params_of(optimizer)
        super().__init__(params, {})
        self.optimizer = optimizer
        positions = range(len(optimizer.param_groups))
        shared = [_SharedGroup(optimizer, position, dtype) for dtype in _DTYPES for position in positions]
        self.param_groups = [group for group in shared if group["params"]]  # type: ignore[misc]
        names = {id(param): name for name, param in model.named_parameters()}
        self._identities = {id(param): (number, names.get(id(param), "")) for number, param in enumerate(params)}
        self._parts: dict[int, list[_Part]] = {}
        self._plans: dict[int, StepPlan] = {}
        self._left = 0  # partitions that the running step has yet to step
        self._weights: list[Tensor] = []  # loaded, and not yet restored
        self._zero: Any = None

    def partition(self, zero: Any) -> None:
        """Take over the partitions of DeepSpeed's ZeRO optimizer `zero`, which has been built around this one."""
        self._zero = zero
        limits = (private_apis.take_clip_grad(zero), self.optimizer.max_grad_norm)
        self.optimizer.max_grad_norm = min((limit for limit in limits if limit), default=None)
        private_apis.step_weights_in_place(zero)
        if self.optimizer.skip_nonfinite:
            private_apis.ignore_nonfinite(zero)
        private_apis.replace_norm(zero, self._norm_of)
        private_apis.replace_sums(zero, mean_of_slices)
        private_apis.wrap_state_dict(zero, self._fp32_weights, self.check_saved, self._restore_weights)
        for group in self.optimizer.param_groups:
            group["params"] = []
        for partition in private_apis.partitions(zero):
            self._add_partition(partition)

    def give_low_bits(self, kept: TakenLowBits, shapes: Mapping[str, torch.Size]) -> None:
        """Give this rank's parts the low bits that rank 0 has taken, after `partition`. Every rank must call it.

        Args:
            kept: the low bits that `taken_low_bits` has taken on this rank.
            shapes: the shapes of the model's parameters when it was called, by name.
        """
        parts = [(part, part_of(part)) for part in params_of(self.optimizer)]
        device = private_apis.device_of(self._zero)
        for name, full in low_bits_of_rank_0(kept, shapes, device):
            for param, part in parts:
                if part.name == name:
                    attach_low_bits(param, full.view(-1)[part.start : part.start + param.numel()].clone())

    def _add_partition(self, partition: Partition) -> None:
        own, parts = self.param_groups[partition.group].data, []  # type: ignore[attr-defined]
        for piece in partition.pieces:
            start, end = piece.bounds[partition.ranks.rank() :][:2]
            # Ranks share the work on matrices, so each needs all of them.
            if start == end and not self.optimizer.orthogonalizes(own):
                continue
            where = slice(piece.offset, piece.offset + end - start)
            part = nn.Parameter(partition.flat.detach()[where])
            partition_of_param = getattr(piece.param, "ds_tensor", None)
            if partition_of_param is not None and (kept := attached_low_bits(partition_of_param)) is not None:
                attach_low_bits(part, kept[: end - start].clone())
            identity = self._identities[id(piece.param)]
            set_flat_part(part, FlatPart(*identity, piece.shape, start, piece.bounds, partition.ranks))
            parts.append(_Part(part, where))
        self._parts[id(partition.flat)] = parts
        own["params"] += [part.param for part in parts]

    def _norm_of(self, grads: Iterable[Tensor]) -> Tensor:
        """Return the norm of the gradients, an FP32 scalar, by which the next step clips."""
        group = private_apis.data_parallel_group(self._zero)
        total = square_sum_of(grads, private_apis.device_of(self._zero))
        torch.distributed.all_reduce(total, group=group)
        norm = total.sqrt().float()
        self.optimizer.begin_step_of_parts(norm)
        self._left = len(self._parts)
        return norm

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step the partitions in `param_groups`, whose gradients DeepSpeed has set. The last one ends the step."""
        for group in self.param_groups:
            for flat in group["params"]:
                parts = self._parts[id(flat)]
                for part, where in parts:
                    part.grad = flat.grad[where]
                if parts:
                    params = [part for part, _ in parts]
                    self._plans[id(flat)] = self.optimizer.step_part(params, self._plans.get(id(flat)))
                self._left -= 1
        self.optimizer.finish_host_steps()  # DeepSpeed may read the weights before the last partition is stepped
        if not self._left:
            self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the optimizer's state dict, what its parts are, and their weights."""
        return {
            **self.optimizer.state_dict(),
            PARTS: self._described(),
            WEIGHTS: [part.detach().clone() for part in params_of(self.optimizer)],
        }

    def check_saved(self, state_dict: Any) -> None:
        """Check that `state_dict` is what `state_dict` has returned for the same partitions.

        Raises:
            ValueError: another optimizer saved it, or its partitions are different.
        """
        described = state_dict.get(PARTS) if isinstance(state_dict, dict) else None
        if described != self._described():
            raise ValueError(
                "the checkpoint partitions or orders the parameters differently from this run; resume with the "
                "settings that saved it, or start from the FP32 weights, which hf-lowprec export writes"
                if described is not None
                else "the checkpoint's optimizer state was not saved by hf_lowprec; resume with the optimizer that "
                "saved it, or start from the weights alone"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Load what `state_dict` has returned, after `check_saved`."""
        own = {key: value for key, value in state_dict.items() if key not in (PARTS, WEIGHTS)}
        self.optimizer.load_state_dict(own)
        self._weights = state_dict[WEIGHTS]

    def _fp32_weights(self, saved: list[Tensor]) -> list[Tensor]:
        """Return the weights to save for DeepSpeed's tools: the best FP32 estimate of each.

        Args:
            saved: the weights of each partition, which DeepSpeed would save.
        """
        estimate = fp32_estimator(self.optimizer)
        weights = [flat.detach().float() for flat in saved]
        for flat, parts in zip(weights, self._parts.values(), strict=True):
            for part, where in parts:
                flat[where] = estimate(part)
        return weights

    @torch.no_grad()
    def _restore_weights(self) -> None:
        """Undo DeepSpeed's rounding of the FP32 weights that it has loaded, by the 16-bit weights saved with them."""
        for part, weight in zip(params_of(self.optimizer), self._weights, strict=bool(self._weights)):
            part.copy_(weight)
        self._weights = []

    def _described(self) -> list[tuple[int, tuple[int, ...], int, int]]:
        described = []
        for param in params_of(self.optimizer):
            part = part_of(param)
            described.append((part.number, tuple(part.shape), part.start, param.numel()))
        return described
