"""Warnings about numbers that a cast rounds: tables in buffers, and parameters of a single number."""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from hf_lowprec.casting.hooks.argument_roles import names_numbers, words_of
from hf_lowprec.rounding import dtype_name

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
        return tensor.numel() == 1 and last not in _PARTS_OF_LAYERS  # such as the bias of a regression
    if not _EMBEDDINGS.isdisjoint(words_of(last)):
        return False  # sines of positions, and Gemma's `embed_scale`, which its code rounds itself
    return tensor.dim() < 2 or (names_numbers(last) and last not in _PARTS_OF_LAYERS)


def _loses_digits(tensor: Tensor, dtype: torch.dtype) -> bool:
    if tensor.is_meta or not _becomes_narrower(tensor, dtype):
        return False
    values = tensor.detach()
    return not bool(torch.equal(values.to(dtype).to(values.dtype), values))


def _becomes_narrower(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > dtype.itemsize
