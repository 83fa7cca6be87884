"""`export_checkpoint`: turns a checkpoint into a standard model folder, compensation included, from its files alone."""

from __future__ import annotations

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.trainer import TRAINER_STATE_NAME

from hf_lowprec.integrations.checkpoint_files.input_files import InputError, check_links, read_json
from hf_lowprec.integrations.checkpoint_files.stored_optimizer import StoredOptimizer, StoredParameter, read_optimizers
from hf_lowprec.integrations.checkpoint_files.stored_tensors import (
    ADAPTER_WEIGHTS,
    LazyTensors,
    TensorInfo,
    is_zero_checkpoint,
    open_weights,
    open_zero_weights,
    refuse_folder_of_checkpoints,
)
from hf_lowprec.integrations.export.parameter_names import PARAMETERS_NAME, read_parameter_names
from hf_lowprec.integrations.export.recorded_operations import RecordedOperations
from hf_lowprec.integrations.export.save_pretrained import (
    MAX_SHARD_SIZE,
    ExportDtype,
    parse_dtype,
    save_lazy_tensors,
    saved_dtype,
    saved_value,
)
from hf_lowprec.integrations.transformers import private_apis
from hf_lowprec.integrations.transformers.checkpoints.manifest import MANIFEST_NAME, check_files
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
"""Files and folders of a checkpoint, or of the model that training started from, that are not copied to an exported
folder, or are written anew."""
_ADAPTER_CONFIG = "adapter_config.json"
_DEFAULT = "default"
"""The adapter that PEFT saves in the folder itself; others have a folder of their own."""
_SCRIPT = "call hf_lowprec.save_pretrained(model, optimizer, …) in the training script"


class ExportReport(NamedTuple):
    """The report of `export_checkpoint`; `print` it.

    Attributes:
        tensors: the number of tensors written.
        refined: the number of weights to which a compensation, or the low bits of the cast, were added.
        dtype: the dtype in config.json.
        notes: what else the user should know.
    """

    tensors: int
    refined: int
    dtype: str
    notes: list[str]

    def __str__(self) -> str:
        kept = " (float32 where training keeps it, as in norms)" * (self.dtype == "bfloat16")
        counts = f"{self.tensors} tensors, {self.dtype}{kept}"
        return "\n".join([f"{counts}; compensation or remainder added to {self.refined} of them", *self.notes])


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

    It reads checkpoints of Trainer and folders of `Accelerator.save_state`: from one process, DDP or FSDP2, sharded or
    full, of whole models or PEFT adapters; and from DeepSpeed's ZeRO, of whole models. It needs neither the training
    script nor several processes. It needs memory for the tensors of one file and for the tensors from which one of
    these is computed.

    Args:
        checkpoint: the folder of the checkpoint.
        save_directory: a new or empty folder to write.
        dtype: `"float32"` or `"bfloat16"`. With `"bfloat16"`, each FP32 estimate is rounded stochastically, but tensors
            that are FP32 in the checkpoint, such as norms, stay FP32.
        model_folder: a folder with config.json, tokenizer and generation config, for a checkpoint without them.
        max_shard_size: the size of a weight file, as in transformers.

    Raises:
        ValueError: the checkpoint cannot be read, or is unfinished, quantized or of a kind that cannot be exported, or
            `save_directory` is not empty. The message says what to do.
        OSError: `save_directory` cannot be written.
    """
    source, folder, dtype = Path(checkpoint), Path(save_directory), parse_dtype(dtype)
    _check_folders(source, folder)
    names = read_parameter_names(source)
    optimizers = read_optimizers(source, names)
    refining = _refining(optimizers)
    description = Path(model_folder) if model_folder else source
    with _removed_if_it_fails(folder):
        if names.adapters or (description / _ADAPTER_CONFIG).is_file():
            written = _export_adapters(source, names.adapters or {_DEFAULT: {}}, refining, description, folder, dtype)
        else:
            weights = open_zero_weights(source) if is_zero_checkpoint(source) else open_weights(source)
            written = _export_model(weights, refining, description, folder, dtype, max_shard_size)
        _copy_description(description, folder)
    return ExportReport(*written, dtype_name(dtype), _notes(source, optimizers))


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
        raise ValueError(f"checkpoint={str(checkpoint)!r} is not finished: random_states_0.pkl is missing")
    refuse_folder_of_checkpoints(checkpoint)


def _refining(optimizers: list[StoredOptimizer]) -> dict[str, StoredParameter]:
    """Return the parameters, by name, for which the optimizers know more than the stored weight.

    Raises:
        ValueError: their names are not known.
    """
    refining: dict[str, StoredParameter] = {}
    for optimizer in optimizers:
        if optimizer.refines and optimizer.names is None:
            raise ValueError(
                f"the checkpoint has compensations but no {PARAMETERS_NAME}, which names their parameters; Trainer and "
                "hf_lowprec.prepare_accelerator save it. Resume the run from it and save another checkpoint, or "
                f"{_SCRIPT}"
            )
        for name, parameter in zip(optimizer.names or (), optimizer.parameters, strict=False):
            if name is not None and parameter.refines:
                refining[name] = parameter
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
    weights: LazyTensors,
    refining: Mapping[str, StoredParameter],
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
    by_tensor: dict[int, list[str]] = defaultdict(list)
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_tensor[id(tensor)].append(name)
    tied = {name: names for names in by_tensor.values() for name in names}
    if unknown := [name for name in refining if name not in tied]:
        raise ValueError(
            f"the optimizer has a compensation for {unknown[0]}, which config.json's model lacks, because the trained "
            f"model was changed after it was built; {_SCRIPT}"
        )
    refining = {alias: parameter for name, parameter in refining.items() for alias in tied[name]}
    tensors = _estimates(_in_layout_of(model, weights, tied), refining, dtype)
    save_lazy_tensors(model, tensors, folder, dtype, max_shard_size)
    first_names = {tied[name][0] for name in tensors.infos}
    return len(first_names), len(first_names & refining.keys())


def _estimates(weights: LazyTensors, refining: Mapping[str, StoredParameter], dtype: torch.dtype) -> LazyTensors:
    """Return the FP32 estimates of `weights`, with the dtypes that they have in a folder of `dtype`.

    Raises:
        ValueError: the compensation of a weight has another shape.
    """
    for name, (shape, _) in weights.infos.items():
        compensation = refining[name].compensation if name in refining else None
        if compensation and (other := refining[name].infos[compensation].shape) != shape:
            raise ValueError(
                f"{name} has the shape {tuple(shape)}, but its compensation has {tuple(other)}: the weights and the "
                "optimizer are from different checkpoints"
            )

    def read(name: str) -> Tensor:
        weight = weights.read(name)
        return refining[name].estimate(weight) if name in refining else weight

    infos = {name: TensorInfo(info.shape, saved_dtype(info.dtype, dtype)) for name, info in weights.infos.items()}
    return LazyTensors(infos, read)


def _in_layout_of(model: Any, weights: LazyTensors, tied: Mapping[str, list[str]]) -> LazyTensors:
    """Return the weights of a checkpoint with the names and shapes that they, and optimizer states, have in `model`.

    transformers saves some models in another layout than it trains them in: names differ, matrices are transposed, and
    experts, which are one tensor in the model, are several in its files.

    Args:
        model: the model; it may be on the meta device.
        weights: the checkpoint's weights, in the layout of the model or of its files.
        tied: for each name of a tensor of the model, all of its names.

    Returns:
        The tensors of the model, without those that transformers does not save.

    Raises:
        ValueError: the checkpoint lacks one of them.
    """
    tensors = model.state_dict()
    recorded = RecordedOperations(tensors)
    with recorded:
        saved = private_apis.in_saved_layout(model, recorded.tensors)
    parts_of: dict[str, list[str]] = {name: [] for name in tensors}
    for part, tensor in saved.items():
        for name in recorded.sources_of(tensor):
            parts_of[name].append(part)

    def has(name: str, like: Tensor) -> bool:
        return name in weights.infos and weights.infos[name].shape == like.shape

    def has_parts(name: str) -> bool:
        return bool(parts_of[name]) and all(has(part, saved[part]) for part in parts_of[name])

    stored_names: dict[str, str] = {}
    converted: dict[str, str] = {}
    infos: dict[str, TensorInfo] = {}
    for name, tensor in tensors.items():
        if stored := [alias for alias in tied[name] if has(alias, tensor)]:
            stored_names[name] = stored[0]
            infos[name] = weights.infos[stored[0]]
        elif stored := [*filter(has_parts, tied[name])]:
            converted[name] = stored[0]
            dtypes = {weights.infos[part].dtype for part in parts_of[stored[0]]}
            # FP32 holds the values of all parts.
            infos[name] = TensorInfo(tensor.shape, torch.float32 if len(dtypes) > 1 else dtypes.pop())
        elif name not in (model._keys_to_ignore_on_save or ()):
            raise ValueError(
                f"the checkpoint has no weights for {name} of shape {tuple(tensor.shape)}, which "
                f"{type(model).__name__} has according to config.json"
            )

    def read(name: str) -> Tensor:
        if name in stored_names:
            return weights.read(stored_names[name])
        # Save again, with the elements' positions instead of their values: the position found at each place of a part
        # says where the value at that place belongs.
        shape, dtype = infos[name]
        source, parts, result = converted[name], parts_of[converted[name]], torch.empty(shape.numel(), dtype=dtype)
        integer = torch.int32 if shape.numel() < 2**31 else torch.int64
        sources = {other for part in parts for other in recorded.sources_of(saved[part])}
        positions = {other: torch.full(tensors[other].shape, -1, dtype=integer) for other in sources}
        positions[source] = torch.arange(shape.numel(), dtype=integer).view(shape)
        missing = shape.numel()
        for part, position in zip(parts, recorded.evaluate([saved[part] for part in parts], positions), strict=True):
            is_own = (position >= 0).flatten()
            result[position.flatten()[is_own]] = weights.read(part).flatten()[is_own].to(dtype)
            missing -= int(is_own.sum())
        if missing:
            raise ValueError(f"saving {name} loses elements, so it cannot be read from the checkpoint")
        return result.view(shape)

    return LazyTensors(infos, read)


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


def _export_adapters(
    checkpoint: Path,
    adapters: Mapping[str, Mapping[str, str]],
    refining: Mapping[str, StoredParameter],
    description: Path,
    folder: Path,
    dtype: torch.dtype,
) -> tuple[int, int]:
    """Export the adapters of a PEFT model, stored in adapter files, or under the names of their parameters.

    Args:
        adapters: for each adapter, the names of its tensors in an adapter file and of their parameters, as in
            `ParameterNames`.

    Returns:
        The number of their tensors, and of those that were refined.
    """
    saved = {parameter for parameters in adapters.values() for parameter in parameters.values()}
    if lost := sorted(refining.keys() - saved):
        raise ValueError(
            f"the optimizer has a compensation for {lost[0]}, but PEFT saves only what is computed from it; {_SCRIPT}"
        )
    count = 0
    for adapter, parameters in adapters.items():
        part = "" if adapter == _DEFAULT else adapter
        has_own_file = (checkpoint / part / ADAPTER_WEIGHTS).is_file()
        weights = open_weights(checkpoint / part if has_own_file else checkpoint)
        as_stored = has_own_file or not parameters
        stored_names = dict(zip(weights.infos, weights.infos, strict=True)) if as_stored else parameters
        if missing := [name for name in stored_names.values() if name not in weights.infos]:
            raise ValueError(f"{str(checkpoint)!r} has no weights for {missing[0]}, a parameter of an adapter")
        of_adapter = {name: refining[param] for name, param in parameters.items() if param in refining}
        tensors = _estimates(weights.renamed(stored_names), of_adapter, dtype)
        (folder / part).mkdir(parents=True, exist_ok=True)
        values = {
            name: saved_value(parameters.get(name, name), tensors.read(name), info.dtype).contiguous()
            for name, info in tensors.infos.items()
        }
        save_file(values, folder / part / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        shutil.copyfile(description / part / _ADAPTER_CONFIG, folder / part / _ADAPTER_CONFIG)
        count += len(values)
    return count, len(refining)


def _copy_description(description: Path, folder: Path) -> None:
    """Copy the files of a model folder other than weights and config.json, such as tokenizer and generation config."""
    for path in sorted(description.iterdir()):
        target = folder / path.name
        if _NOT_OF_A_MODEL.match(path.name) or target.is_dir() or path.samefile(folder):  # adapters are written
            continue
        shutil.copytree(path, target) if path.is_dir() else shutil.copyfile(path, target)


@contextmanager
def _removed_if_it_fails(folder: Path) -> Iterator[None]:
    """Remove what was written to `folder` if an error leaves it incomplete, so that it is not mistaken for a model."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, SafetensorError):  # on a full disk
            raise OSError(f"{str(folder)!r} cannot be written: {error}") from error
        raise
