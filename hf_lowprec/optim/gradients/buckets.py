"""Buckets of gradients: parameters that gradient release steps together, and gradients that exist at the same time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hf_lowprec.optim.sharding import is_sharded, local_shard

BUCKET_ELEMENTS = 1 << 26
"""The number of elements at which a bucket is stepped: 128 MiB of BF16 gradients, counting all shards of a parameter.

Smaller buckets do not save much more memory, since the largest gradient (an embedding's) is usually larger, and each
bucket costs time on the host.
"""


class GradientBucket:
    """Parameters whose gradients are final and wait to be stepped together, the newest last."""

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self._elements = 0

    def add(self, param: Tensor) -> int:
        """Add a parameter; return how many of the oldest must be stepped now."""
        self.params.append(param)
        self._elements += param.numel()
        return len(self.params) - 1 if self._elements >= BUCKET_ELEMENTS else 0

    def take(self, count: int) -> list[Tensor]:
        """Remove the `count` oldest parameters, and return them."""
        taken, self.params = self.params[:count], self.params[count:]
        self._elements = sum(map(Tensor.numel, self.params))
        return taken


def bucket_key(param: Tensor) -> Any:
    """Return the key of the bucket of `param`. FSDP2 reduces gradients on its own stream, so shards have their own."""
    return param.device, is_sharded(param)


def gradients_alive(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters whose gradients exist at the same time, when they take most memory on this rank.

    Args:
        params: trainable parameters, in the order in which their gradients become final.
    """
    buckets: dict[Any, GradientBucket] = defaultdict(GradientBucket)
    most: list[Tensor] = []
    largest = 0
    for param in params:
        bucket = buckets[bucket_key(param)]
        count = bucket.add(param)
        alive = [each for other in buckets.values() for each in other.params]
        size = sum(local_shard(each).nbytes for each in alive)
        if size > largest:
            most, largest = alive, size
        bucket.take(count)
    return most
