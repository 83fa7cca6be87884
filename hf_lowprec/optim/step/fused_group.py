"""The parameters that one kernel steps together, and their tables for the step."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_lowprec.once import cached_property
from hf_lowprec.optim.sharding import Sharding
from hf_lowprec.optim.step.kernel_spec import CLIP, COLUMN_FACTOR, ROW_FACTOR, KernelSpec
from hf_lowprec.optim.step.matrix_owners import MatrixOwners, order_of_steps
from hf_lowprec.optim.step.matrix_tiles import MeanVectors
from hf_lowprec.optim.step.param_entry import ParamEntry
from hf_lowprec.optim.step.scalars import DeviceScalars, HostScalars, StepScalars
from hf_lowprec.optim.step.segments import Segments
from hf_lowprec.rounding import step_keys
from hf_lowprec.rounding.block_floats import BLOCK
from hf_lowprec.rounding.modes import LOW_BITS_STATES

CHUNK = 1 << 22
"""Elements that torch's own operations compute at once; FP32 temporaries take a few dozen bytes per element."""


def load(stored: Tensor) -> Tensor:
    """Convert a tensor to the dtype that steps compute with: FP32, or int32 if it stores integers."""
    return stored.float() if stored.is_floating_point() else stored.int()


def place_of_factor(name: str, positions: Tensor, shape: torch.Size) -> Tensor:
    """Return where elements at `positions` of a tensor of `shape` are in a row or column factor, called `name`."""
    rows, columns = shape[-2:]
    if name == ROW_FACTOR:
        return positions // columns
    return positions // (rows * columns) * columns + positions % columns


class Elements(NamedTuple):
    """The inputs of `fused_step`: FP32 or int32 values of some elements, and the step's scalars."""

    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    scalars: dict[str, Tensor]


class FusedGroup:
    """The parameters of one spec on one device, for as many steps as they stay the same.

    `StepPlan` builds it and gives it gradients; a `BackendStep` steps it.

    Attributes:
        spec: what is computed.
        device: the device of the parameters.
        sharding: the ranks over which the parameters are sharded, or None.
        entries: the parameters; orthogonalized ones are in the `order_of_steps`.
        weights: the entries' `weight`, which a step writes to.
        segments: the static tables of the entries' elements.
        step_scalars: computes the scalars of a step.
        counts: the steps taken so far, int64 of shape (entries); on the CPU, or on `device` if `scalars_on_device`.
        scalars: the coming step's scalars `spec.scalars`, FP32 of shape (entries, scalars); where `counts` are.
        scalars_on_device: whether these are on `device`, so that a step can be skipped without waiting for it.
        clip_factor: the step's clip factor, an FP32 scalar on `device`, if the spec is clipped. Only during a step.
        enabled: whether to take the step, a bool scalar on `device`; None means yes. Only during a step.
        per_param_scalars: tensor means or LR scales of the entries, FP32 of shape (entries, scalars) on `device`, if
            the spec has some. Only during a step.
        new_means: the new values of the entries' `means`, one after the other, by dimension. Only during a step.
        lr_scales: `lr_scale` of each entry, for algorithms that orthogonalize: as numbers, and as an FP32 tensor of
            shape (entries, 1) on `device`. None before the first step.
        matrix_owners: which rank orthogonalizes which entry, by the ranks that share them; see `orthogonalization.py`.
        matrix_slots: memory for the orthogonalized matrix of each entry, of the shape of its `weight`. Entries that are
            not stepped at the same time share memory. None except while matrices are stepped.
    """

    def __init__(
        self,
        spec: KernelSpec,
        device: torch.device,
        sharding: Sharding | None,
        entries: list[ParamEntry],
        scalars_on_device: bool,
    ) -> None:
        self.spec = spec
        self.device = device
        self.sharding = sharding
        if spec.orthogonalizes:
            entries = [entries[k] for k in order_of_steps([entry.param for entry in entries])]
        self.entries = entries
        self.weights = [entry.weight for entry in entries]
        self.segments = Segments(spec, entries)
        self.scalars_on_device = scalars_on_device
        self.step_scalars: StepScalars = (
            DeviceScalars(entries, len(spec.scalars), device)
            if scalars_on_device
            else HostScalars(entries, len(spec.scalars))
        )
        self.counts, self.scalars = self.step_scalars.counts, self.step_scalars.values
        self.clip_factor: Tensor | None = None
        self.enabled: Tensor | None = None
        self.per_param_scalars: Tensor | None = None
        self.lr_scales: tuple[list[float], Tensor] | None = None
        self.matrix_owners: dict[Any, MatrixOwners] = {}
        self.matrix_slots: list[Tensor] | None = None
        self.new_means: dict[int, Tensor] = {}

        not_yet = [0] * len(spec.input_tensors)
        addresses = (
            [entry.weight.data_ptr(), *not_yet, *map(Tensor.data_ptr, entry.states.values())] for entry in entries
        )
        self._addresses = array("q", chain.from_iterable(addresses))
        self._pointers = torch.frombuffer(self._addresses, dtype=torch.int64).view(len(entries), -1)

    def set_gradients(self, grads: Sequence[Tensor], addresses: Sequence[int]) -> None:
        """Give every entry its gradient for the coming step.

        Args:
            grads: this rank's part of each gradient, contiguous.
            addresses: the addresses of their memory.
        """
        for entry, grad in zip(self.entries, grads, strict=True):
            entry.grad = grad
        self._addresses[1 :: len(self.spec.tensors)] = array("q", addresses)

    def count_step(self) -> None:
        """Count the step that was taken."""
        self.step_scalars.count_step(self.enabled)

    @cached_property
    def full_sizes(self) -> Tensor:
        """Elements of each full parameter, at least 1; FP64 of shape (entries) on `device`."""
        counts = [max(math.prod(entry.param.shape), 1) for entry in self.entries]
        return torch.tensor(counts, dtype=torch.float64, device=self.device)

    @cached_property
    def matrix_sizes(self) -> Tensor:
        """The rows and columns of each full parameter, at least 1; FP64 of shape (entries, 2) on `device`."""
        sizes = [[max(size, 1) for size in entry.param.shape[-2:]] for entry in self.entries]
        return torch.tensor(sizes, dtype=torch.float64, device=self.device)

    @cached_property
    def mean_vectors(self) -> MeanVectors:
        """The vectors of the means of all entries."""
        return MeanVectors([weight.shape for weight in self.weights], self.device)

    def release(self) -> None:
        """Release what belongs to a single step, above all the gradients."""
        self.clip_factor = self.enabled = self.per_param_scalars = self.matrix_slots = None
        self.new_means = {}
        for entry in self.entries:
            entry.grad = entry.orthogonalized = entry.factors = None

    @property
    def skipped(self) -> bool:
        """True if the step is skipped; reading it waits for the device."""
        return self.enabled is not None and not bool(self.enabled)

    def all_scalars(self, scalars: Tensor) -> Tensor:
        """Return `scalars` with the clip factor and the per-parameter scalar, if there are any, as further columns.

        Args:
            scalars: this group's `scalars`, or a copy of them on another device.
        """
        columns = [scalars]
        if self.clip_factor is not None:
            columns.append(self.clip_factor.to(scalars.device).expand(len(scalars), 1))
        if self.per_param_scalars is not None:
            columns.append(self.per_param_scalars)
        return torch.cat(columns, dim=1) if len(columns) > 1 else scalars

    def pointers(self) -> Tensor:
        """Return addresses of the entries' tensors, int64 of shape (entries, tensors) on the CPU, in the spec's order.

        The next step overwrites them.
        """
        if self.matrix_slots is not None:
            self._addresses[2 :: len(self.spec.tensors)] = array("q", map(Tensor.data_ptr, self.matrix_slots))
        if self.spec.factored:
            factors = [entry.factors for entry in self.entries if entry.factors is not None]
            for k, of_entries in enumerate(zip(*factors, strict=True), 2):
                self._addresses[k :: len(self.spec.tensors)] = array("q", map(Tensor.data_ptr, of_entries))
        return self._pointers

    def segment_keys(self, part: slice = slice(None)) -> list[dict[int, tuple[int, int]]]:
        """Return the coming step's keys as numbers, by random word, for every segment, or for a part of them.

        Kernels compute the same keys themselves. This waits for the device if `scalars_on_device`.
        """
        step = self.counts.to("cpu", torch.int32)[self.segments.entry_index[part]] + 1
        streams = self.segments.streams[part].to(torch.int32).unbind(1)
        keys_of_segments: list[dict[int, tuple[int, int]]] = [{} for _ in step]
        for word, stream in zip(self.spec.random_words, zip(streams[::2], streams[1::2], strict=True), strict=True):
            key0, key1 = step_keys(*stream, step, self.segments.index_high[part].to(torch.int32))
            for keys, *pair in zip(keys_of_segments, key0.tolist(), key1.tolist(), strict=True):
                keys[word] = tuple(pair)
        return keys_of_segments

    def _load(self, name: str, tensor: Tensor, part: slice, shape: torch.Size) -> Tensor:
        """Load `tensor`, called `name`, for some elements of its parameter; `shape` is this rank's part."""
        if name in (ROW_FACTOR, COLUMN_FACTOR):
            positions = torch.arange(part.start, part.stop, device=tensor.device)
            return tensor[place_of_factor(name, positions, shape)]
        if name not in self.spec.per_block_tensors:
            return load(tensor.view(-1)[part])
        return load(tensor.view(-1)[part.start // BLOCK : part.stop // BLOCK]).repeat_interleave(BLOCK)

    def elements(self, entry: int, part: slice) -> Elements:
        """Return the values of some elements of entry number `entry`.

        Args:
            entry: its position in `entries`.
            part: the elements of its flattened tensors; whole blocks, if there are states in 8 bits.
        """
        shape = self.weights[entry].shape
        values = {name: self._load(name, tensor, part, shape) for name, tensor in self.entries[entry].tensors.items()}
        return Elements(values.pop("param"), values.pop("grad"), values, self.scalars_of(entry))

    def elements_without_weight(self, entry: int, part: slice) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return gradient, states and scalars like `elements`, without the weight and the states with its low bits."""
        tensors = self.entries[entry].tensors
        names = [name for name in tensors if name != "param" and name not in LOW_BITS_STATES]
        values = {name: self._load(name, tensors[name], part, self.weights[entry].shape) for name in names}
        return values.pop("grad"), values, self.scalars_of(entry)

    def scalars_of(self, entry: int) -> dict[str, Tensor]:
        """Return the coming step's scalars of entry number `entry`, by name, if they are computed already."""
        # Tensors, not numbers: torch divides a number by a tensor with two roundings.
        scalars = dict(zip(self.spec.scalars, self.scalars[entry].unbind(), strict=True))
        if self.clip_factor is not None:
            scalars[CLIP] = self.clip_factor
        if self.per_param_scalars is not None:
            scalars |= zip(self.spec.per_param_scalars, self.per_param_scalars[entry].unbind(), strict=True)
        return scalars
