"""A warning about tensors that were rounded to 16 bits when they were loaded, although their digits are of use.

These are tensors that the cast keeps in FP32, and trainable parameters whose checkpoint is FP32: with Kahan summation,
an optimizer uses the digits that the cast rounds off. `save_pretrained` writes each tensor in its own dtype, and
`from_pretrained` gives all of them the one dtype of the config, which is that of the first parameter: FP32 norms of a
saved BF16 model come back in BF16.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_lowprec.rounding import LOW_PRECISION_DTYPES, dtype_name

_STORED_16_BIT, _STORED_FP32 = ("BF16", "F16"), ("F32",)  # as safetensors spells them
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


@dataclass(frozen=True, eq=False)
class LoadedTensor:
    """A tensor as it was before a cast."""

    name: str
    tensor: Tensor
    loaded_dtype: torch.dtype  # before the cast


def rounded_weight_warnings(
    modules: Iterable[nn.Module], kept: Iterable[LoadedTensor], trained: Iterable[LoadedTensor]
) -> Iterator[str]:
    """Yield one line about tensors that lost digits when they were loaded, if there are any.

    Tensors that the model's checkpoint itself has in 16 bits lost nothing in loading. Where no checkpoint is at hand,
    tensors of zeros and ones are taken for initial values, which fit 16 bits, and nothing is said of `trained`.

    Args:
        modules: every module of the model; those of transformers say which checkpoint they were loaded from.
        kept: the tensors kept in FP32, rotary tables excluded.
        trained: the trainable parameters that no cast has had in FP32, of which one could have kept the low bits.
    """
    kept, trained = list(filter(_in_16_bits, kept)), list(filter(_in_16_bits, trained))
    stored = dict(_stored_dtypes(modules)) if kept or trained else {}
    stored = {name.partition(".")[2]: dtype for name, dtype in stored.items()} | stored  # loaded into a base model
    rounded = []
    for weight in kept:
        dtype = _stored_dtype_of(weight.name, stored)
        if dtype not in _STORED_16_BIT and (dtype is not None or not _is_initial(weight.tensor)):
            rounded.append(weight)
    with_low_bits = [weight for weight in trained if _stored_dtype_of(weight.name, stored) in _STORED_FP32]
    if rounded:
        text = (
            f"{len(rounded)} tensors that are kept in FP32 ({rounded[0].name}, …) were loaded in "
            f"{dtype_name(rounded[0].loaded_dtype)}. If their checkpoint has them in FP32, as those of hf_lowprec do, "
            "load it with from_pretrained(…, dtype=torch.float32); hf_lowprec casts the rest"
        )
        if with_low_bits:
            text += f", and {_gain(len(with_low_bits))}"
        yield text
    elif with_low_bits:
        yield (
            f"{len(with_low_bits)} trainable tensors ({with_low_bits[0].name}, …) were loaded in "
            f"{dtype_name(with_low_bits[0].loaded_dtype)}, but their checkpoint has them in FP32. With "
            f"from_pretrained(…, dtype=torch.float32), {_gain(len(with_low_bits))}"
        )


def _gain(count: int) -> str:
    """The gain of loading in FP32 for a number of trainable tensors, as a clause."""
    return (
        f"split weights and Kahan summation start from the FP32 values of {count} trainable tensors, which Trainer or "
        "cast_model(keep_low_bits=True) keeps"
    )


def _in_16_bits(weight: LoadedTensor) -> bool:
    return weight.loaded_dtype in LOW_PRECISION_DTYPES


def _is_initial(tensor: Tensor) -> bool:
    """Return whether a tensor has the values that norms begin with."""
    return tensor.is_meta or bool(((tensor == 0) | (tensor == 1)).all())


def _stored_dtype_of(name: str, stored: Mapping[str, str]) -> str | None:
    """The dtype stored under `name` or, because wrappers add prefixes, under its longest ending that is stored."""
    parts = name.split(".")
    endings = (".".join(parts[k:]) for k in range(max(len(parts) - 1, 1)))
    return next((stored[ending] for ending in endings if ending in stored), None)


def _stored_dtypes(modules: Iterable[nn.Module]) -> Iterator[tuple[str, str]]:
    """Yield name and dtype of each tensor in the model's safetensors checkpoint, if that is on this machine."""
    names = (vars(module).get("name_or_path") for module in modules)
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
    """The folder of a checkpoint; for a name on the hub, its folder in the cache. The network is not used."""
    try:
        if Path(name_or_path).is_dir():
            return Path(name_or_path)
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name_or_path, "config.json")
    except (ImportError, OSError, ValueError):  # ValueError: no name on the hub looks like this
        return None
    return Path(cached).parent if isinstance(cached, str) else None
