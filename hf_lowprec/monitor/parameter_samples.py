"""Evenly spaced samples of many tensors, as the rows of one matrix.

A model has hundreds of tensors, and a few operations on each cost more than all arithmetic on the samples. So strided
views of the tensors are made once and gathered by one `torch.cat`. Only gradients, which are new tensors in each step,
need new views.

The spacing between the elements of a tensor has no factor in common with its number of columns, so that a sample walks
through all columns. Tensors with fewer elements than a row are taken whole, and the row is filled up with zeros, which
add nothing to sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_lowprec.optim.cached_property import cached_property

SAMPLED_SHARE = 1 / 256
"""The share of all elements that is sampled, so that a measurement is a small part of a step of any model.

Each sampled element is read from a cache line of its own, which makes it as expensive as a dozen elements of a step.
"""
FEWEST, MOST = 1 << 13, 1 << 16
"""Bounds of the number of elements in all samples together."""
SMALLEST, LARGEST = 64, 4096
"""Bounds of the elements of a row, which have priority."""


def row_size(tensors: int, elements: int) -> int:
    """The number of elements of each row, for so many tensors with so many elements in total."""
    budget = min(max(int(elements * SAMPLED_SHARE), FEWEST), MOST)
    return min(max(budget // max(tensors, 1), SMALLEST), LARGEST)


class ParameterSamples:
    """Samples of parameters, and of their gradients and states, on one device.

    Attributes:
        strides: the spacing between the sampled elements of each parameter.
        counts: how many are sampled; at most `size`.
        sizes: how many elements each parameter has.

    Args:
        params: the parameters, or this rank's shards of them.
        size: elements per row.
    """

    def __init__(self, params: Sequence[Tensor], size: int) -> None:
        self._size = size
        self._device = params[0].device
        self.sizes = [param.numel() for param in params]
        self.strides = [_stride(param, size) for param in params]
        self.counts = [-(-numel // stride) for numel, stride in zip(self.sizes, self.strides, strict=True)]
        self._pads: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._views: dict[str, tuple[list[int], list[Tensor]]] = {}

    def gather(self, tensors: Sequence[Tensor], name: str | None = None) -> Tensor:
        """The sampled elements.

        Args:
            tensors: one tensor for each parameter, of its shape; all of one dtype and device.
            name: a name under which views of the tensors are kept for the next call; None for tensors that will have
                been replaced by then.

        Returns:
            Matrix of shape (parameters, size) in the tensors' dtype, on the parameters' device.
        """
        if name is None:
            return torch.cat(self._new_views(tensors)).view(-1, self._size).to(self._device)
        addresses = list(map(Tensor.data_ptr, tensors))
        kept = self._views.get(name)
        if kept is None or kept[0] != addresses:
            if not all(map(Tensor.is_contiguous, tensors)):  # their "views" are copies
                return self.gather(tensors)
            kept = self._views[name] = addresses, self._new_views(tensors)
        return torch.cat(kept[1]).view(-1, self._size).to(self._device)

    def gather_of_blocks(self, tensors: Sequence[Tensor], block: int) -> Tensor:
        """Gather the elements of tensors that belong to the blocks of the sampled elements.

        Args:
            tensors: one tensor for each parameter, with an element for each `block` elements of it; all of one dtype.
            block: the size of a block.

        Returns:
            Matrix of shape (parameters, size) in the tensors' dtype.
        """
        matrix = torch.zeros(len(tensors), self._size, dtype=tensors[0].dtype, device=self._device)
        for row, (tensor, count) in enumerate(zip(tensors, self.counts, strict=True)):
            matrix[row, :count] = tensor.view(-1)[self.positions[row, :count].to(tensor.device) // block]
        return matrix

    def gather_row(self, row: int, tensor: Tensor) -> Tensor:
        """The sampled elements of one tensor, which has the shape of parameter number `row`; of shape (size)."""
        sample = tensor.reshape(-1)[:: self.strides[row]]
        return torch.nn.functional.pad(sample, (0, self._size - len(sample)))

    def _new_views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        dtype = tensors[0].dtype
        if not all(map(Tensor.is_contiguous, tensors)):
            tensors = list(map(Tensor.contiguous, tensors))
        shapes = zip(tensors, self.counts, self.strides, strict=True)
        views = [tensor.as_strided((count,), (stride,)) for tensor, count, stride in shapes]
        if self._is_padded:
            key = dtype, tensors[0].device
            if key not in self._pads:
                zeros = torch.zeros(self._size, dtype=dtype, device=key[1])
                self._pads[key] = [zeros[count:] for count in self.counts]
            views = [part for pair in zip(views, self._pads[key], strict=True) for part in pair]
        return views

    @cached_property
    def _is_padded(self) -> bool:
        """Whether some rows are filled up with zeros."""
        return min(self.counts) < self._size

    def clear_padding(self, matrix: Tensor) -> Tensor:
        """A matrix of samples with zeros (False) for padding."""
        return matrix.masked_fill(self._padding, 0) if self._is_padded else matrix

    @cached_property
    def _padding(self) -> Tensor:
        """Which elements of the matrix are padding; bool of its shape."""
        counts = torch.tensor(self.counts, device=self._device)
        return torch.arange(self._size, device=self._device) >= counts[:, None]

    @cached_property
    def element_weights(self) -> Tensor:
        """How many elements of its parameter each sampled one stands for; FP64 of shape (parameters)."""
        pairs = zip(self.sizes, self.counts, strict=True)
        return torch.tensor([n / max(k, 1) for n, k in pairs], dtype=torch.float64, device=self._device)

    @cached_property
    def positions(self) -> Tensor:
        """The positions of the sampled elements in the flattened parameters; int64 of the matrix's shape.

        Those of the padding are beyond the end.
        """
        strides = torch.tensor(self.strides, device=self._device)
        return torch.arange(self._size, device=self._device) * strides[:, None]


def _stride(param: Tensor, size: int) -> int:
    """The smallest spacing at which a row has room, without a factor in common with the number of columns."""
    stride = max(-(-param.numel() // size), 1)
    if stride > 1 and param.dim() > 0:
        columns = param.shape[-1]
        while math.gcd(stride, columns) > 1:
            stride += 1
    return stride
