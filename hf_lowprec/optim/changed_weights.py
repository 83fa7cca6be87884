"""Which weights have changed: a bit for each, which the step sets where the stored weight gets other bits.

Trainers that feed an inference engine send weights after every few steps, and at small learning rates few of the BF16
weights change. Comparing with a copy would take 2 bytes per parameter and a pass over both; this takes a bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm_interface import Algorithm
from hf_lowprec.optim.sharding import global_places, local_shard, shard_length
from hf_lowprec.optim.state.state_tensors import has_whole_blocks
from hf_lowprec.optim.state.states_in_8_bits import scale_shape
from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.rounding.block_bits import elements_of_words
from hf_lowprec.rounding.block_floats import BLOCK

_CHUNK = 1 << 24
"""Elements that are looked at at once."""


class ChangedBits:
    """The bits of an optimizer's parameters."""

    def __init__(self) -> None:
        self._words: dict[Tensor, Tensor] = {}

    def of(self, param: Tensor, device: torch.device) -> Tensor | None:
        """The words of this rank's part of `param`, int32 with one for each 32 elements of a row, made if they are not.

        Returns:
            None if `param` has no bits: it is in FP32, or its rows are not multiples of 32 elements.
        """
        if param.dtype not in LOW_PRECISION_DTYPES or not has_whole_blocks(param) or shard_length(param, -1) % BLOCK:
            return None
        if param not in self._words:
            shape = scale_shape(local_shard(param).shape)
            self._words[param] = torch.zeros(shape, dtype=torch.int32, device=device)
        return self._words[param]

    @torch.no_grad()
    def take(self, param: Tensor) -> Tensor | None:
        """The places of the changed weights in this rank's flattened part of `param`, ascending; clears their bits."""
        words = self._words.get(param)
        if words is None:
            return None
        found = list(map(elements_of_words, words.view(-1).split(_CHUNK // BLOCK)))
        words.zero_()
        return found[0] if len(found) == 1 else torch.cat([part.add_(k * _CHUNK) for k, part in enumerate(found)])


def changed_weights(optimizer: Algorithm) -> dict[Tensor, Tensor | None]:
    """The weights that the steps since the last call have changed.

    Args:
        optimizer: built with `track_changes=True`.

    Returns:
        For each parameter that requires a gradient, the indices of its changed weights in the flattened full tensor,
        int64 and ascending, on the device of the bits; under FSDP2, of this rank's shard. None if they are not known:
        the parameter is in FP32, its rows are not multiples of 32 elements, or it has not been stepped.

    Raises:
        ValueError: the optimizer does not track changes.
    """
    taken = take_changes(optimizer)
    return {p: None if places is None else global_places(p, places) for p, places in taken.items()}


def take_changes(optimizer: Algorithm) -> dict[Tensor, Tensor | None]:
    """As `changed_weights`, but places in this rank's part of each parameter."""
    bits: ChangedBits | None = optimizer.changed
    if bits is None:
        raise ValueError("changed weights are not known: build the optimizer with track_changes=True")
    params = (param for group in optimizer.param_groups for param in group["params"])
    return {param: bits.take(param) for param in params if param.requires_grad}
