"""Reads a checkpoint's weights under the names and in the shapes that they have in the model.

transformers saves some models in another layout than it trains them in: other names, experts split, matrices
transposed. Optimizer states are always in the layout of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_lowprec.integrations.checkpoint_files.stored_tensors import StoredTensors, TensorInfo
from hf_lowprec.integrations.export.recorded_operations import RecordedOperations
from hf_lowprec.integrations.transformers import private_apis


class WeightLayout:
    """The tensors of a model, read from the files of a checkpoint in the saved layout or in the model's own.

    Args:
        model: the model; it may be on the meta device.
        stored: the checkpoint's weights.

    Attributes:
        model: the model.
        infos: the shape and stored dtype of each tensor, by its name in the model. Tensors that transformers does not
            save are left out.
        aliases: the names of each tensor, which several names have if it is tied.

    Raises:
        ValueError: the checkpoint lacks a tensor of the model.
    """

    def __init__(self, model: PreTrainedModel, stored: StoredTensors) -> None:
        self.model = model
        self._stored = stored
        tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
        by_tensor: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            by_tensor.setdefault(id(tensor), []).append(name)
        self.aliases = {name: names for names in by_tensor.values() for name in names}
        self.infos: dict[str, TensorInfo] = {}
        self._stored_name: dict[str, str] = {}
        self._find_stored_as_they_are(tensors)
        ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        others = [name for name in tensors if name not in self.infos and name not in ignored]
        if others:
            self._find_stored_in_another_layout(tensors, others)

    def read(self, name: str) -> Tensor:
        """Read one tensor of the model to the CPU."""
        if name in self._stored_name:
            return self._stored.read(self._stored_name[name])
        return self._read_converted(name)

    def _find_stored_as_they_are(self, tensors: dict[str, Tensor]) -> None:
        """Find the tensors that the checkpoint has by their name, or by that of a tensor tied to them."""
        for name, tensor in tensors.items():
            stored_name = next((n for n in self.aliases[name] if self._has(n, tensor.shape)), None)
            if stored_name is not None:
                self._stored_name[name] = stored_name
                self.infos[name] = TensorInfo(tensor.shape, self._stored.infos[stored_name].dtype)

    def _find_stored_in_another_layout(self, tensors: dict[str, Tensor], names: list[str]) -> None:
        """Find the tensors `names` in the stored ones that transformers computes from them when it saves the model."""
        self._record_saving(self.model, tensors)
        for name in names:
            parts = self._stored_parts(name)
            if not parts:
                raise ValueError(
                    f"the checkpoint has no weights for {name} of shape {tuple(tensors[name].shape)}, which "
                    f"{type(self.model).__name__} has according to config.json"
                )
            dtypes = {self._stored.infos[part].dtype for part in parts}
            # FP32 holds the values of all parts.
            self.infos[name] = TensorInfo(tensors[name].shape, torch.float32 if len(dtypes) > 1 else dtypes.pop())

    def _has(self, name: str, shape: torch.Size) -> bool:
        return name in self._stored.infos and self._stored.infos[name].shape == shape

    def _record_saving(self, model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
        """Record how saving computes tensors in the saved layout from those of the model."""
        self._recorded = RecordedOperations()
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        sources = {
            name: self._recorded.add_source(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()
        }
        with self._recorded:
            self._saved = private_apis.in_saved_layout(model, sources)

    def _stored_parts(self, name: str) -> list[str]:
        """The stored tensors that are computed from the tensor `name`; empty unless all of them are stored."""
        parts: list[str] = []
        for alias in self.aliases[name]:
            parts = [part for part, tensor in self._saved.items() if alias in self._recorded.sources_of(tensor)]
            if parts and all(self._has(part, self._saved[part].shape) for part in parts):
                return parts
        return []

    def _read_converted(self, name: str) -> Tensor:
        """Read a tensor whose elements are stored in another order, or over several tensors.

        Saving is repeated with the elements' positions in place of their values. The position that arrives at each
        place of a stored tensor says where its value belongs.
        """
        parts = self._stored_parts(name)
        name = next(alias for alias in self.aliases[name] if alias in self._recorded.sources_of(self._saved[parts[0]]))
        sources = {source for part in parts for source in self._recorded.sources_of(self._saved[part])}
        shape = self._shapes[name]
        positions = {source: torch.full(self._shapes[source], -1) for source in sources}  # -1: not of this tensor
        positions[name] = torch.arange(shape.numel()).view(shape)
        result = torch.empty(shape.numel(), dtype=self.infos[name].dtype)
        filled = torch.zeros(shape.numel(), dtype=torch.bool)
        for part in parts:
            index = self._recorded.evaluate(self._saved[part], positions).reshape(-1)
            values = self._stored.read(part).reshape(-1).to(result.dtype)
            result[index[index >= 0]] = values[index >= 0]
            filled[index[index >= 0]] = True
        if not bool(filled.all()):
            raise ValueError(f"saving {name} loses elements, so it cannot be read from the checkpoint's {parts[0]}")
        return result.view(shape)
