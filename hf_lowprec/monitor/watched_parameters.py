"""The parameters that a monitor watches: names, kinds, values when training began, and samples of their elements."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.monitor.gradient_record import GradientRecord
from hf_lowprec.once import cached_property
from hf_lowprec.optim.sharding import flat_part, full_shape, local_shard, sharding_of
from hf_lowprec.optim.state.fp32_weights import low_bits_state
from hf_lowprec.tensor_names import parameter_kinds

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
SAMPLED_SHARE = 1 / 256
"""The share of all elements that is sampled, so that a measurement is a small part of a step of any model.

Each sampled element is read from a cache line of its own, which makes it as expensive as a dozen elements of a step.
"""
FEWEST, MOST = 1 << 13, 1 << 16
"""Bounds on the number of elements in all samples together."""
SMALLEST, LARGEST = 64, 4096
"""Bounds on the elements of a row, which have priority."""


def row_size(tensors: int, elements: int) -> int:
    """Return the number of elements per row, given the numbers of tensors and of all their elements."""
    budget = min(max(int(elements * SAMPLED_SHARE), FEWEST), MOST)
    return min(max(budget // max(tensors, 1), SMALLEST), LARGEST)


class ParameterSamples:
    """Evenly spaced samples of parameters, and of their gradients and states, on one device, as the rows of a matrix.

    A model has hundreds of tensors, and a few operations on each cost more than all arithmetic on the samples. So
    strided views of the tensors are made once and gathered by one `torch.cat`. Only gradients, which are new tensors in
    each step, need new views.

    The spacing between the elements of a tensor has no factor in common with its number of columns, so that a sample
    covers all columns. Tensors with fewer elements than a row are sampled in full, and the row is padded with zeros,
    which add nothing to sums.

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
        """Gather the sampled elements.

        Args:
            tensors: one tensor for each parameter, of its shape; all of one dtype and device.
            name: a name under which views of the tensors are kept for the next call; None for tensors that will be
                replaced before it.

        Returns:
            Matrix of shape (parameters, size) in the tensors' dtype, on the parameters' device.
        """
        if name is None or not all(map(Tensor.is_contiguous, tensors)):  # then the "views" are copies
            views = self._new_views(tensors)
        else:
            addresses = list(map(Tensor.data_ptr, tensors))
            if name not in self._views or self._views[name][0] != addresses:
                self._views[name] = addresses, self._new_views(tensors)
            views = self._views[name][1]
        return torch.cat(views).view(-1, self._size).to(self._device)

    def gather_at(self, tensors: Sequence[Tensor], places: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Gather elements of tensors of other shapes.

        Args:
            tensors: one tensor for each parameter; all of one dtype.
            places: `(row, positions) -> places`: where a tensor holds the values for the sampled elements of the
                parameter.

        Returns:
            Matrix of shape (parameters, size) in the tensors' dtype; zeros for padding.
        """
        matrix = torch.zeros(len(tensors), self._size, dtype=tensors[0].dtype, device=self._device)
        for row, (tensor, count) in enumerate(zip(tensors, self.counts, strict=True)):
            matrix[row, :count] = tensor.view(-1)[places(row, self.positions[row, :count]).to(tensor.device)]
        return matrix

    def gather_row(self, row: int, tensor: Tensor) -> Tensor:
        """Return the sampled elements, of shape (size), of one tensor with the shape of parameter number `row`."""
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
        """True if some tensors have fewer elements than a row. Their rows are padded with zeros."""
        return min(self.counts) < self._size

    def clear_padding(self, matrix: Tensor) -> Tensor:
        """Return a matrix of samples with zeros (False) for padding."""
        return matrix.masked_fill(self._padding, 0) if self._is_padded else matrix

    @cached_property
    def _padding(self) -> Tensor:
        """Which elements of the matrix are padding; bool of its shape."""
        counts = torch.tensor(self.counts, device=self._device)
        return torch.arange(self._size, device=self._device) >= counts[:, None]

    @cached_property
    def elements_per_sample(self) -> Tensor:
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
    """Return the smallest spacing that fits a row and has no factor in common with the number of columns."""
    stride = max(-(-param.numel() // size), 1)
    if stride > 1 and param.dim() > 0:
        columns = param.shape[-1]
        while math.gcd(stride, columns) > 1:
            stride += 1
    return stride


class WatchedParameters:
    """The parameters that an optimizer has now; a parameter's row is its position among them.

    Args:
        optimizer: the optimizer.
        model: the model, for names and kinds.

    Attributes:
        optimizer: the optimizer.
        params: the parameters.
        row: the row of each.
        names: the name of each row.
        kinds: the kind of each row, see `tensor_names.py`.
        is_cut: whether they are parts of parameters that differ between ranks; see `FlatPart`.
        sample_size: the number of sampled elements of each.
        gradients: which of them have had gradients in measured steps.
        first_weights: by row, the sampled weights as they were at the beginning, in their dtype.
        first_low_bits: by row, the sampled compensations or remainders as they were then.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module | None) -> None:
        self.optimizer = optimizer
        numbered = [
            (param, f"param_groups[{g}]['params'][{k}]")
            for g, group in enumerate(optimizer.param_groups)
            for k, param in enumerate(group["params"])
        ]
        self.params: list[Tensor] = [param for param, _ in numbered]
        named: dict[Tensor, str] = {}
        if model is not None:
            named |= {param: _plain_name(name) for name, param in model.named_parameters()}
        named |= {param: _plain_name(part.name) for param in self.params if (part := flat_part(param))}
        kinds = parameter_kinds({name: full_shape(param) for param, name in named.items()})
        self.row = {param: row for row, param in enumerate(self.params)}
        self.names = [named.get(param, number) for param, number in numbered]
        self.kinds = [kinds.get(name, "other") for name in self.names]
        self.is_cut = any(flat_part(param) is not None for param in self.params)
        self.sample_size = row_size(len(self.params), sum(param.numel() for param in self.params))
        self.gradients = GradientRecord(self.names, self.params, model)
        self.first_weights: dict[int, Tensor] = {}
        self.first_low_bits: dict[int, Tensor] = {}
        for rows in self.divide(range(len(self.params))):
            self.first_weights |= self._samples(rows, [local_shard(self.params[row]) for row in rows])
        self.record_first_low_bits()

    def is_current(self) -> bool:
        """Return whether the optimizer still has the same parameters in the same order."""
        return [id(p) for group in self.optimizer.param_groups for p in group["params"]] == [*map(id, self.params)]

    def divide(self, rows: Iterable[int], *further: Mapping[int, Tensor | None]) -> list[list[int]]:
        """Divide `rows` by dtype, device and sharding of their parameters, and by the dtypes of `further` tensors."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for row in rows:
            param, dtypes = self.params[row], [getattr(tensors[row], "dtype", None) for tensors in further]
            groups[(param.dtype, param.device, sharding_of(param), *dtypes)].append(row)
        return list(groups.values())

    def low_bits(self, row: int) -> Tensor | None:
        """Return this rank's shard of the compensation or remainder that a parameter has now, if any."""
        param = self.params[row]
        state = low_bits_state(self.optimizer.state.get(param, {}))
        return local_shard(state) if isinstance(state, Tensor) and state.shape == param.shape else None

    def record_first_low_bits(self, rows: Iterable[int] | None = None) -> None:
        """Record, before a step, the low bits of `rows`, or of all, that are new or have a new dtype.

        A parameter's first step creates them, as does its first step in another rounding mode.
        """
        new = {}
        for row in self.row.values() if rows is None else rows:
            shard, first = self.low_bits(row), self.first_low_bits.get(row)
            if shard is not None and (first is None or first.dtype != shard.dtype):
                new[row] = shard
        for same_dtype in self.divide(new, new):
            self.first_low_bits |= self._samples(same_dtype, [new[row] for row in same_dtype])

    def _samples(self, rows: list[int], shards: list[Tensor]) -> dict[int, Tensor]:
        """Return the samples of `shards`, by row, on the parameters' device; states may be on the host."""
        matrix = ParameterSamples(shards, self.sample_size).gather(shards).to(self.params[rows[0]].device)
        return dict(zip(rows, matrix.unbind(), strict=True))


def _plain_name(name: str) -> str:
    """Strip the wrappers of DDP, torch.compile and activation checkpointing from a parameter's name."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")
