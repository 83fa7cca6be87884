"""Loads models that a user names on the command line: their files, or a model without weights from its config.json.

That file is not trusted: no code or weights that it names are loaded, and the number of modules is limited.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_lowprec.integrations.checkpoint_files.input_files import InputError, explain_input_errors

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

MAX_MODULES = 200_000
"""The largest number of modules, which take 20 seconds to build; 2048 experts in 15 layers need half of it."""

_FILES_ON_THE_HUB = ["model*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "*config.json"]
_TIMM_SOURCE = re.compile(r"(hf[-_]hub|local-dir):", re.IGNORECASE)
"""Prefixes of model names that make timm load the model's definition from elsewhere."""
_IMPLEMENTATION = re.compile(r"(attn|experts)_implementation")


def find_model_folder(name: str, argument: str = "MODEL") -> Path:
    """Return the folder of a model.

    Args:
        name: a folder, or a model on the Hub. Its safetensors files and configurations are downloaded, unless they have
            been before.
        argument: the argument that it was passed as, for messages.

    Raises:
        InputError: there is no such folder or model.
    """
    from huggingface_hub import snapshot_download

    _check_path_exists(name, argument)
    local = Path(os.path.expanduser(name))
    if local.is_dir():
        return local
    if local.exists():
        raise InputError(f"{argument}: {name!r} is a file; pass the folder that it is in")
    with explain_input_errors(f"{argument}: there is no folder {name!r}, and it cannot be fetched from the Hub"):
        return Path(snapshot_download(name, allow_patterns=_FILES_ON_THE_HUB))


def load_config(name: str) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Load a model's configuration and find the model's class.

    Args:
        name: a model on the Hub, or a folder.

    Returns:
        The configuration, and the transformers class of the model.

    Raises:
        InputError: there is no configuration; or it is not a transformers model's, is quantized, or names files.
    """
    import transformers

    _check_path_exists(name, "MODEL")
    if Path(name).is_dir() and not Path(name, "config.json").exists():
        raise InputError(f"there is no config.json in {name!r}; pass the folder of a saved model")
    failed = f"the configuration of {name!r} cannot be loaded"
    with explain_input_errors(failed):
        content, _ = transformers.PreTrainedConfig.get_config_dict(name)
        _check_config(content, name)
    if not isinstance(content, dict):
        raise InputError(f"{failed}: config.json does not contain a JSON object")
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        code = "; the code that its auto_map names is not run" if "auto_map" in content else ""
        raise InputError(f"{failed}: model_type={model_type!r} is not a model type of transformers{code}")
    with explain_input_errors(failed):
        config = transformers.CONFIG_MAPPING[model_type].from_dict(_drop_implementations(content))
    names = config.architectures
    if not isinstance(names, list) or not names:
        raise InputError(
            f"the configuration of {name!r} has no list of architectures; add the name of the model's class"
        )
    cls = getattr(transformers, str(names[0]), None)
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        raise InputError(f"{name!r} is a model of the class {names[0]}, which transformers does not have")
    return config, cls


def build_empty_model(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> nn.Module:
    """Build a model in FP32 on the meta device, where weights take no memory.

    Args:
        config: a configuration of transformers.
        cls: the model's class.

    Raises:
        InputError: the model's class cannot be built with this configuration, or gets an empty weight.
    """
    import torch

    with (
        explain_input_errors(f"{cls.__name__} cannot be built from its configuration"),
        torch.device("meta"),
        _limit_modules(),
    ):
        model: nn.Module = cls(config)
    for name, param in model.named_parameters():
        if not param.numel():
            raise InputError(
                f"the configuration gives {cls.__name__} a weight without elements: {name} of shape "
                f"{tuple(param.shape)}"
            )
    return model


def _check_path_exists(name: str, option: str) -> None:
    """Raise InputError if `name` looks like a path that does not exist, so that it is not searched for on the Hub.

    Args:
        name: the name as entered by the user.
        option: its option or argument, for the message.
    """
    if name.startswith((".", "/", "~", "\\")) and not Path(os.path.expanduser(name)).exists():
        raise InputError(f"{option}: there is no file or folder {name!r}")


def _check_config(content: dict[str, Any], name: str) -> None:
    """Raise InputError if a configuration is a quantized model's, or makes libraries load files.

    Args:
        content: the parsed config.json.
        name: the model's name, for the message.
    """
    for key, value in _items(content):
        if key == "quantization_config" and value is not None:
            raise InputError(
                f"{name!r} is quantized, and quantized weights cannot be trained; pass the unquantized model"
            )
        # timm reads the name with urlsplit, which drops tabs and line breaks.
        if isinstance(value, str) and (key == "checkpoint_path" or _TIMM_SOURCE.search("".join(value.split()))):
            raise InputError(
                f"{key}={value!r} in the configuration of {name!r} would make timm load files; use the "
                "name of a timm architecture"
            )
        if key == "backbone" and isinstance(value, str) and "/" in value:
            raise InputError(
                f"backbone={value!r} in the configuration of {name!r} names another repository, which is not "
                "read; set its configuration as backbone_config"
            )


def _items(content: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key with its value, at any depth. The elements of a list have the list's key."""
    yield key, content
    if isinstance(content, dict):
        for name, value in content.items():
            yield from _items(value, name)
    elif isinstance(content, list):
        for element in content:
            yield from _items(element, key)


def _drop_implementations(content: Any) -> Any:
    """Copy `content` without its choices of code for attention and experts, which may name a repository on the Hub.

    An argument of `from_pretrained` does not override them: transformers applies the file's choice last.
    """
    if isinstance(content, dict):
        return {key: _drop_implementations(value) for key, value in content.items() if not _IMPLEMENTATION.search(key)}
    return [_drop_implementations(value) for value in content] if isinstance(content, list) else content


@contextmanager
def _limit_modules() -> Iterator[None]:
    """Raise InputError if a model built inside gets more than MAX_MODULES, whatever in its config causes it."""
    from torch.nn.modules.module import register_module_module_registration_hook

    count = 0

    def count_module(module: nn.Module, name: str, child: nn.Module) -> None:
        nonlocal count
        count += 1
        if count > MAX_MODULES:
            raise InputError(f"the model has more than {MAX_MODULES:,} modules, the most that estimate supports")

    hook = register_module_module_registration_hook(count_module)
    try:
        yield
    finally:
        hook.remove()
