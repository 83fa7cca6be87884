"""The memory of training with one optimizer: weights, gradients and state, and what a step needs for a moment.

One row of the estimate holds the bytes of one optimizer: ours, or torch's AdamW in FP32.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from tempfile import gettempdir
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_lowprec.casting import cast_model, return_float32
from hf_lowprec.integrations.checkpoint_files.input_files import InputError, explain_input_errors
from hf_lowprec.integrations.transformers.optim_args import optim_args_of
from hf_lowprec.monitor.byte_counts import MemoryUse, expected_memory
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.backends.eager import EagerStep
from hf_lowprec.optim.backends.triton.rendered_sums import TILE_ROWS
from hf_lowprec.optim.gradients.collector import collector_of
from hf_lowprec.optim.host_steps import staging_bytes
from hf_lowprec.optim.step.fused_group import FusedGroup
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.optim.step.matrix_tiles import MatrixSums, MatrixTiles
from hf_lowprec.optim.step.orthogonalization import parts_to_step
from hf_lowprec.optim.step.param_entry import ParamEntry
from hf_lowprec.optim.step.whole_tensor_quantities import compute_factors
from hf_lowprec.reduction.grad_accumulation import accumulator_bytes, check_grad_accumulation
from hf_lowprec.tools.estimate.activations import Activations, LiveMemory

FP32_ROW = "FP32, AdamW"
"""The row to compare with: torch's fused AdamW on FP32 weights; autocast to BF16 takes the same memory for them."""


class Row(NamedTuple):
    """The memory of training with one optimizer.

    Attributes:
        name: the row's title: what is trained, or the value of `optim`.
        memory: of weights, gradients and state, of the whole model.
        accumulation: bytes for adding up micro-batches in addition to the gradients, on every GPU.
        step: bytes that the optimizer step needs for a moment, on every GPU.
        activations: of one forward and backward on one GPU; None if not estimated.
        host_states: bytes of optimizer states in host memory, of the whole model; `memory` does not have them.
        host_gradients: the same of gradients.
        staging: bytes of host memory through which weights and gradients travel, for every GPU.
        frees_gradients: whether gradients are freed during the backward; `memory` has those that exist at once.
    """

    name: str
    memory: MemoryUse
    accumulation: int = 0
    step: int = 0
    activations: Activations | None = None
    host_states: int = 0
    host_gradients: int = 0
    staging: int = 0
    frees_gradients: bool = False

    def total(self, gpus: int = 1) -> float:
        """Bytes on all GPUs together while the optimizer steps; no activations."""
        return gpus * self.per_gpu(gpus)

    def gradients(self, gpus: int = 1) -> int:
        """Bytes of gradients on all GPUs together."""
        return self.memory.gradients.total() + gpus * self.accumulation

    def per_gpu(self, gpus: int = 1) -> float:
        """Bytes on each of `gpus` while the optimizer steps; no activations."""
        return self.memory.total / gpus + self.accumulation + self.step

    def on_host(self, gpus: int = 1) -> int:
        """Bytes of host memory that states, gradients and their copies take on the machines of all GPUs together."""
        return self.host_states + self.host_gradients + gpus * self.staging

    def peak(self, gpus: int, gradient_accumulation_steps: int) -> float | None:
        """The most bytes that each of `gpus` holds at once in training; None if activations are not estimated.

        Activations and the temporaries of the step are not there at the same time. On a single GPU and without
        accumulation, the first gradients appear while activations are being released.
        """
        if self.activations is None:
            return None
        sums = gradient_accumulation_steps > 1 and not self.frees_gradients
        if gpus > 1 or sums or self.accumulation:
            forward_and_backward = self.per_gpu(gpus) - self.step + self.activations.peak
        else:
            backward = self.activations.with_release if self.frees_gradients else self.activations.with_gradients
            forward_and_backward = self.memory.total - self.memory.gradients.total() + backward
        return max(self.per_gpu(gpus), forward_and_backward)


def fp32_row(model: nn.Module, gpus: int = 1, steps: int = 1) -> Row:
    """`model` in FP32 with torch's AdamW, whose state are two moments."""
    trained = _trained(model)
    state = Counter({torch.float32: 2 * sum(param.nbytes for param in trained)})
    memory = MemoryUse.of([*model.parameters()], trained, state)
    return Row(FP32_ROW, memory, _whole_gradients(trained, gpus, steps))


def low_precision_row(model: nn.Module, name: str, optim_args: str | None, gpus: int = 1, steps: int = 1) -> Row:
    """`model` with one of our optimizers, both set up as Trainer would. The model is cast.

    Raises:
        InputError: `name`, `optim_args` or their combination with `gpus` is not supported.
    """
    from transformers import Trainer, TrainingArguments

    with explain_input_errors(f"--optim {name}"):
        args = TrainingArguments(gettempdir(), optim=name, optim_args=optim_args, use_cpu=True, report_to=[])
        options = optim_args_of(args)
        mode = check_grad_accumulation("nearest" if options.grad_accumulation is None else options.grad_accumulation)
        cast_model(model, keep_fp32=options.keep_fp32)
        return_float32(model, next_to_loss=False)
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
        if kwargs.get("gradient_release") and steps > 1:
            raise InputError(
                "gradient_release=True does not accumulate gradients; gradient_accumulation_steps must be 1"
            )
        optimizer = cls(model.parameters(), **kwargs)
        memory = expected_memory(model, optimizer)
        optimizer.gradients.stop()
    trained = _trained(model)
    accumulation = accumulator_bytes(trained) if mode == "fp32" else _whole_gradients(trained, gpus, steps)
    on_host = 0, 0, 0
    if optimizer.offload_states:
        waits = optimizer.offload_gradients
        gradients = sum(param.nbytes for param in trained) if waits else 0
        on_host = memory.state.total(), gradients, staging_bytes(trained, waits)
        memory = replace(memory, state=Counter())
    frees_gradients = collector_of(optimizer) is not None
    return Row(name, memory, accumulation, step_peak(optimizer, gpus), None, *on_host, frees_gradients)


def _trained(model: nn.Module) -> list[Tensor]:
    return [param for param in model.parameters() if param.requires_grad]


def _whole_gradients(trained: list[Tensor], gpus: int, steps: int) -> int:
    """Bytes of the unsharded gradients that FSDP2 keeps on every GPU while it accumulates micro-batches."""
    return sum(param.nbytes for param in trained) if gpus > 1 and steps > 1 else 0


@torch.no_grad()
def step_peak(optimizer: LowPrecisionOptimizer, gpus: int = 1, clipped: bool = True) -> int:
    """Bytes that a step holds at once in addition to weights, gradients and states, on each GPU.

    Only algorithms that orthogonalize matrices or factor second moments need any worth mentioning; the others update
    weights in place. Their part of a step runs here on the meta device, so what is counted is what the step does.

    Args:
        optimizer: the optimizer; its parameters may be on the meta device.
        gpus: how many share Muon's matrices. If there are several, each holds three of the largest in BF16 in addition,
            as FSDP2's shards are sent.
        clipped: whether gradients are clipped, as Trainer does by default.
    """
    peak = 0
    for group in optimizer.param_groups:
        if not optimizer.orthogonalizes(group) and not any(state.factored for state in optimizer.states(group)):
            continue
        for fused_group in _on_meta(optimizer, group, clipped):
            backend_step = _StepOnMeta(fused_group)
            with LiveMemory() as memory:
                compute_factors([backend_step])
                for _ in parts_to_step(optimizer, backend_step):
                    pass
            largest = max(entry.param.numel() for entry in fused_group.entries)
            messages = 3 * 2 * largest if gpus > 1 and fused_group.spec.orthogonalizes else 0
            peak = max(peak, memory.peak + messages)
    return peak


class _StepOnMeta(EagerStep):
    def matrix_sums(self) -> dict[int, MatrixSums]:
        """Allocate what the `triton` backend does."""
        tiles = MatrixTiles([weight.shape for weight in self.fused_group.weights], TILE_ROWS, self.fused_group.device)
        return tiles.add_up(*tiles.empty_sums())


def _on_meta(optimizer: LowPrecisionOptimizer, group: ParamGroup, clipped: bool) -> Iterator[FusedGroup]:
    """Fused groups of tensors like the trained parameters of `group`, their gradients and their states, on meta."""
    trained = (param for param in group["params"] if param.requires_grad)
    params = [nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="meta")) for param in trained]
    alike: dict[KernelSpec, list[ParamEntry]] = defaultdict(list)
    for k, param in enumerate(params):
        entry = ParamEntry(optimizer, {**group, "params": params}, k, k, grad=torch.empty_like(param))
        alike[entry.spec(optimizer, clipped)].append(entry)
        del optimizer.state[param]
    for spec, entries in alike.items():
        fused_group = FusedGroup(spec, torch.device("meta"), None, entries, scalars_on_device=False)
        fused_group.set_gradients(fused_group.weights, [0] * len(entries))
        fused_group.step_scalars.compute(optimizer.scalars)
        if clipped:
            fused_group.clip_factor = torch.ones((), device="meta")
        yield fused_group
