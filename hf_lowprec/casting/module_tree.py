"""A model's modules and tensors by qualified name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn


def shape_of(tensor: Tensor) -> torch.Size:
    """The shape of a tensor. DeepSpeed's ZeRO 3 leaves a parameter itself empty."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


@dataclass(frozen=True)
class Owner:
    """One of the modules that hold a tensor."""

    module: str  # the module's qualified name
    name: str  # the tensor's qualified name in this module


@dataclass(frozen=True, eq=False)
class ModelTensor:
    """A parameter or buffer and everything that owns it: a tied tensor has several owners."""

    tensor: Tensor
    owners: tuple[Owner, ...]

    @property
    def name(self) -> str:
        """The qualified name under its first owner. No other tensor has it."""
        return self.owners[0].name

    @property
    def is_shared(self) -> bool:
        """True if several modules own it."""
        return len({owner.module for owner in self.owners}) > 1


@dataclass(frozen=True, eq=False)
class ModuleTree:
    """The modules of a model by qualified name; a module with several names is listed under each."""

    modules: dict[str, nn.Module]
    planned_dtypes: Mapping[int, torch.dtype] = field(default_factory=dict)  # id of a tensor -> dtype it is to have

    @classmethod
    def of(cls, model: nn.Module) -> ModuleTree:
        return cls(dict(model.named_modules(remove_duplicate=False)))

    def after(self, planned_dtypes: Mapping[int, torch.dtype]) -> ModuleTree:
        """The tree as it will be once its tensors have their planned dtypes."""
        return replace(self, planned_dtypes=planned_dtypes)

    @property
    def root(self) -> nn.Module:
        """The model, inside the wrapper of `torch.compile` if there is one: calls do not run the wrapper's hooks."""
        return compiled_module(self.modules[""])

    @cached_property
    def tensors(self) -> tuple[ModelTensor, ...]:
        """Every parameter and buffer once."""
        tensors: dict[int, Tensor] = {}
        owners: dict[int, list[Owner]] = {}
        for path, module in self.modules.items():
            for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    tensors[id(tensor)] = tensor
                    owners.setdefault(id(tensor), []).append(Owner(path, join(path, attribute)))
        return tuple(ModelTensor(tensor, tuple(owners[key])) for key, tensor in tensors.items())

    def children(self, name: str) -> list[str]:
        """The names of a module's children, in the order in which they were assigned."""
        return [join(name, child) for child, module in self.modules[name]._modules.items() if module is not None]

    def callable_parts(self, name: str) -> list[str]:
        """The module itself; for a container without a `forward` (ModuleList), whose hooks never run, its children."""
        if type(self.modules[name]).forward is not nn.Module.forward:
            return [name]
        return [part for child in self.children(name) for part in self.callable_parts(child)]

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """The dtype of a tensor, as it is or as it is planned."""
        return self.planned_dtypes.get(id(tensor), tensor.dtype)

    def floating_dtypes(self, name: str) -> set[torch.dtype]:
        """The dtypes of the floating tensors in a module and below it, as they are or as they are planned."""
        module = self.modules[name]
        tensors = (*module.parameters(), *module.buffers())
        return {self.dtype_of(t) for t in tensors if t.is_floating_point()}

    def computes_in(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether a module is called and holds tensors of `dtype`."""
        return dtype in self.floating_dtypes(name) and name in self.callable_parts(name)


def compiled_module(model: nn.Module) -> nn.Module:
    """The model inside the wrapper of `torch.compile`, or `model` itself."""
    while "_orig_mod" in model._modules:
        model = model.get_submodule("_orig_mod")
    return model


def join(module: str, name: str) -> str:
    """The qualified name of what a module calls `name`."""
    return f"{module}.{name}" if module else name
