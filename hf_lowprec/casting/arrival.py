"""Warns of tensors kept in FP32 that were already rounded to 16 bits when they were loaded.

`save_pretrained` writes each tensor in its own dtype, and `from_pretrained` gives all of them the one dtype of the
config, which is that of the first parameter: FP32 norms of a saved BF16 model come back in BF16.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hf_lowprec.casting.policy import Modules
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, dtype_name

_STORED_16_BIT = ("BF16", "F16")  # as safetensors spells them
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


def arrival_warnings(modules: Modules, upcast: Mapping[str, tuple[Tensor, torch.dtype]]) -> Iterator[str]:
    """One line about tensors that may have lost digits on their way into the model, if there are any.

    Not those that the model's checkpoint itself has in 16 bits. Where no checkpoint is at hand, not those of zeros and
    ones, with which norms begin.

    Args:
        modules: of the model, by name.
        upcast: name -> tensor, FP32 again, and the dtype that it came in.
    """
    arrived = {name: (tensor, old) for name, (tensor, old) in upcast.items() if old in LOW_PRECISION_DTYPES}
    stored = dict(_stored_dtypes(modules)) if arrived else {}
    stored = {name.partition(".")[2]: dtype for name, dtype in stored.items()} | stored  # loaded into a base model
    rounded = {}
    for name, (tensor, old) in arrived.items():
        dtype = _dtype_of(name, stored)
        if dtype not in _STORED_16_BIT and (dtype is not None or not _is_initial(tensor)):
            rounded[name] = old
    if rounded:
        first, old = next(iter(rounded.items()))
        yield (
            f"{len(rounded)} tensors that are kept in FP32 ({first}, …) arrived in {dtype_name(old)}. "
            "If their checkpoint has them in FP32, as one that is saved after training here does, "
            "from_pretrained(…, dtype=torch.float32) loads them without rounding; hf_lowprec casts the rest"
        )


def _is_initial(tensor: Tensor) -> bool:
    return tensor.is_meta or bool(((tensor == 0) | (tensor == 1)).all())


def _dtype_of(name: str, stored: Mapping[str, str]) -> str | None:
    """The dtype stored under `name`, or under its longest ending of a module and its tensor: wrappers add prefixes."""
    parts = name.split(".")
    endings = (".".join(parts[k:]) for k in range(max(len(parts) - 1, 1)))
    return next((stored[ending] for ending in endings if ending in stored), None)


def _stored_dtypes(modules: Modules) -> Iterator[tuple[str, str]]:
    """Names and dtypes of what the safetensors checkpoint of a transformers model holds, if it is on this machine."""
    names = (vars(module).get("name_or_path") for module in modules.values())
    name = next((name for name in names if isinstance(name, str) and name), None)
    folder = None if name is None else _folder(name)
    for file in sorted(folder.glob("model*.safetensors")) if folder is not None else ():
        try:
            with file.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(size)) if size <= _LONGEST_HEADER else {}
            yield from ((key, value["dtype"]) for key, value in header.items() if key != "__metadata__")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not a readable checkpoint: skip it
            continue


def _folder(name_or_path: str) -> Path | None:
    """The folder of a checkpoint; a name of the hub has one in its cache. The network is not asked."""
    try:
        if Path(name_or_path).is_dir():
            return Path(name_or_path)
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name_or_path, "config.json")
    except (ImportError, OSError, ValueError):  # ValueError: not a name that the hub could have
        return None
    return Path(cached).parent if isinstance(cached, str) else None
