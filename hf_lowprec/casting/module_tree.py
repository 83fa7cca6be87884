"""A model's modules and tensors by qualified name, and the modules in it that matter to a cast."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from hf_lowprec.casting.module_kinds import is_loss, is_model


def shape_of(tensor: Tensor) -> torch.Size:
    """Return the shape of a tensor. DeepSpeed's ZeRO 3 leaves a parameter itself empty."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


@dataclass(frozen=True, eq=False)
class ModelTensor:
    """A parameter or buffer. It has a name in each module that owns it: a tied tensor has several."""

    tensor: Tensor
    owner: nn.Module  # the first module that owns it
    names: tuple[str, ...]  # qualified

    @property
    def name(self) -> str:
        """The first of its names, which no other tensor has."""
        return self.names[0]

    @property
    def owners(self) -> list[str]:
        """The qualified names of the modules that own it, one for each name."""
        return [name.rpartition(".")[0] for name in self.names]

    @property
    def is_trainable(self) -> bool:
        """True for a parameter with a gradient."""
        return isinstance(self.tensor, nn.Parameter) and self.tensor.requires_grad


@dataclass(frozen=True, eq=False)
class ModuleTree:
    """The modules of a model by qualified name; a module with several names is listed under each."""

    modules: dict[str, nn.Module]
    planned_dtypes: Mapping[int, torch.dtype] = field(default_factory=dict)  # id of a tensor -> dtype it is to have

    @classmethod
    def of(cls, model: nn.Module) -> ModuleTree:
        return cls(dict(model.named_modules(remove_duplicate=False)))

    def after(self, planned_dtypes: Mapping[int, torch.dtype]) -> ModuleTree:
        """Return the tree as it will be once its tensors have their planned dtypes."""
        return replace(self, planned_dtypes=planned_dtypes)

    @property
    def root(self) -> nn.Module:
        """The model, inside the wrapper of `torch.compile` if there is one: calls do not run the wrapper's hooks."""
        return compiled_module(self.modules[""])

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter and buffer under each of its names."""
        for name, module in self.modules.items():
            for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    yield join(name, attribute), tensor

    @cached_property
    def tensors(self) -> tuple[ModelTensor, ...]:
        """Every parameter and buffer once."""
        tensors: dict[int, Tensor] = {}
        names: dict[int, list[str]] = {}
        for name, tensor in self.named_tensors():
            tensors[id(tensor)] = tensor
            names.setdefault(id(tensor), []).append(name)
        return tuple(
            ModelTensor(tensor, self.modules[names[key][0].rpartition(".")[0]], tuple(names[key]))
            for key, tensor in tensors.items()
        )

    def children(self, name: str) -> list[str]:
        """Return the names of a module's children, in the order in which they were assigned."""
        return [join(name, child) for child, module in self.modules[name]._modules.items() if module is not None]

    def callable_parts(self, name: str) -> list[str]:
        """Return the module itself; for a container without a `forward` (ModuleList), its children, whose hooks run."""
        if type(self.modules[name]).forward is not nn.Module.forward:
            return [name]
        return [part for child in self.children(name) for part in self.callable_parts(child)]

    def computing_children(self, name: str) -> list[str]:
        """Return the children of a module that hold floating tensors and are not losses, in the order of assignment.

        A module calls its children in this order by convention only.
        """
        children = self.children(name)
        return [child for child in children if self.floating_dtypes(child) and not is_loss(self.modules[child])]

    def called_children(self, name: str) -> list[str]:
        """Return `computing_children`, but for containers that are never called (ModuleList), their contents."""
        return [part for child in self.computing_children(name) for part in self.callable_parts(child)]

    def floating_dtypes(self, name: str) -> set[torch.dtype]:
        """Return the dtypes of the floating tensors in a module and below it, as they are or as they are planned."""
        module = self.modules[name]
        floating = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
        return {self.planned_dtypes.get(id(tensor), tensor.dtype) for tensor in floating}

    def computes_in(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether a module is called and holds tensors of `dtype`."""
        return dtype in self.floating_dtypes(name) and name in self.callable_parts(name)


def compiled_module(model: nn.Module) -> nn.Module:
    """Return the model inside the wrapper of `torch.compile`, or `model` itself."""
    while "_orig_mod" in model._modules:
        model = model.get_submodule("_orig_mod")
    return model


def join(module: str, name: str) -> str:
    """Return the qualified name of `name` in a module."""
    return f"{module}.{name}" if module else name


def path_to(module: str) -> list[str]:
    """Return the names of the model, of the modules inside it that contain a module, and of this module."""
    parts = module.split(".") if module else []
    return [".".join(parts[:depth]) for depth in range(len(parts) + 1)]


def outermost(name: str, modules: Collection[str]) -> str | None:
    """Return the outermost of `modules` that contains the module called `name`, or is it; None if there is none."""
    return next((module for module in path_to(name) if module in modules), None)


def output_embeddings(module: nn.Module) -> nn.Module | None:
    """Return the layer that turns hidden states into logits, by the model's `get_output_embeddings`.

    An `nn.Embedding` does not count; a few models return one because it is tied.
    """
    try:
        embeddings = module.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return embeddings if isinstance(embeddings, nn.Module) and not isinstance(embeddings, nn.Embedding) else None


def prediction_layers(tree: ModuleTree, model: str) -> list[str]:
    """Return the layers that make a model's predictions: its output embeddings, and its last child that is not a model.

    Children named "auxiliary" that follow the last child belong to it.
    """
    children = [name for name in tree.computing_children(model) if not is_model(tree.modules[name])]
    main = [index for index, name in enumerate(children) if "auxiliary" not in name.rpartition(".")[2]]
    last = children[main[-1] if main else 0 :]
    layers = [part for name in last for part in tree.callable_parts(name)]
    embeddings = output_embeddings(tree.modules[model])
    return layers + [
        name for name, module in tree.modules.items() if module is embeddings and outermost(name, layers) is None
    ]


def models_in_loss(tree: ModuleTree, model: nn.Module) -> dict[str, nn.Module]:
    """Return the models in a loss: `model`, and for each other model the largest module around it without `model`."""
    loss_modules = {name for name, part in tree.modules.items() if part is not model and model in set(part.modules())}
    callable_modules = {name for name in tree.modules if tree.callable_parts(name) == [name]} - loss_modules
    models = [name for name, module in tree.modules.items() if module is model or is_model(module)]
    largest = (outermost(name, callable_modules) for name in models)
    return {name: tree.modules[name] for name in largest if name is not None}
