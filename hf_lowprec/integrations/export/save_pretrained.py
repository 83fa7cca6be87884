"""`save_pretrained`: writes a model that is being trained as a standard folder, compensation included.

transformers and PEFT write the folder by their own `save_pretrained`, so names, tied weights, files and configuration
are the usual ones. They are given tensors without values, which are computed when their file is written.
"""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import transformers.trainer  # noqa: F401  (first: importing it runs code of this package that imports what follows)
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from hf_lowprec.integrations.adapters import has_adapters, is_peft, saved_adapters
from hf_lowprec.integrations.checkpoint_files.stored_tensors import LazyTensors, TensorInfo
from hf_lowprec.integrations.export.recorded_operations import RecordedOperations
from hf_lowprec.integrations.transformers import private_apis
from hf_lowprec.integrations.transformers.checkpoints.manifest import replace_file
from hf_lowprec.optim.param_groups import unwrap_optimizer
from hf_lowprec.optim.private_torch_apis import without_grad
from hf_lowprec.optim.sharding import full_shape, is_sharded
from hf_lowprec.optim.state.fp32_weights import fp32_estimates, is_cut, warn_of_weights_as_stored
from hf_lowprec.reduction.collectives import explain_lost_rank
from hf_lowprec.rounding import dtype_name
from hf_lowprec.rounding.stochastic import round_stochastic
from hf_lowprec.wrapped_method import temporarily_wrapped

ExportDtype = Literal["float32", "bfloat16"]
"""The dtypes of an exported folder, by name."""
MAX_SHARD_SIZE = "5GB"
"""The default size of a file, which the Hub recommends. It bounds the memory that saving takes."""
_DONE, _FAILED = -1, -2
"""Rank 0 sends one of these instead of a tensor's number."""
_CHUNK = 1 << 22
"""The number of elements rounded at a time. It bounds the memory of their random bits."""


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
    """Write a model folder with the best FP32 estimate of every weight, as `fp32_state_dict` computes it.

    With the default `dtype`, `from_pretrained(save_directory)` loads exactly these weights, because config.json names
    FP32. For a PEFT model, this function writes the adapters. The model is not changed.

    Under FSDP2, HSDP and DeepSpeed's ZeRO, every rank must call this function. Rank 0 gathers one tensor at a time and
    writes the folder, which is complete when the function returns on any rank. Under DDP, ranks other than 0 return at
    once.

    It needs memory for the tensors of one file and one more tensor. A warning names trainable 16-bit parameters that
    `optimizer` does not train, as in `fp32_state_dict`.

    Args:
        model: the trained transformers or PEFT model, with or without the wrappers of accelerate, DDP,
            `torch.compile` or Lightning Fabric.
        optimizer: its optimizer, or accelerate's wrapper around it.
        save_directory: the folder to write.
        dtype: `"float32"` or `"bfloat16"`. With `"bfloat16"`, each estimate is rounded stochastically, so that changes
            below half of BF16's spacing are kept on average. Tensors that are FP32 in training, such as norms, stay
            FP32, as in the folders that Trainer saves. Saving twice writes the same file.
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
    stored = model.state_dict(keep_vars=True)  # the parameters themselves, by which the optimizer knows them
    infos = {name: TensorInfo(full_shape(t), saved_dtype(t.dtype, dtype)) for name, t in stored.items()}

    def read(name: str) -> Tensor:
        value: Any = estimate(stored[name])
        return value.full_tensor() if is_sharded(value) else value  # gathered on every rank

    def write(tensors: LazyTensors) -> None:
        save_lazy_tensors(model, tensors, folder, dtype, max_shard_size)
        if processing_class is not None:
            processing_class.save_pretrained(folder)

    tensors = LazyTensors(infos, read)
    sharded: Any = next(filter(is_sharded, stored.values()), None)
    if sharded is not None:
        _write_on_first_rank(tensors, torch.device(sharded.device_mesh.device_type), write)
    elif is_cut(unwrap_optimizer(optimizer)):
        _write_on_first_rank(tensors, next(iter(stored.values())).device, write)
    elif not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        write(tensors)


def _write_on_first_rank(tensors: LazyTensors, device: torch.device, write: Callable[[LazyTensors], None]) -> None:
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
    names = [*tensors.infos]

    def announce(number: int) -> int:  # returns that of rank 0; the others' own is ignored
        message = torch.tensor(number, device=device)
        with explain_lost_rank(group, "saving a model"):
            dist.broadcast(message, src=0)
        return int(message)

    def read_together(name: str) -> Tensor:
        announce(names.index(name))
        return tensors.read(name)

    if dist.get_rank() == 0:
        try:
            write(LazyTensors(tensors.infos, read_together))
        except BaseException:
            announce(_FAILED)
            raise
        announce(_DONE)
        return
    while (number := announce(0)) >= 0:
        tensors.read(names[number])
    if number == _FAILED:
        raise RuntimeError("rank 0 could not save the model; its error says why")


def save_lazy_tensors(
    model: Any,
    tensors: LazyTensors,
    folder: Path,
    dtype: torch.dtype,
    max_shard_size: int | str,
) -> None:
    """Call `model.save_pretrained`, which writes `tensors` instead of the model's own.

    At any time, the tensors of one file are in memory, and those from which one of them is computed. The adapters of a
    model are small, so they are computed together.

    Args:
        model: a transformers or PEFT model. It may be on the meta device.
        tensors: a tensor for each name of `model.state_dict()`, in the dtype of the file. They are rounded to it.
        folder: the folder to write.
        dtype: what config.json says.
        max_shard_size: as in `save_pretrained`.
    """
    recorded = RecordedOperations(tensors.infos)

    def compute(file: dict[str, Tensor]) -> dict[str, Tensor]:
        (folder / CONFIG_NAME).unlink(missing_ok=True)
        return _computed(file, tensors, recorded)

    with _copied_config(model), recorded:
        if has_adapters(model):
            adapters = saved_adapters(model, recorded.tensors)
            saved = [tensor for adapter in adapters.values() for tensor in adapter.values()]
            values = {name: _value(tensors, name) for name in frozenset().union(*map(recorded.sources_of, saved))}
            with _prompt_encoder_with(model, tensors):
                model.save_pretrained(folder, state_dict=recorded.tensors | values)
            return
        # transformers writes config.json first, with the dtype of training: if the process were killed after the
        # weights, the folder would load in that dtype. For the same reason, the config.json of an earlier model is
        # removed before its weights.
        config = model.config
        with (
            temporarily_wrapped(config, "to_json_file", lambda *_, **__: None),
            private_apis.computing_saved_tensors(compute),
        ):
            model.save_pretrained(folder, state_dict={**recorded.tensors}, max_shard_size=max_shard_size)
        for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
            if part is not None:
                part.dtype = dtype_name(dtype)
        replace_file(folder / CONFIG_NAME, config.to_json_string())


def _value(tensors: LazyTensors, name: str) -> Tensor:
    return saved_value(name, tensors.read(name).cpu(), tensors.infos[name].dtype)


def _computed(file: dict[str, Tensor], tensors: LazyTensors, recorded: RecordedOperations) -> dict[str, Tensor]:
    """Compute the tensors of one file, in the order of their sources, so that each source is read once."""
    by_sources: dict[frozenset[str], list[str]] = {}
    for name, tensor in file.items():
        by_sources.setdefault(recorded.sources_of(tensor), []).append(name)
    computed: dict[str, Tensor] = {}
    for sources, names in by_sources.items():
        values = {source: _value(tensors, source) for source in sources}
        for name, value in zip(names, recorded.evaluate(map(file.__getitem__, names), values), strict=True):
            # A view would keep all of its source in memory.
            is_view = value.untyped_storage().nbytes() != value.nbytes
            computed[name] = value.clone(memory_format=torch.contiguous_format) if is_view else value.contiguous()
    return computed


@contextmanager
def _copied_config(model: nn.Module) -> Iterator[None]:
    """Give a transformers model a copy of its configuration inside, because saving changes it.

    In the copy, the model is not sharded: its tensors are given to it, and transformers must not gather them again.
    """
    if not isinstance(model, PreTrainedModel):
        yield
        return
    config = model.config
    model.config = copy.deepcopy(config)
    if getattr(config, "distributed_config", None) is not None:
        model.config.distributed_config = None
    try:
        yield
    finally:
        model.config = config


@contextmanager
def _prompt_encoder_with(model: nn.Module, tensors: LazyTensors) -> Iterator[None]:
    """Inside, give the prompt encoders of a PEFT model the values of `tensors`; PEFT saves what they compute."""
    params = {name: param for name, param in model.named_parameters() if name.startswith("prompt_encoder.")}
    trained = {name: param.data for name, param in params.items()}
    try:
        for name, param in params.items():
            param.data = _value(tensors, name).to(param.device)
        yield
    finally:
        for name, param in params.items():
            param.data = trained[name]


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the dtype of an exported folder.

    Raises:
        ValueError: it is neither FP32 nor BF16.
    """
    for name in get_args(ExportDtype):
        if dtype in (name, getattr(torch, name)):
            return getattr(torch, name)
    raise ValueError(f"dtype={dtype!r} is not supported; use {' or '.join(map(repr, get_args(ExportDtype)))}")


def saved_dtype(stored: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in the file of a tensor that training stores as `stored`, in a folder of `dtype`.

    In a BF16 folder, what training keeps in FP32 stays FP32, as in the folders that Trainer saves.
    """
    if not stored.is_floating_point:
        return stored
    return torch.float32 if stored.itemsize >= 4 else dtype


def saved_value(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a parameter as its file holds it: rounded stochastically if the file is BF16 and the parameter is not.

    At a small learning rate, a whole run can move most weights by less than half of BF16's spacing. If training started
    from BF16 weights, rounding to nearest returns such a weight to its initial value, and a part of what the model has
    learned is lost. Stochastic rounding keeps the change on average.

    Args:
        name: the parameter's name. The random bits depend only on it, so saving twice writes the same file.
        value: a tensor on the CPU.
        dtype: the dtype in the file.
    """
    if dtype != torch.bfloat16 or value.dtype == dtype:
        return value.to(dtype)
    generator, rounded = torch.Generator().manual_seed(zlib.crc32(name.encode())), torch.empty(value.shape, dtype=dtype)
    for source, target in zip(value.flatten().split(_CHUNK), rounded.view(-1).split(_CHUNK), strict=True):
        bits = torch.randint(1 << 16, source.shape, dtype=torch.int32, generator=generator)
        target.copy_(round_stochastic(source.float(), bits))
    return rounded


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
