"""The parts of a model that matter to a cast: models inside it, children that compute, and what makes predictions."""

from torch import nn

from hf_lowprec.casting.fp32_parts import outermost
from hf_lowprec.casting.fp32_rules import is_loss
from hf_lowprec.casting.module_tree import ModuleTree


def is_model(module: nn.Module) -> bool:
    """Return whether a module is a model by transformers' convention: its class has a `main_input_name`.

    Code outside calls such a model directly: `generate` calls the encoder inside a model.
    """
    return hasattr(type(module), "main_input_name") or "main_input_name" in vars(module)


def models_in_loss(tree: ModuleTree, model: nn.Module) -> dict[str, nn.Module]:
    """The models in a loss: `model`, and for each other one the largest module that contains it but not `model`."""
    loss_modules = {name for name, part in tree.modules.items() if part is not model and model in set(part.modules())}
    callable_modules = {name for name in tree.modules if tree.callable_parts(name) == [name]} - loss_modules
    models = [name for name, module in tree.modules.items() if module is model or is_model(module)]
    largest = (outermost(name, callable_modules) for name in models)
    return {name: tree.modules[name] for name in largest if name is not None}


def computing_children(tree: ModuleTree, name: str) -> list[str]:
    """The children of a module that hold floating tensors and are not losses, in the order in which they were assigned.

    A module calls its children in this order by convention only.
    """
    children = tree.children(name)
    return [child for child in children if tree.floating_dtypes(child) and not is_loss(tree.modules[child])]


def called_children(tree: ModuleTree, name: str) -> list[str]:
    """`computing_children`, with the modules inside a container that is never called (ModuleList) in its place."""
    return [part for child in computing_children(tree, name) for part in tree.callable_parts(child)]


def output_embeddings(module: nn.Module) -> nn.Module | None:
    """The layer that turns hidden states into logits, as the model's `get_output_embeddings` returns it.

    Not an `nn.Embedding`, which a few models return because it is tied.
    """
    try:
        embeddings = module.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return embeddings if isinstance(embeddings, nn.Module) and not isinstance(embeddings, nn.Embedding) else None


def prediction_layers(tree: ModuleTree, model: str) -> list[str]:
    """The layers that make a model's predictions: its output embeddings, and its last child that is not itself a model.

    Children named "auxiliary" that follow the last child belong to it.
    """
    children = [name for name in computing_children(tree, model) if not is_model(tree.modules[name])]
    main = [index for index, name in enumerate(children) if "auxiliary" not in name.rpartition(".")[2]]
    last = children[main[-1] if main else 0 :]
    layers = [part for name in last for part in tree.callable_parts(name)]
    embeddings = output_embeddings(tree.modules[model])
    return layers + [
        name for name, module in tree.modules.items() if module is embeddings and outermost(name, layers) is None
    ]
