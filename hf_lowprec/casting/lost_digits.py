"""Warnings about digits that are lost: of numbers, in the cast itself, and of weights, when they were loaded.

Weights are tensors that the cast keeps in FP32, and trainable parameters whose checkpoint is FP32: with Kahan
summation, an optimizer uses the digits that the cast rounds off. `save_pretrained` writes each tensor in its own dtype,
and `from_pretrained` gives all of them the one dtype of the config, which is that of the first parameter: FP32 norms of
a saved BF16 model come back in BF16.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_lowprec.casting.hooks.argument_roles import names_numbers, words_of
from hf_lowprec.casting.module_tree import shape_of
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, dtype_name

_PARTS_OF_LAYERS = ("weight", "weights", "bias", "original0", "original1")  # the last two are torch's parametrizations

_EMBEDDINGS = {"emb", "embed", "embeds", "embedding", "embeddings", "enc", "encoding", "encodings"}  # of positions


def rounded_number_warnings(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[str]:
    """Yield one line about numbers that lose digits in a cast, and one about those that may, if there are any.

    These are buffers of at most one dimension (class weights, frequencies) or with a name for numbers
    (`alphas_cumprod`), and parameters of one element (`logit_scale`). On the meta device they have no values yet: they
    are rounded when the model is initialized, after the cast.

    Args:
        tensors: what is to be cast, by qualified name, before the cast.
        dtype: the 16-bit dtype.
    """
    numbers = {name: tensor for name, tensor in tensors.items() if _holds_numbers(name, tensor)}
    lost = [name for name, tensor in numbers.items() if _loses_digits(tensor, dtype)]
    if lost:
        yield f"{len(lost)} tensors of numbers lose digits in {dtype_name(dtype)}: {_names_and_remedy(lost)}"
    unknown = [name for name, tensor in numbers.items() if tensor.is_meta and _becomes_narrower(tensor, dtype)]
    if unknown:
        yield (
            f"{len(unknown)} tensors of numbers on the meta device will be rounded to {dtype_name(dtype)} when they "
            f"are initialized: {_names_and_remedy(unknown)}"
        )


def _names_and_remedy(names: list[str]) -> str:
    """The names, with one entry for the same tensor of all layers, and the `keep_fp32` that keeps these tensors."""
    entries = list(dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name) for name in names))
    return (
        f"{', '.join(entries)}. "
        f'`cast_model(model, keep_fp32={entries})`, or `optim_args="keep_fp32={"|".join(entries)}"`, keeps them'
    )


def _holds_numbers(name: str, tensor: Tensor) -> bool:
    last = name.rpartition(".")[2]
    if isinstance(tensor, nn.Parameter):
        return shape_of(tensor).numel() == 1 and last not in _PARTS_OF_LAYERS  # such as the bias of a regression
    if not _EMBEDDINGS.isdisjoint(words_of(last)):
        return False  # sines of positions, and Gemma's `embed_scale`, which its code rounds itself
    return tensor.dim() < 2 or (names_numbers(last) and last not in _PARTS_OF_LAYERS)


def _loses_digits(tensor: Tensor, dtype: torch.dtype) -> bool:
    if tensor.is_meta or not _becomes_narrower(tensor, dtype):
        return False
    values = getattr(tensor, "ds_tensor", tensor).detach()
    return not bool(torch.equal(values.to(dtype).to(values.dtype), values))


def _becomes_narrower(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > dtype.itemsize


_STORED_16_BIT, _STORED_FP32 = ("BF16", "F16"), ("F32",)  # as safetensors spells them
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


@dataclass(frozen=True, eq=False)
class LoadedTensor:
    """A tensor after a cast, and the dtype that it was loaded in."""

    name: str
    tensor: Tensor
    loaded_dtype: torch.dtype


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
    gain = f"split weights and Kahan summation start from the FP32 values of {len(with_low_bits)} trainable tensors"
    if rounded:
        text = (
            f"{len(rounded)} tensors that are kept in FP32 ({rounded[0].name}, …) were loaded in "
            f"{dtype_name(rounded[0].loaded_dtype)}. If their checkpoint has them in FP32, as those of hf_lowprec do, "
            "load it with from_pretrained(…, dtype=torch.float32); hf_lowprec casts the rest"
        )
        if with_low_bits:
            text += f", and {gain}"
        yield text
    elif with_low_bits:
        yield (
            f"{len(with_low_bits)} trainable tensors ({with_low_bits[0].name}, …) were loaded in "
            f"{dtype_name(with_low_bits[0].loaded_dtype)}, but their checkpoint has them in FP32. With "
            f"from_pretrained(…, dtype=torch.float32), {gain}"
        )


def _in_16_bits(weight: LoadedTensor) -> bool:
    return weight.loaded_dtype in LOW_PRECISION_DTYPES


def _is_initial(tensor: Tensor) -> bool:
    """Return whether a tensor, or this rank's shard of it, has the values that norms begin with."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.is_meta or bool(((local == 0) | (local == 1)).all())


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
