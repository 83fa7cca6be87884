"""The memory of weights, gradients and optimizer state, for our optimizers and those that people compare them with."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_lowprec.casting import cast_model, return_float32
from hf_lowprec.integrations.checkpoint_files.input_errors import InputError, explain_input_errors
from hf_lowprec.integrations.deepspeed.config import check_optimizer
from hf_lowprec.integrations.transformers.optim_args import optim_args_of
from hf_lowprec.monitor.memory_estimate import MemoryUse, elements_kept_in_bf16, expected_memory
from hf_lowprec.optim.offload.host_steps import staging_bytes
from hf_lowprec.reduction.grad_accumulation import accumulator_bytes, check_grad_accumulation
from hf_lowprec.tools.estimate.activations import Activations
from hf_lowprec.tools.estimate.live_memory import LiveMemory
from hf_lowprec.tools.estimate.parallelism import (
    DATA_PARALLEL,
    Parallelism,
    add_memory,
    whole_parameters,
    with_whole_parameters,
    zero_memory,
)
from hf_lowprec.tools.estimate.step_peak import step_peak

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_lowprec.casting.cast_report import CastReport

FP32_ROW = "FP32, AdamW"
"""The row to compare with: torch's fused AdamW on FP32 weights; autocast to BF16 takes the same memory for them."""
MASTERS_ROW = "BF16, FP32 masters, AdamW"
"""The row to compare with under DeepSpeed: torch's AdamW on FP32 master weights of a BF16 model."""
FP32, BF16 = torch.float32, torch.bfloat16
_BLOCK = 256
"""Elements that share a scale in the 8-bit states of bitsandbytes."""
_SMALL = 4096
"""Tensors with fewer elements have FP32 states in bitsandbytes (`min_8bit_size`)."""


class Row(NamedTuple):
    """The memory of training with one optimizer.

    Attributes:
        name: the row's title: what is trained, or the value of `optim`.
        memory: of weights, gradients and state, of the whole model.
        accumulation: bytes for adding up micro-batches in addition to the gradients, on every GPU.
        step: bytes that the optimizer step needs for a moment, on every GPU.
        fp32_parts: which parameters a cast keeps in FP32: their number, by reason.
        kept_in_bf16: elements of states that 8 bits were asked for and that stay in BF16, by reason.
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
    fp32_parts: dict[str, int] | None = None
    kept_in_bf16: dict[str, int] | None = None
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


def fp32_row(model: nn.Module, gpus: int, steps: int, parallelism: Parallelism = DATA_PARALLEL) -> Row:
    """`model` in FP32 with torch's AdamW; under DeepSpeed, in BF16 with FP32 master weights.

    Raises:
        InputError: the model has no plan for `parallelism`.
    """
    if parallelism.zero is not None:
        row = _stock_row(MASTERS_ROW, model.to(BF16), gpus, steps, _two_moments)
        return row._replace(**zero_memory(row.memory, True, parallelism.zero, gpus, steps)._asdict())
    row = _stock_row(FP32_ROW, model, gpus, steps, _two_moments)
    whole = whole_parameters(model, parallelism)
    more = _stock_row("", nn.ParameterList(whole), gpus, steps, _two_moments)
    return row._replace(memory=add_memory(row.memory, more.memory, parallelism.tp - 1))


def low_precision_row(
    model: nn.Module,
    name: str,
    optim_args: str | None,
    gpus: int = 1,
    steps: int = 1,
    parallelism: Parallelism = DATA_PARALLEL,
) -> Row:
    """`model` with one of our optimizers, both set up as Trainer would. The model is cast.

    Raises:
        InputError: `name`, `optim_args` or their combination with `gpus` or `parallelism` is not supported.
    """
    from transformers import Trainer, TrainingArguments

    with explain_input_errors(f"--optim {name}"):
        args = TrainingArguments(gettempdir(), optim=name, optim_args=optim_args, use_cpu=True, report_to=[])
        options = optim_args_of(args)
        mode = check_grad_accumulation("nearest" if options.grad_accumulation is None else options.grad_accumulation)
        report = cast_model(model, keep_fp32=options.keep_fp32)
        return_float32(model, next_to_loss=False)
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
        if kwargs.get("gradient_release") and steps > 1:
            raise InputError(
                "gradient_release=True does not accumulate gradients; gradient_accumulation_steps must be 1"
            )
        optimizer = cls(model.parameters(), **kwargs)
        if parallelism.zero is not None:
            _check_for_zero(optimizer, mode)
        memory = expected_memory(model, optimizer)
        if optimizer.collector is not None:
            optimizer.collector.stop()
    trained = [param for param in model.parameters() if param.requires_grad]
    gradients = sum(param.nbytes for param in trained)
    if mode == "fp32":
        accumulation = accumulator_bytes(trained)
    else:
        accumulation = gradients if gpus > 1 and steps > 1 else 0
    on_host = 0, 0, 0
    if optimizer.offload_states:
        waiting, staging = optimizer.offload_gradients, staging_bytes(trained, optimizer.offload_gradients)
        on_host = memory.state.total(), gradients if waiting else 0, staging
        memory = replace(memory, state=Counter())
    kept_in_bf16 = dict(elements_kept_in_bf16(optimizer).most_common())
    peak, fp32_parts = step_peak(optimizer), _fp32_parts(model, report)
    if parallelism.zero is not None:
        divided = zero_memory(memory, False, parallelism.zero, gpus, steps)
        return Row(name, *divided, fp32_parts=fp32_parts, kept_in_bf16=kept_in_bf16)
    memory = with_whole_parameters(memory, optimizer, whole_parameters(model, parallelism), parallelism.tp)
    frees_gradients = optimizer.collector is not None
    return Row(name, memory, accumulation, peak, fp32_parts, kept_in_bf16, None, *on_host, frees_gradients)


def _check_for_zero(optimizer: Any, grad_accumulation: str) -> None:
    """Raise InputError or ValueError if DeepSpeed cannot step `optimizer`, or its memory is not estimated."""
    check_optimizer(optimizer)
    if grad_accumulation != "nearest":
        raise InputError(f"grad_accumulation={grad_accumulation!r} is not estimated with --zero; leave out one of them")


def compared_rows(build: Callable[[], nn.Module], gpus: int, steps: int) -> Iterator[Row]:
    """The rows to compare with: rounded BF16 with torch's AdamW, 8-bit AdamW, Adafactor.

    Args:
        build: builds the model in FP32 on the meta device.
        gpus: number of GPUs.
        steps: gradient accumulation steps.
    """
    yield _stock_row("BF16 rounded, AdamW", build().to(BF16), gpus, steps, lambda param: 4 * param.numel())
    for dtype, name in ((FP32, "FP32"), (BF16, "BF16 rounded")):
        model = build().to(dtype)
        embeddings = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
        yield _stock_row(f"{name}, 8-bit AdamW", model, gpus, steps, functools.partial(_eight_bit, embeddings))
    yield _adafactor_row(build(), gpus, steps)


def lora_row(model: PreTrainedModel, rank: int, gpus: int, steps: int) -> Row:
    """LoRA of `rank` on all linear layers except the head, as PEFT's `target_modules="all-linear"`.

    The model's own weights are BF16 and frozen; adapters are FP32, as PEFT makes them, with torch's AdamW.
    """
    head = model.get_output_embeddings()
    linear = (each.get_parameter("weight").shape for each in model.modules() if _is_linear(each) and each is not head)
    adapters = sum(rank * sum(shape) for shape in linear)
    count = sum(param.numel() for param in model.parameters())
    weights = Counter({BF16: 2 * count, FP32: 4 * adapters})
    gradients, state = Counter({FP32: 4 * adapters}), Counter({FP32: 8 * adapters})
    memory = MemoryUse(count + adapters, weights, gradients, state)
    return Row(f"BF16, LoRA rank {rank}, AdamW", memory, _whole_gradients(memory, gpus, steps))


def _stock_row(name: str, model: nn.Module, gpus: int, steps: int, state_bytes: Callable[[Tensor], int]) -> Row:
    """`model` in its dtypes with an optimizer whose state takes `state_bytes` of a parameter."""
    params: list[Tensor] = list(model.parameters())
    trained = [param for param in params if param.requires_grad]
    memory = MemoryUse.of(params, trained, Counter({FP32: sum(map(state_bytes, trained))}))
    return Row(name, memory, _whole_gradients(memory, gpus, steps))


def _two_moments(param: Tensor) -> int:
    """Bytes of the state of torch's AdamW in FP32."""
    return 8 * param.numel()


def _eight_bit(embeddings: Container[int], param: Tensor) -> int:
    """Bytes of the state of `optim="adamw_bnb_8bit"`, for which Trainer keeps embeddings' states in FP32.

    Two moments of one byte per element, with an FP32 scale per block each: 2.03 bytes per element (bitsandbytes,
    `Optimizer2State.init_state`).

    Args:
        embeddings: identities of embeddings' weights.
        param: the parameter.
    """
    if id(param) in embeddings or param.numel() < _SMALL:
        return 8 * param.numel()
    return 2 * (param.numel() + 4 * math.ceil(param.numel() / _BLOCK))


def _adafactor_row(model: nn.Module, gpus: int, steps: int) -> Row:
    """FP32 weights with `optim="adafactor"`: its step runs here on the meta device."""
    from transformers import Adafactor

    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = Adafactor(trained, lr=1e-3, scale_parameter=False, relative_step=False)
    for param in trained:
        param.grad = torch.empty_like(param)
    with LiveMemory() as memory:
        optimizer.step()

    def state_bytes(param: Tensor) -> int:
        return sum(v.nbytes for v in optimizer.state[param].values() if isinstance(v, Tensor) and v.ndim)

    row = _stock_row("FP32, Adafactor", model, gpus, steps, state_bytes)
    return row._replace(step=(memory.peak - row.memory.state.total()) // gpus)


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def _whole_gradients(memory: MemoryUse, gpus: int, steps: int) -> int:
    """Bytes of the unsharded gradients that FSDP2 keeps on every GPU while it accumulates micro-batches."""
    return memory.gradients.total() if gpus > 1 and steps > 1 else 0


def _fp32_parts(model: nn.Module, report: CastReport) -> dict[str, int]:
    """The number of parameters that stay in FP32, by reason, the largest first."""
    counts: Counter[str] = Counter()
    for name, param in model.named_parameters():
        if param.dtype == FP32:
            counts[_reason(name, report)] += param.numel()
    return dict(counts.most_common())


def _reason(name: str, report: CastReport) -> str:
    """The reason why the parameter `name` stays in FP32: its own, or that of the module around it."""
    parts = name.split(".")
    around = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
    for part in around:
        if part in report.kept:
            reason = report.kept[part]
            return f"{part.rpartition('.')[2]} ({reason})" if reason.startswith("named in") else reason
    return "another reason"
