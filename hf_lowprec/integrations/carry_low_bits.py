"""Carries the low bits of weights (see `rounding/low_bits.py`) through `Accelerator.prepare`.

FSDP2 replaces parameters with shards, and with `cpu_ram_efficient_loading` only rank 0 has weights before. DDP replaces
the other ranks' weights with rank 0's. So every rank gets rank 0's low bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn

from hf_lowprec.optim.sharding import local_shard, shard_like
from hf_lowprec.reduction.collectives import gather_objects
from hf_lowprec.rounding.attached_low_bits import (
    attach_low_bits,
    attached_low_bits,
    low_bits_to_save,
    remove_low_bits,
    restore_saved_low_bits,
)

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""Parts that preparing a model adds to the names of its parameters."""


TakenLowBits = dict[str, dict[str, Any]]
"""The results of `low_bits_to_save`, by parameter name."""


@contextlib.contextmanager
def taken_low_bits(model: nn.Module) -> Iterator[TakenLowBits]:
    """Take the low bits from the parameters of `model`, for `give_low_bits` after the model was prepared inside.

    If there is an error inside, the parameters get them back, so that the model can be prepared again.
    """
    taken = {}
    for name, param in _named(model):
        if attached_low_bits(param) is not None and (saved := low_bits_to_save(param)) is not None:
            taken[name] = saved
        remove_low_bits(param)
    try:
        yield taken
    except BaseException:
        for name, param in _named(model):
            if name in taken:
                restore_saved_low_bits(param, taken[name])
        raise


def give_low_bits(model: nn.Module, kept: TakenLowBits, device: torch.device) -> None:
    """Give the parameters of a prepared model the low bits that rank 0 has taken. Every rank must call it.

    Args:
        model: the model after `Accelerator.prepare`.
        kept: the low bits that `taken_low_bits` has taken on this rank.
        device: where tensors are sent between ranks.
    """
    params = dict(_named(extract_model_from_parallel(model, keep_torch_compile=False)))
    shapes = {name: param.shape for name, param in params.items()}
    for name, full in low_bits_of_rank_0(kept, shapes, device):
        param = params[name]
        attach_low_bits(param, shard_like(full, param).to(local_shard(param).device))


def low_bits_of_rank_0(
    kept: TakenLowBits, shapes: Mapping[str, torch.Size], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the low bits that rank 0 has taken: name and whole tensor. Every rank must iterate.

    Args:
        kept: the low bits that `taken_low_bits` has taken on this rank.
        shapes: the parameters' shapes, by name.
        device: where tensors are sent between ranks.
    """
    dtypes = {name: saved["low_bits"].dtype for name, saved in kept.items()}
    for name, dtype in gather_objects(dtypes, "preparing a model")[0].items():
        ours = kept.pop(name)["low_bits"] if dist.get_rank() == 0 else torch.empty(shapes[name], dtype=dtype)
        full = ours.to(device)
        dist.broadcast(full.view(torch.uint8), src=0)
        yield name, full


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of `model` by their names without wrappers."""
    for name, param in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        yield name, param
