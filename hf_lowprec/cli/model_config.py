"""A model built without weights from its config.json alone, which may be anybody's.

No code and no weights that it names are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_lowprec.cli.inputs import InputError, check_path, input_errors

if TYPE_CHECKING:
    from torch import nn

MAX_REPEATS = 10_000
"""Layers, or what else a model repeats; the deepest published ones have about a thousand."""
MAX_LABELS = 1_000_000
MAX_MODULES = 200_000
"""A mixture of 2048 experts in every second of 30 layers has half as many. They take 20 seconds to build."""

_REPEATS = re.compile(r"(layers?|blocks?|depths?|stages)$")
_COUNT = re.compile(r"^num_labels$|(^|_)(n|num)_|s$")
"""Counts are never negative. A layer's index may be: `vision_feature_layer=-2`."""
_SIZE = re.compile(r"(size|dim|head|channel|width)s?$|^[dn]_")
"""Sizes and numbers of parts. Zero is right for some, as `type_vocab_size`, so they are named only where one fails."""
_TIMM_SOURCE = re.compile(r"(hf[-_]hub|local-dir):", re.IGNORECASE)
"""What timm loads a model's definition from, given as the model's name."""
_IMPLEMENTATION = re.compile(r"(attn|experts)_implementation")


def load_config(name: str) -> tuple[Any, Any]:
    """The configuration of a model, by its name on the hub or its folder, and the model's class.

    Raises:
        InputError: there is none, it is not that of one of transformers' models, or its numbers cannot be right.
    """
    import transformers

    check_path(name, "MODEL")
    if Path(name).is_dir() and not Path(name, "config.json").exists():
        raise InputError(f"there is no config.json in {name!r}; name the folder of a saved model")
    failed = f"the configuration of {name!r} cannot be loaded"
    with input_errors(failed):
        content, _ = transformers.PreTrainedConfig.get_config_dict(name)
        _check(content, name)
    if not isinstance(content, dict):
        raise InputError(f"{failed}: config.json holds no JSON object")
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        code = "; estimate does not run the code that its auto_map names" if "auto_map" in content else ""
        raise InputError(f"{failed}: model_type={model_type!r} is none of transformers'{code}")
    with input_errors(failed, _too_small(content)):
        config = transformers.CONFIG_MAPPING[model_type].from_dict(
            _without_implementations(content), attn_implementation="eager"
        )
    names = config.architectures
    if not isinstance(names, list) or not names:
        raise InputError(
            f"the configuration of {name!r} has no list of architectures; add the name of the model's class"
        )
    kind = getattr(transformers, str(names[0]), None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise InputError(f"{name!r} is a model of the class {names[0]}, which is none of transformers' models")
    return config, kind


def empty_model(config: Any, kind: Any) -> nn.Module:
    """The model in FP32, without memory for its weights.

    Raises:
        InputError: the model's class cannot be built with this configuration, or is left with an empty weight.
    """
    import torch

    too_small = _too_small(config.to_dict())
    with (
        input_errors(f"{kind.__name__} cannot be built from its configuration", too_small),
        torch.device("meta"),
        _limited_modules(),
    ):
        model: nn.Module = kind(config)
    for name, param in model.named_parameters():
        if not param.numel():
            raise InputError(
                f"with the numbers in its configuration {kind.__name__} has a weight without elements: {name} of shape "
                f"{tuple(param.shape)}{too_small}"
            )
    return model


def _too_small(content: dict[str, Any]) -> str:
    """The end of a message that names the sizes of a configuration which are not positive; empty if all are."""
    sizes = ((key, value) for key, value in _items(content) if _SIZE.search(str(key)) and type(value) is int)
    found = dict.fromkeys(f"{key}={value}" for key, value in sizes if value <= 0)
    return f"; it has {', '.join(found)}" if found else ""


def _check(content: dict[str, Any], name: str) -> None:
    """Raise InputError for a configuration too large to build, with negative counts, or that has files loaded."""
    for key, value in _items(content):
        if key == "quantization_config" and value is not None:
            raise InputError(
                f"{name!r} is quantized, and quantized weights are not trained; name the model it was made of"
            )
        # urlsplit, with which timm reads the name, leaves tabs and line breaks out.
        if isinstance(value, str) and (key == "checkpoint_path" or _TIMM_SOURCE.search("".join(value.split()))):
            raise InputError(
                f"{key}={value!r} in the configuration of {name!r} has timm load files, which estimate does not; give "
                "the name of an architecture of timm"
            )
        if key == "backbone" and isinstance(value, str) and "/" in value:
            raise InputError(
                f"backbone={value!r} in the configuration of {name!r} is another repository, which estimate does not "
                "read; give its configuration as backbone_config"
            )
        highest = MAX_LABELS if key == "num_labels" else MAX_REPEATS if _REPEATS.search(key) else None
        if highest is None or not isinstance(value, int | float):
            continue
        lowest = 0 if _COUNT.search(key) else -highest
        if not lowest <= value <= highest:
            raise InputError(
                f"{key}={value} in the configuration of {name!r} is not between {lowest:,} and {highest:,}"
            )


def _items(content: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every key with its value, at any depth. The elements of a list have the list's key."""
    yield key, content
    if isinstance(content, dict):
        for name, value in content.items():
            yield from _items(value, name)
    elif isinstance(content, list):
        for value in content:
            yield from _items(value, key)


def _without_implementations(content: Any) -> Any:
    """`content` without the code that it chooses for attention and experts, which may be a repository's on the hub.

    An argument of `from_pretrained` does not help: transformers sets what the file says after it.
    """
    if isinstance(content, dict):
        kept = {key: value for key, value in content.items() if not _IMPLEMENTATION.search(key)}
        return {key: _without_implementations(value) for key, value in kept.items()}
    return [_without_implementations(value) for value in content] if isinstance(content, list) else content


@contextmanager
def _limited_modules() -> Iterator[None]:
    """Raise InputError when more than MAX_MODULES are made inside, whatever the number that asks for them is called."""
    from torch.nn.modules.module import register_module_module_registration_hook

    count = 0

    def counted(module: nn.Module, name: str, child: nn.Module) -> None:
        nonlocal count
        count += 1
        if count > MAX_MODULES:
            raise InputError(f"the model has more than {MAX_MODULES:,} modules, the most that estimate supports")

    hook = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()
