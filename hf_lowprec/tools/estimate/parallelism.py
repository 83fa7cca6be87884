"""The memory of training that FSDP2 does not divide alone: tensor and expert parallelism, DeepSpeed's ZeRO.

Rows count the bytes of all GPUs together, so what several GPUs hold counts several times.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_lowprec.integrations.checkpoint_files.input_errors import InputError
from hf_lowprec.monitor.memory_estimate import MemoryUse, expected_memory

if TYPE_CHECKING:
    from hf_lowprec.optim import LowPrecisionOptimizer

_EXPERTS = "grouped_gemm"
"""The style of expert parallelism that shards a parameter by experts."""


class Parallelism(NamedTuple):
    """How GPUs share a model, beyond FSDP2.

    Attributes:
        tp: GPUs over which tensor parallelism shards the matrices of a layer.
        ep: GPUs over which expert parallelism shards the experts.
        zero: the stage of DeepSpeed's ZeRO, which replaces FSDP2; None without DeepSpeed.
    """

    tp: int = 1
    ep: int = 1
    zero: int | None = None

    def check(self, gpus: int, gradient_accumulation_steps: int) -> None:
        """Check the sizes.

        Raises:
            InputError: they do not go together.
        """
        if self.zero is not None and max(self.tp, self.ep) > 1:
            raise InputError("--zero is not estimated together with --tp and --ep; leave out one of them")
        if gpus % self.tp or gpus % self.ep or (self.ep > 1 and self.ep % self.tp):
            raise InputError(
                f"--gpus {gpus} must be a multiple of --tp {self.tp} and of --ep {self.ep}, and --ep of --tp"
            )
        if gradient_accumulation_steps > 1 and max(self.tp, self.ep) > 1:
            raise InputError(
                "gradients of several micro-batches are not estimated with --tp and --ep; leave out "
                "--gradient-accumulation-steps"
            )


DATA_PARALLEL = Parallelism()


def whole_parameters(model: nn.Module, parallelism: Parallelism) -> list[Tensor]:
    """The parameters of a transformers model that each GPU of a tensor-parallel group holds as a whole.

    By the model's own plan: norms, biases added after a sum over GPUs, and whatever the plan does not name.

    Raises:
        InputError: the model has no plan.
    """
    plans: dict[str, dict[str, str]] = {}
    for kind, size in (("tp", parallelism.tp), ("ep", parallelism.ep)):
        plans[kind] = (getattr(model, f"{kind}_plan", None) or {}) if size > 1 else {}
        if size > 1 and not plans[kind]:
            raise InputError(f"--{kind} {size}: {type(model).__name__} has no {kind}_plan in this transformers")

    def is_sharded(name: str, param: Tensor) -> bool:
        names = [".".join("*" if part.isdecimal() else part for part in name.split("."))]
        names.append(names[0].rpartition(".")[0])  # a plan names a parameter, or the module that owns it
        if _EXPERTS in map(plans["ep"].get, names):
            return True
        style = next(filter(None, map(plans["tp"].get, names)), "")
        return "colwise" in style or ("rowwise" in style and param.ndim > 1)

    if parallelism.tp == 1:
        return []
    return [param for name, param in model.named_parameters() if not is_sharded(name, param)]


def with_whole_parameters(
    memory: MemoryUse, optimizer: LowPrecisionOptimizer, whole: list[Tensor], tp: int
) -> MemoryUse:
    """`memory` of a model, with `whole`, their gradients and states counted `tp` times.

    `optimizer` is not to be used any more.
    """
    kept = set(whole)
    for group in optimizer.param_groups:
        group["params"] = [param for param in group["params"] if param in kept]
    return add_memory(memory, expected_memory(nn.ParameterList(whole), optimizer), tp - 1)


def add_memory(memory: MemoryUse, more: MemoryUse, times: int) -> MemoryUse:
    """`memory`, and `more` several times; the number of parameters stays that of `memory`."""

    def sums(name: str) -> Counter[Any]:
        counted: Counter[Any] = Counter(getattr(memory, name))
        for dtype, nbytes in getattr(more, name).items():
            counted[dtype] += times * nbytes
        return counted

    return MemoryUse(memory.parameters, sums("weights"), sums("gradients"), sums("state"))


class ZeroMemory(NamedTuple):
    """The memory of training under DeepSpeed's ZeRO.

    Attributes:
        memory: on all GPUs, when the backward pass ends.
        accumulation: bytes on every GPU for adding up micro-batches.
        step: bytes that the step needs in addition, on every GPU.
    """

    memory: MemoryUse
    accumulation: int
    step: int


def zero_memory(memory: MemoryUse, fp32_masters: bool, stage: int, gpus: int, steps: int) -> ZeroMemory:
    """The memory of DeepSpeed 0.19.8 for a BF16 model, without its buckets for communication.

    Every GPU steps a partition of the trained parameters, of which FP32 master weights are a copy. In a step, the
    gradients of the partition exist in BF16 as parameters' gradients and as one flat tensor, and in FP32 for FP32
    master weights.

    Args:
        memory: of the model in BF16 on one GPU, with the optimizer's states.
        fp32_masters: whether there are master weights in FP32, as with other optimizers than ours.
        stage: what is partitioned: 1 the states, 2 also gradients, 3 also weights.
        gpus: over how many GPUs.
        steps: gradient accumulation steps.
    """
    bf16, gradients = torch.bfloat16, memory.gradients.total()
    trained = gradients // bf16.itemsize
    weights = Counter({dtype: size * (1 if stage == 3 else gpus) for dtype, size in memory.weights.items()})
    copied = trained * torch.float32.itemsize if fp32_masters else 0
    weights[torch.float32] += copied
    after_backward = gradients * (gpus if stage == 1 else 1)
    accumulated = gradients if steps > 1 and stage < 3 else 0
    in_step = 2 * gradients + copied
    divided = MemoryUse(memory.parameters, weights, Counter({bf16: after_backward}), memory.state)
    return ZeroMemory(divided, accumulated // gpus, max(0, in_step - after_backward - accumulated) // gpus)
