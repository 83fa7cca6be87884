"""Names for the parameters of a saved optimizer, whose state dict only numbers them.

A checkpoint gets a small file with the names, and the files that describe the model if it has none.
`export_checkpoint` reads them, so that it works without the training script.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn

from hf_lowprec.integrations.adapters import has_adapters, is_peft, saved_adapters
from hf_lowprec.integrations.checkpoint_files.input_files import path_inside, read_json
from hf_lowprec.integrations.export.recorded_operations import RecordedOperations
from hf_lowprec.optim.param_groups import unwrap_optimizer
from hf_lowprec.optim.sharding import is_sharded
from hf_lowprec.rounding import dtype_name

logger = logging.getLogger(__name__)

PARAMETERS_NAME = "hf_lowprec_parameters.json"
FORMAT = 1


class ParameterNames(NamedTuple):
    """The content of the file.

    Attributes:
        optimizers: for each optimizer and each of its param groups, the names of the parameters in order; None stands
            for a parameter of another model.
        adapters: for each adapter, the names of its tensors in an adapter file -> the names of the parameters. Empty
            for models without adapters.
    """

    optimizers: list[list[list[str | None]]]
    adapters: dict[str, dict[str, str]]


def write_parameter_names(folder: Path, model: nn.Module, optimizers: Iterable[Any]) -> None:
    """Write the names of the parameters of `optimizers`, as in `model`, to the checkpoint `folder`."""
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    names = {id(param): name for name, param in model.named_parameters()}
    groups = [
        [[names.get(id(param)) for param in group["params"]] for group in unwrap_optimizer(optimizer).param_groups]
        for optimizer in optimizers
    ]
    try:
        adapters = _adapters(model)
    except Exception as error:  # PEFT has many methods, and the checkpoint must be saved in any case
        logger.warning("the adapters' names cannot be saved, so %s cannot be exported: %s", folder, error)
        adapters = {}
    content = {"format": FORMAT, **ParameterNames(groups, adapters)._asdict()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PARAMETERS_NAME).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_model_description(folder: Path, model: Any, processing_class: Any = None) -> None:
    """Write the files of a model folder other than weights: configurations and the tokenizer or processor."""
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    if is_peft(model):
        base = type(model.get_base_model())
        base_class = {"base_model_class": base.__name__.removeprefix("FSDP"), "parent_library": base.__module__}
        for adapter, peft_config in model.peft_config.items():
            saved = copy.deepcopy(peft_config)
            saved.inference_mode = True  # as PEFT saves it, like the class
            saved.save_pretrained(
                folder if adapter == "default" else folder / adapter,
                auto_mapping_dict=base_class if saved.task_type is None else None,
            )
    elif _is_pretrained(model):
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.dtype = dtype_name(model.dtype)
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    if processing_class is not None:
        processing_class.save_pretrained(folder)


def _is_pretrained(model: nn.Module) -> bool:
    """Return whether `model` is a transformers model; transformers may not be imported, or not be installed."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def _adapters(model: Any) -> dict[str, dict[str, str]]:
    """Return `ParameterNames.adapters` for `model`."""
    if not has_adapters(model):
        return {}
    recorded = RecordedOperations(model.state_dict())
    prefix = "" if is_peft(model) else "base_model.model."
    sharded = any(map(is_sharded, model.parameters()))
    # PEFT would gather the prompts of a sharded model, on this rank alone.
    prompts = {adapter for adapter, config in model.peft_config.items() if config.is_prompt_learning and sharded}
    with recorded:
        adapters = saved_adapters(model, recorded.tensors, left_out=prompts)
    return {
        adapter: {
            prefix + name: source
            for name, tensor in saved.items()
            if (source := next(iter(recorded.sources_of(tensor)), None) or _parameter_with_values(model, tensor))
        }
        for adapter, saved in adapters.items()
    }


def _parameter_with_values(model: nn.Module, tensor: Tensor) -> str | None:
    """Return the name of the prompt encoder's parameter that PEFT saves as `tensor`; None if `tensor` is computed."""
    prompts = {name: param for name, param in model.named_parameters() if name.startswith("prompt_encoder.")}
    same_shape = (name for name, param in prompts.items() if param.shape == tensor.shape)
    equal = (name for name in same_shape if torch.equal(prompts[name].detach().to(tensor.device, tensor.dtype), tensor))
    return next(equal, None)


def read_parameter_names(folder: Path) -> ParameterNames:
    """Read the names in a checkpoint; there are none without the file.

    Raises:
        ValueError: the file is damaged, or has the format of a later version.
    """
    path = folder / PARAMETERS_NAME
    if not path.is_file():
        return ParameterNames([], {})
    content = read_json(path)
    try:
        if content["format"] != FORMAT:
            raise ValueError(
                f"{path} has format {content['format']}, but this version of hf_lowprec reads format {FORMAT}; upgrade "
                "hf_lowprec to read it"
            )
        for adapter in content["adapters"]:
            path_inside(folder, adapter, path.name)
        return ParameterNames(content["optimizers"], content["adapters"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a list of parameters: {error}") from error
