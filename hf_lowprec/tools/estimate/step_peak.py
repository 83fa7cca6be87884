"""The memory that an optimizer step needs for a moment, in addition to weights, gradients and states.

Only algorithms that orthogonalize matrices or factor second moments need any worth mentioning; the others update
weights in place. Their part of a step runs here on the meta device, so what is counted is what the step does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.backends.eager import EagerStep
from hf_lowprec.optim.backends.triton.matrix_sum import TILE_ROWS
from hf_lowprec.optim.state.state_tensors import state_tensors
from hf_lowprec.optim.step.factored_moments import compute_factors
from hf_lowprec.optim.step.fused_group import FusedGroup
from hf_lowprec.optim.step.matrix_tiles import MatrixSums, MatrixTiles
from hf_lowprec.optim.step.param_entry import ParamEntry
from hf_lowprec.optim.step.step_plan import step_spec
from hf_lowprec.optim.step.whole_tensor_quantities import parts_to_step
from hf_lowprec.tools.estimate.live_memory import LiveMemory


@torch.no_grad()
def step_peak(optimizer: LowPrecisionOptimizer, clipped: bool = True) -> int:
    """Bytes that a step holds at once in addition to weights, gradients and states, on a GPU that has whole tensors.

    Under FSDP2, a GPU that steps its shards of Muon's matrices needs as much, since it gathers each matrix.

    Args:
        optimizer: the optimizer; its parameters may be on the meta device.
        clipped: whether gradients are clipped, as Trainer does by default.
    """
    peak = 0
    for group in optimizer.param_groups:
        if not optimizer.orthogonalizes(group) and all(state.mean_over is None for state in optimizer.states(group)):
            continue
        alike: dict[Any, list[Tensor]] = {}
        for param in group["params"]:
            if param.requires_grad:
                states = state_tensors(optimizer, group, param)
                key = (param.dtype, *((tensor.state, tensor.dtype) for tensor in states))
                alike.setdefault(key, []).append(param)
        for params in alike.values():
            fused_group = _on_meta(optimizer, group, params, clipped)
            backend_step = _StepOnMeta(fused_group)
            with LiveMemory() as memory:
                compute_factors([backend_step])
                for _ in parts_to_step(optimizer, backend_step):
                    pass
            peak = max(peak, memory.peak)
    return peak


class _StepOnMeta(EagerStep):
    def matrix_sums(self) -> dict[int, MatrixSums]:
        """Allocate what the `triton` backend does."""
        tiles = MatrixTiles([weight.shape for weight in self.fused_group.weights], TILE_ROWS, self.fused_group.device)
        return tiles.add_up(*tiles.empty_sums())


def _on_meta(optimizer: LowPrecisionOptimizer, group: ParamGroup, params: list[Tensor], clipped: bool) -> FusedGroup:
    """A fused group of tensors like `params`, their gradients and their states, on the meta device.

    `params` have the same dtype, and states of the same names and dtypes.
    """
    dtype = params[0].dtype
    tensors = state_tensors(optimizer, group, params[0])
    states = [tensor for tensor in tensors if tensor.state.mean_over is None]
    dtypes = (dtype, dtype, *(tensor.dtype for tensor in states))
    factored = len(states) < len(tensors)
    spec = step_spec(optimizer, group, tuple(tensor.state for tensor in states), dtypes, clipped, factored)
    entries = []
    for number, param in enumerate(params):
        weight, grad = (torch.empty(param.shape, dtype=dtype, device="meta") for _ in range(2))
        named: dict[bool, dict[str, Tensor]] = {False: {}, True: {}}
        for tensor in state_tensors(optimizer, group, param):
            is_mean = tensor.state.mean_over is not None
            named[is_mean][tensor.state.name] = torch.empty(
                tensor.shape.numel() if is_mean else tensor.shape, dtype=tensor.dtype, device="meta"
            )
        state = {"step": torch.tensor(0)}
        entries.append(ParamEntry(number, group, state, weight, weight, named[False], named[True], grad=grad))
    fused_group = FusedGroup(spec, torch.device("meta"), None, entries, scalars_on_device=False)
    fused_group.compute_scalars(optimizer.scalars)
    if clipped:
        fused_group.clip_factor = torch.ones((), device="meta")
    return fused_group
