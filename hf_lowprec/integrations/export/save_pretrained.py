"""`save_pretrained`: writes a model that is being trained as a standard folder, compensation included."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_lowprec.integrations.adapters import is_peft
from hf_lowprec.integrations.export.model_folder import (
    MAX_SHARD_SIZE,
    ExportDtype,
    PendingTensor,
    parse_dtype,
    saved_dtype,
    write_model_folder,
)
from hf_lowprec.optim.param_groups import unwrap_optimizer
from hf_lowprec.optim.private_torch_apis import without_grad
from hf_lowprec.optim.sharding import full_shape, is_sharded
from hf_lowprec.optim.state.fp32_weights import fp32_estimates, is_cut, warn_of_weights_as_stored
from hf_lowprec.reduction.collectives import explain_lost_rank

_DONE, _FAILED = -1, -2
"""The numbers that rank 0 announces in place of a tensor's."""


@without_grad
def save_pretrained(
    model: nn.Module,
    optimizer: Any,
    save_directory: str | os.PathLike[str],
    *,
    dtype: ExportDtype | torch.dtype = "float32",
    processing_class: Any = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Write a model folder with the best FP32 estimate of every weight, `weight + compensation`.

    `from_pretrained(save_directory)`, without further arguments, loads exactly these weights: config.json has their
    dtype. For a PEFT model, this function writes the adapters. The model is not changed.

    Under FSDP2, HSDP and DeepSpeed's ZeRO, every rank must call this function. Rank 0 gathers one tensor at a time and
    writes the folder, which is complete when the function returns on any rank. Under DDP, ranks other than 0 return at
    once.

    It needs memory for the tensors of one file and one more tensor. A warning names trainable 16-bit
    parameters that `optimizer` does not train, as in `fp32_state_dict`.

    Args:
        model: the trained transformers or PEFT model, with or without the wrappers of accelerate, DDP,
            `torch.compile` or Lightning Fabric.
        optimizer: its optimizer, or accelerate's wrapper around it.
        save_directory: the folder to write.
        dtype: `"float32"`, or `"bfloat16"`: each estimate rounded to nearest, but tensors that are FP32 in training,
            such as norms, stay FP32, as in the folders that Trainer saves.
        processing_class: a tokenizer or processor to save alongside.
        max_shard_size: the size of a weight file, as in transformers.

    Raises:
        ValueError: `optimizer` has none of the model's parameters, `dtype` is not supported, or the model's weights
            are quantized.
        TypeError: `model` is neither a transformers nor a PEFT model, or `optimizer` is not an optimizer.
        RuntimeError: rank 0 could not write the folder.
    """
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    if not (isinstance(model, PreTrainedModel) or is_peft(model)):
        model = getattr(model, "module", model)  # in the wrapper of Lightning Fabric
    dtype, folder = parse_dtype(dtype), Path(save_directory)
    _check_model(model)
    estimate = fp32_estimates(model, optimizer)
    warn_of_weights_as_stored(model, optimizer)
    named = dict(model.named_parameters(remove_duplicate=False))
    stored = {name: named.get(name, tensor) for name, tensor in model.state_dict().items()}
    tensors = {
        name: PendingTensor(full_shape(tensor), saved_dtype(tensor.dtype, dtype), partial(_computed, estimate, tensor))
        for name, tensor in stored.items()
    }

    def write(pending: Mapping[str, PendingTensor]) -> None:
        write_model_folder(model, pending, folder, dtype, max_shard_size)
        if processing_class is not None:
            processing_class.save_pretrained(folder)

    sharded = next((tensor for tensor in stored.values() if is_sharded(tensor)), None)
    if sharded is not None:
        _write_on_first_rank(tensors, torch.device(sharded.device_mesh.device_type), write)  # type: ignore[attr-defined]
    elif is_cut(unwrap_optimizer(optimizer)):
        _write_on_first_rank(tensors, next(iter(stored.values())).device, write)
    elif not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        write(tensors)


def _computed(estimate: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """The FP32 estimate of a parameter or buffer; of a sharded one the whole, gathered on every rank."""
    value = estimate(tensor)
    return value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined, no-any-return]


def _write_on_first_rank(
    tensors: Mapping[str, PendingTensor], device: torch.device, write: Callable[[Mapping[str, PendingTensor]], None]
) -> None:
    """Call `write(tensors)` on rank 0, and let the other ranks compute each tensor with it until it has finished.

    Only rank 0 knows which tensor it needs next, so it announces the tensor's number to the others before it computes
    it. Every rank must call this function, with the same names.

    Args:
        tensors: tensors that all ranks compute together.
        device: the device on which ranks communicate.
        write: writes the tensors, computing each one any number of times, in any order.

    Raises:
        RuntimeError: `write` failed on rank 0, where its own exception is raised, or a rank was lost.
    """
    group = dist.group.WORLD
    assert group is not None
    computations = [pending.compute for pending in tensors.values()]

    def announce(number: int) -> int:
        message = torch.tensor(number, device=device)
        with explain_lost_rank(group, "saving a model"):
            dist.broadcast(message, src=0)
        return int(message)

    if dist.get_rank() == 0:

        def compute_together(number: int) -> Tensor:
            announce(number)
            return computations[number]()

        pending = {
            name: tensor._replace(compute=lambda number=number: compute_together(number))  # type: ignore[misc]
            for number, (name, tensor) in enumerate(tensors.items())
        }
        try:
            write(pending)
        except BaseException:
            announce(_FAILED)
            raise
        announce(_DONE)
        return
    while (number := announce(0)) >= 0:
        computations[number]()
    if number == _FAILED:
        raise RuntimeError("rank 0 could not save the model; its error says why")


def _check_model(model: nn.Module) -> None:
    """Raise TypeError or ValueError unless `save_pretrained` can write `model`."""
    if is_peft(model):
        prompts = (
            name for name, param in model.named_parameters() if name.startswith("prompt_encoder.") and is_sharded(param)
        )
        if (name := next(prompts, None)) is not None:
            raise ValueError(
                f"{name} is sharded, and PEFT computes the prompts that it saves from whole tensors; train prompts "
                "with DDP"
            )
        return
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"{type(model).__name__} is neither a transformers nor a PEFT model; save the tensors of "
            "fp32_state_dict(model, optimizer) with safetensors.torch.save_file"
        )
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        method = quantizer.quantization_config.quant_method
        raise ValueError(
            f"the weights of this {type(model).__name__} are quantized ({getattr(method, 'value', method)}) and have "
            "no FP32 estimate; train adapters on it with peft.get_peft_model, whose model save_pretrained can write"
        )
