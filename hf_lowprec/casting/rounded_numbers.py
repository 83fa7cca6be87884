"""Warnings about numbers that a cast rounds: tables in buffers, and parameters of a single number."""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from hf_lowprec.casting.argument_roles import names_numbers, words_of
from hf_lowprec.rounding import dtype_name

_PARTS_OF_LAYERS = ("weight", "weights", "bias", "original0", "original1")  # the last two are torch's parametrizations

_EMBEDDINGS = {"emb", "embed", "embeds", "embedding", "embeddings", "enc", "encoding", "encodings"}  # of positions


def rounded_number_warnings(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[str]:
    """Yield one line about numbers that lose digits in a cast, if there are any.

    These are buffers of at most one dimension (class weights, frequencies) or with a name for numbers
    (`alphas_cumprod`), and parameters of one element (`logit_scale`).

    Args:
        tensors: what is to be cast, by qualified name, before the cast.
        dtype: the 16-bit dtype.
    """
    lost = [name for name, tensor in tensors.items() if _holds_numbers(name, tensor) and _loses_digits(tensor, dtype)]
    if lost:
        # One entry for the same tensor of all layers.
        entries = list(dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name) for name in lost))
        yield (
            f"{len(lost)} tensors of numbers lose digits in {dtype_name(dtype)}: {', '.join(entries)}. "
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
    if tensor.is_meta or not tensor.is_floating_point() or tensor.dtype.itemsize <= dtype.itemsize:
        return False
    values = tensor.detach()
    return not bool(torch.equal(values.to(dtype).to(values.dtype), values))
