"""Writes a model folder in the standard format, with tensors that are computed as the files are written.

transformers and PEFT write the folder by their own `save_pretrained`, so names, tied weights, files and configuration
are as they always are.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
import transformers.trainer  # noqa: F401  (first: importing it runs code of this package that imports what follows)
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from hf_lowprec.integrations.adapters import has_adapters, is_peft
from hf_lowprec.integrations.export.recorded_operations import RecordedOperations
from hf_lowprec.integrations.transformers import private_apis
from hf_lowprec.integrations.transformers.checkpoints.manifest import replace_file
from hf_lowprec.rounding import dtype_name
from hf_lowprec.wrapped_method import temporarily_wrapped

ExportDtype = Literal["float32", "bfloat16"]
"""The dtypes of an exported folder, by name."""
MAX_SHARD_SIZE = "5GB"
"""The size of a file by default. It bounds the memory that saving takes, and is the Hub's recommendation."""


class PendingTensor(NamedTuple):
    """A tensor that is computed when its file is written.

    Attributes:
        shape: its shape.
        dtype: its dtype in the file.
        compute: returns the tensor, on any device, in any floating-point dtype.
    """

    shape: torch.Size
    dtype: torch.dtype
    compute: Callable[[], Tensor]

    def value(self) -> Tensor:
        """Compute the tensor, on the CPU, in its dtype."""
        return self.compute().to(device="cpu", dtype=self.dtype)


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype of an exported folder.

    Raises:
        ValueError: it is neither FP32 nor BF16.
    """
    for name in get_args(ExportDtype):
        if dtype in (name, getattr(torch, name)):
            return getattr(torch, name)
    raise ValueError(f"dtype={dtype!r} is not supported; use {' or '.join(map(repr, get_args(ExportDtype)))}")


def saved_dtype(stored: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype in the file of a tensor that training stores as `stored`, in a folder of `dtype`.

    In a BF16 folder, what training keeps in FP32 stays FP32, as in the folders that Trainer saves.
    """
    if not stored.is_floating_point:
        return stored
    return torch.float32 if stored.itemsize >= 4 else dtype


def write_model_folder(
    model: nn.Module,
    tensors: Mapping[str, PendingTensor],
    folder: Path,
    dtype: torch.dtype,
    max_shard_size: int | str,
) -> None:
    """Write `folder` as `model.save_pretrained` does, but with `tensors` in place of the model's own.

    At any time, the tensors of one file are in memory, and those from which one of them is computed.

    Args:
        model: a transformers or PEFT model. It may be on the meta device.
        tensors: a tensor for each name of `model.state_dict()`.
        folder: the folder to write.
        dtype: what config.json says.
        max_shard_size: as in `save_pretrained`.
    """
    recorded = RecordedOperations()
    state_dict = {name: recorded.add_source(name, pending.shape, pending.dtype) for name, pending in tensors.items()}
    with _copied_config(model), recorded:
        if is_peft(model):
            _write_adapters(model, tensors, folder, state_dict, recorded)
        elif has_adapters(model):
            names = _sources(model.get_adapter_state_dict(state_dict=state_dict), recorded)  # type: ignore[operator]
            model.save_pretrained(folder, state_dict=state_dict | {name: tensors[name].value() for name in names})  # type: ignore[operator]
        else:
            _write_model(model, tensors, folder, dtype, state_dict, recorded, max_shard_size)


def _write_model(
    model: Any,
    tensors: Mapping[str, PendingTensor],
    folder: Path,
    dtype: torch.dtype,
    state_dict: dict[str, Tensor],
    recorded: RecordedOperations,
    max_shard_size: int | str,
) -> None:
    """Write the weights, then config.json with `dtype`, in which `from_pretrained` loads all of them.

    transformers writes config.json first, with the dtype of training: a process that is killed after the weights would
    leave a folder that loads in that dtype. For the same reason, that of an earlier model goes before its weights.
    """
    config = model.config

    def compute(file: dict[str, Tensor]) -> dict[str, Tensor]:
        (folder / CONFIG_NAME).unlink(missing_ok=True)
        return _computed(file, tensors, recorded)

    with (
        temporarily_wrapped(config, "to_json_file", lambda *_, **__: None),
        private_apis.computing_saved_tensors(compute),
    ):
        model.save_pretrained(folder, state_dict=state_dict, max_shard_size=max_shard_size)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype_name(dtype)
    replace_file(folder / CONFIG_NAME, config.to_json_string())


def _write_adapters(
    model: Any,
    tensors: Mapping[str, PendingTensor],
    folder: Path,
    state_dict: dict[str, Tensor],
    recorded: RecordedOperations,
) -> None:
    """Write the adapters of a PEFT model; they are small, so they are computed together."""
    from peft import get_peft_model_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # save_pretrained warns again
        names = set[str]().union(
            *(
                _sources(get_peft_model_state_dict(model, state_dict=state_dict, adapter_name=adapter), recorded)
                for adapter in model.peft_config
            )
        )
    with _prompt_encoder_with(model, tensors):
        model.save_pretrained(folder, state_dict=state_dict | {name: tensors[name].value() for name in names})


def _sources(adapter: Mapping[str, Any], recorded: RecordedOperations) -> set[str]:
    """The names of the model's tensors from which an adapter's saved tensors are computed."""
    return {name for tensor in adapter.values() for name in recorded.sources_of(tensor)}


def _computed(
    file: dict[str, Tensor], tensors: Mapping[str, PendingTensor], recorded: RecordedOperations
) -> dict[str, Tensor]:
    """Compute the tensors of one file; those with the same sources one after the other, so that these are read once."""
    by_sources: dict[frozenset[str], list[str]] = {}
    for name, tensor in file.items():
        by_sources.setdefault(recorded.sources_of(tensor), []).append(name)
    computed: dict[str, Tensor] = {}
    for sources, names in by_sources.items():
        values = {source: tensors[source].value() for source in sources}
        for name in names:
            value = recorded.evaluate(file[name], values).contiguous()
            # A view would keep all of its source in memory.
            computed[name] = value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
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
def _prompt_encoder_with(model: nn.Module, tensors: Mapping[str, PendingTensor]) -> Iterator[None]:
    """Give the prompt encoders of a PEFT model the values of `tensors` inside; PEFT saves what they compute."""
    params = {name: param for name, param in model.named_parameters() if name.startswith("prompt_encoder.")}
    trained = {name: param.data for name, param in params.items()}
    try:
        for name, param in params.items():
            param.data = tensors[name].compute().to(param.device, tensors[name].dtype)
        yield
    finally:
        for name, param in params.items():
            param.data = trained[name]
