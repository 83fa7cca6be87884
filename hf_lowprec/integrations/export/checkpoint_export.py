"""`export_checkpoint`: turns a checkpoint into a standard model folder, compensation included, from its files alone."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.trainer import TRAINER_STATE_NAME

from hf_lowprec.integrations.checkpoint_files.input_files import InputError, check_links, read_json
from hf_lowprec.integrations.checkpoint_files.stored_optimizer import StoredOptimizer, StoredParameter, read_optimizers
from hf_lowprec.integrations.checkpoint_files.stored_tensors import StoredTensors, TensorInfo
from hf_lowprec.integrations.checkpoint_files.stored_weights import (
    ADAPTER_WEIGHTS,
    is_zero_checkpoint,
    open_weights,
    open_zero_weights,
)
from hf_lowprec.integrations.export.model_folder import (
    MAX_SHARD_SIZE,
    ExportDtype,
    PendingTensor,
    parse_dtype,
    saved_dtype,
    write_model_folder,
)
from hf_lowprec.integrations.export.parameter_names import PARAMETERS_NAME, ParameterNames, read_parameter_names
from hf_lowprec.integrations.export.weight_layout import WeightLayout
from hf_lowprec.integrations.transformers.checkpoints.manifest import MANIFEST_NAME, check_files, replace_file
from hf_lowprec.integrations.transformers.checkpoints.resume import holds_optimizer
from hf_lowprec.integrations.transformers.named_models import build_empty_model, load_config
from hf_lowprec.rounding import dtype_name

_NOT_OF_A_MODEL = re.compile(
    r"(optimizer|scheduler|scaler|rng_state|random_states|sampler|dl_state_dict|custom_checkpoint)[\w-]*\.\w+$"
    r"|optimizer_\d+$|pytorch_model|model.*\.safetensors|adapter_model\.|global_step|latest$|zero_to_\w+\.py$"
    r"|(consolidated|tf_model|flax_model)\.|checkpoint-"
    rf"|{re.escape(TRAINER_STATE_NAME)}$|training_args\.bin$|{re.escape(MANIFEST_NAME)}"
    rf"|{re.escape(PARAMETERS_NAME)}$|config\.json$|\.metadata$"
)
"""Files and folders of a checkpoint, or of the model that training started from, that an exported folder does not get,
or that are written anew."""
_ADAPTER_CONFIG = "adapter_config.json"
_DEFAULT = "default"
"""The adapter that PEFT saves in the folder itself; others have a folder of their own."""
_SCRIPT = "call hf_lowprec.save_pretrained(model, optimizer, …) in the training script"


class ExportReport(NamedTuple):
    """The report of `export_checkpoint`; `print` it.

    Attributes:
        tensors: the number of tensors written.
        refined: the number of weights to which their compensation, or the low bits of their cast, were added.
        dtype: the dtype in config.json.
        notes: what else the user should know.
    """

    tensors: int
    refined: int
    dtype: str
    notes: list[str]

    def __str__(self) -> str:
        lines = [
            f"{self.tensors} tensors, {self.dtype}; compensation or remainder added to {self.refined} of them",
            *self.notes,
        ]
        return "\n".join(lines)


@torch.no_grad()
def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    save_directory: str | os.PathLike[str],
    *,
    dtype: ExportDtype | torch.dtype = "float32",
    model_folder: str | os.PathLike[str] | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> ExportReport:
    """Write the folder that `hf_lowprec.save_pretrained` would have written when a checkpoint was saved.

    Reads checkpoints of Trainer and folders of `Accelerator.save_state`, from one process, DDP or FSDP2, sharded or
    full, of whole models or PEFT adapters, and those of DeepSpeed's ZeRO, of whole models. It needs neither the
    training script nor several processes, but memory for the tensors of one file and for those from which one of them
    is computed.

    Args:
        checkpoint: the folder of the checkpoint.
        save_directory: a new or empty folder to write.
        dtype: `"float32"`, or `"bfloat16"`: each FP32 estimate rounded to nearest, but tensors that are FP32 in the
            checkpoint, such as norms, stay FP32.
        model_folder: a folder with config.json, tokenizer and generation config, for a checkpoint without them.
        max_shard_size: the size of a weight file, as in transformers.

    Raises:
        ValueError: the checkpoint cannot be read, or is unfinished, quantized or of a kind that cannot be exported, or
            `save_directory` is not empty. The message says what to do.
        OSError: `save_directory` cannot be written.
    """
    source, folder, parsed = Path(checkpoint), Path(save_directory), parse_dtype(dtype)
    _check_folders(source, folder)
    names = read_parameter_names(source)
    optimizers = read_optimizers(source, names)
    description = Path(model_folder) if model_folder else source
    with _removed_if_it_fails(folder):
        if (names and names.adapters) or (description / _ADAPTER_CONFIG).is_file():
            written = _export_adapters(source, optimizers, names, description, folder, parsed)
        else:
            weights = open_zero_weights(source) if is_zero_checkpoint(source) else open_weights(source)
            written = _export_model(weights, optimizers, description, folder, parsed, max_shard_size)
        _copy_description(description, folder, skipped=names.adapters if names else ())
    return ExportReport(*written, dtype_name(parsed), _notes(source, optimizers))


def _check_folders(checkpoint: Path, folder: Path) -> None:
    if not checkpoint.is_dir():
        raise ValueError(f"there is no checkpoint {str(checkpoint)!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} is not an empty folder; export to a new one")
    check_links(checkpoint)
    check_files(checkpoint, "checkpoint")
    if (checkpoint / TRAINER_STATE_NAME).exists():
        return
    holds_others = holds_optimizer(checkpoint) and not is_zero_checkpoint(checkpoint)
    saved_by_accelerate = holds_others or (checkpoint / PARAMETERS_NAME).exists()
    if saved_by_accelerate and not any(checkpoint.glob("random_states_*.pkl")):  # they are written last
        raise ValueError(f"checkpoint={str(checkpoint)!r} was not finished: it has no random_states_0.pkl")
    inner = sorted(path.name for path in checkpoint.glob("checkpoint[-_]*") if path.is_dir())
    if inner:
        raise ValueError(f"{str(checkpoint)!r} is a folder of checkpoints; pass one of {', '.join(inner)}")


def _refining(optimizers: list[StoredOptimizer]) -> dict[str, StoredParameter]:
    """The parameters of which the optimizers know more than the stored weight, by name.

    Raises:
        ValueError: their names are not known.
    """
    refining: dict[str, StoredParameter] = {}
    for optimizer in filter(lambda one: one.refines, optimizers):
        if optimizer.names is None:
            raise ValueError(
                f"the checkpoint has compensations but no {PARAMETERS_NAME}, which names their parameters; Trainer and "
                "hf_lowprec.prepare_accelerator save it. Resume the run from it and save another checkpoint, or "
                f"{_SCRIPT}"
            )
        parameters = zip(chain(*optimizer.names), chain(*optimizer.parameters), strict=True)
        refining |= {name: parameter for name, parameter in parameters if name is not None and parameter.refines}
    return refining


def _notes(checkpoint: Path, optimizers: list[StoredOptimizer]) -> list[str]:
    if any(optimizer.refines for optimizer in optimizers):
        return []
    if is_zero_checkpoint(checkpoint):
        return ["DeepSpeed's optimizer states hold the FP32 weights, compensation or remainder included"]
    if not holds_optimizer(checkpoint):
        return ["no optimizer state (save_only_model=True?): the weights are as they were stored, without compensation"]
    if not any(optimizer.is_ours for optimizer in optimizers):
        return ["saved by an optimizer of another library, which has no compensation: the weights are as stored"]
    return ["the optimizer keeps no compensation (rounding is not 'kahan'): the weights are as stored"]


def _export_model(
    weights: StoredTensors,
    optimizers: list[StoredOptimizer],
    description: Path,
    folder: Path,
    dtype: torch.dtype,
    max_shard_size: int | str,
) -> tuple[int, int]:
    """Export a whole model.

    Returns:
        The number of its tensors, and of those that were refined.
    """
    model = _empty_model(description)
    layout = WeightLayout(model, weights)
    refining = _by_first_name(_refining(optimizers), layout.aliases)
    tensors = {
        name: _pending(info, refining.get(layout.aliases[name][0]), partial(layout.read, name), dtype, name)
        for name, info in layout.infos.items()
    }
    write_model_folder(model, tensors, folder, dtype, max_shard_size)
    _write_config(description, folder, dtype)
    generation_config = description / "generation_config.json"
    if generation_config.is_file():
        shutil.copyfile(generation_config, folder / generation_config.name)
    once = {layout.aliases[name][0] for name in tensors}
    return len(once), len(once & refining.keys())


def _by_first_name(
    refining: Mapping[str, StoredParameter], aliases: Mapping[str, list[str]]
) -> dict[str, StoredParameter]:
    """The parameters by the first of their names in the model.

    Raises:
        ValueError: the model has no such parameter.
    """
    unknown = [name for name in refining if name not in aliases]
    if unknown:
        raise ValueError(
            f"the optimizer has a compensation for {unknown[0]}, which the model of config.json does not have, because "
            f"it was changed after it was built; {_SCRIPT}"
        )
    return {aliases[name][0]: parameter for name, parameter in refining.items()}


def _pending(
    info: TensorInfo, parameter: StoredParameter | None, read: partial[Tensor], dtype: torch.dtype, name: str
) -> PendingTensor:
    """The tensor `name` of the exported folder.

    Raises:
        ValueError: its compensation has another shape.
    """
    if parameter is not None and parameter.compensation is not None:
        shape = parameter.infos[parameter.compensation].shape
        if shape != info.shape:
            raise ValueError(
                f"{name} has the shape {tuple(info.shape)}, but its compensation has {tuple(shape)}: the weights and "
                "the optimizer are from different checkpoints"
            )

    def compute() -> Tensor:
        return read() if parameter is None else parameter.estimate(read())

    return PendingTensor(info.shape, saved_dtype(info.dtype, dtype), compute)


def _empty_model(folder: Path) -> nn.Module:
    """Build the model that config.json describes, on the meta device, where weights take no memory."""
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{str(folder)!r} has no config.json; pass the folder of the model that the training started from, with "
            "its tokenizer, as model_folder (--model-folder)"
        )
    content = read_json(folder / "config.json")
    if "quantization_config" in content:
        method = content["quantization_config"].get("quant_method", "unknown")
        raise ValueError(
            f"the weights of this model are quantized ({method}) and have no FP32 estimate; train adapters on it with "
            "peft.get_peft_model, and export their checkpoint"
        )
    try:
        return build_empty_model(*load_config(str(folder)))
    except InputError as error:
        raise ValueError(f"{error}; {_SCRIPT}") from None


def _write_config(description: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the checkpoint's config.json with the dtype of the exported folder."""
    content = read_json(description / "config.json")
    parts = [content, *(part for part in content.values() if isinstance(part, dict) and "model_type" in part)]
    for part in parts:
        part.pop("torch_dtype", None)
        part["dtype"] = dtype_name(dtype)
    replace_file(folder / "config.json", json.dumps(content, indent=2, sort_keys=True) + "\n")


def _export_adapters(
    checkpoint: Path,
    optimizers: list[StoredOptimizer],
    names: ParameterNames | None,
    description: Path,
    folder: Path,
    dtype: torch.dtype,
) -> tuple[int, int]:
    """Export the adapters of a PEFT model.

    Returns:
        The number of their tensors, and of those that were refined.
    """
    refining = _refining(optimizers)
    adapters = names.adapters if names and names.adapters else {_DEFAULT: {}}
    saved = {name for of_adapter in adapters.values() for name in of_adapter.values()}
    if lost := sorted(refining.keys() - saved):
        raise ValueError(
            f"the optimizer has a compensation for {lost[0]}, but PEFT saves only what is computed from it; {_SCRIPT}"
        )
    count = 0
    for adapter, parameters in adapters.items():
        part = "" if adapter == _DEFAULT else adapter
        tensors = {
            name: _pending(info, refining.get(parameters.get(name, "")), read, dtype, name)
            for name, info, read in _adapter_tensors(checkpoint, part, parameters)
        }
        (folder / part).mkdir(parents=True, exist_ok=True)
        values = {name: pending.value().contiguous() for name, pending in tensors.items()}
        save_file(values, folder / part / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        shutil.copyfile(description / part / _ADAPTER_CONFIG, folder / part / _ADAPTER_CONFIG)
        count += len(tensors)
    return count, len(refining)


def _adapter_tensors(
    checkpoint: Path, part: str, parameters: dict[str, str]
) -> Iterator[tuple[str, TensorInfo, partial[Tensor]]]:
    """Each tensor of an adapter: its name in an adapter file, its shape and dtype, and a function that reads it.

    They are stored in an adapter file, or under the names of their parameters.
    """
    own = (checkpoint / part / ADAPTER_WEIGHTS).is_file()
    stored = open_weights(checkpoint / part if own else checkpoint)
    for name in stored.infos if own or not parameters else parameters:
        stored_name = name if name in stored.infos else parameters[name]
        if stored_name not in stored.infos:
            raise ValueError(f"{str(checkpoint)!r} has no weights for {stored_name}, a parameter of an adapter")
        yield name, stored.infos[stored_name], partial(stored.read, stored_name)


def _copy_description(description: Path, folder: Path, skipped: Container[str]) -> None:
    """Copy what a model folder has besides weights and configuration, such as the tokenizer, except `skipped`."""
    for path in sorted(description.iterdir()):
        target = folder / path.name
        if path.name in skipped or _NOT_OF_A_MODEL.match(path.name) or target.exists() or path.samefile(folder):
            continue
        shutil.copytree(path, target) if path.is_dir() else shutil.copyfile(path, target)


@contextmanager
def _removed_if_it_fails(folder: Path) -> Iterator[None]:
    """Remove what was written to `folder` if it remains incomplete, so that nobody takes it for a model."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, SafetensorError):  # on a full disk
            raise OSError(f"{str(folder)!r} cannot be written: {error}") from error
        raise
