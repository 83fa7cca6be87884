"""The rules by which parts of a model stay in FP32, each a function of its `ModuleTree`.

Some rules look at classes and their names, others at what a module's `forward` calls. `cast_plan.py` applies them in
order and combines what they keep.
"""

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hf_lowprec.casting.fp32_parts import Fp32Parts, Reason
from hf_lowprec.casting.hooks.forward_code import is_code_of_transformers, names_in_forward, uses_torch_losses
from hf_lowprec.casting.listed_classes import CLASSES_COMPUTING_IN_FP32
from hf_lowprec.casting.module_tree import ModuleTree, join, shape_of
from hf_lowprec.casting.quantized import quantized_as_fp32

_NORM_CLASSES = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
_NORM_NAME = re.compile(r"Norm(\d+[a-z]?|Gated|PerHead|Layer)*$", re.IGNORECASE)
_ROTARY_NAME = re.compile(r"Rotary|Rope\w*Embedding", re.IGNORECASE)
_FOURIER = re.compile(r"Fourier(Projection|Embedding|Features)$")
_FREQUENCIES = re.compile(r"(\w+_)?inv_freq")
_LOSS_NAME = re.compile(r"(Loss|Criterion)$")
_FUNCTIONS = {"matrix_exp", "householder_product", "solve", "inv", "inverse", "slogdet", "cholesky", "qr", "svd"}
_MODEL_CLASS_ATTRIBUTES = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
_BIAS_OF_EXPERTS = re.compile(r"(\w+_)?(correction|experts?|balanc\w+)_bias(es)?")


def listed_classes(tree: ModuleTree) -> Fp32Parts:
    """Keep the modules of the classes in `CLASSES_COMPUTING_IN_FP32`."""
    names = {name: type(module).__name__ for name, module in tree.modules.items()}
    listed = {name: class_name for name, class_name in names.items() if class_name in CLASSES_COMPUTING_IN_FP32}
    return Fp32Parts(
        {n: Reason("class", f"{c}: {CLASSES_COMPUTING_IN_FP32[c]}") for n, c in listed.items()},
    )


def norms(tree: ModuleTree) -> Fp32Parts:
    """Keep every norm."""
    class_names = {name: type(module).__name__ for name, module in tree.modules.items() if is_norm(module)}
    return Fp32Parts({name: Reason("norm", f"norm ({class_name})") for name, class_name in class_names.items()})


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm, by its class or by the name of its class or a base class.

    What holds other modules with tensors is a norm only if those are norms. By name alone, whole encoders
    (Wav2Vec2EncoderStableLayerNorm) and norms that own linear layers would count.
    """
    names = (cls.__name__ for cls in type(module).__mro__)
    if not isinstance(module, _NORM_CLASSES) and not any(map(_NORM_NAME.search, names)):
        return False
    inner = (part for part in module.modules() if part is not module and (part._parameters or part._buffers))
    return all(map(is_norm, inner))


def rotary_embeddings(tree: ModuleTree) -> Fp32Parts:
    """Keep every rotary embedding, every table of frequencies and, with hooks, every module of Fourier features.

    BF16 would round the frequencies.
    """
    class_names = {name: type(module).__name__ for name, module in tree.modules.items()}
    rotary = {name: f"rotary ({class_names[name]})" for name, module in tree.modules.items() if is_rotary(module)}
    fourier = {name: f"Fourier features ({cls})" for name, cls in class_names.items() if _FOURIER.search(cls)}
    return Fp32Parts({name: Reason("rotary", text) for name, text in (fourier | rotary).items()})


def is_rotary(module: nn.Module) -> bool:
    """Return whether a module is a rotary embedding by name, or has no parameters and a buffer named `inv_freq`.

    Modules that hold others with tensors are not. A rotary embedding converts its own outputs, so it gets no hooks.
    """
    has_frequencies = not module._parameters and any(map(_FREQUENCIES.fullmatch, module._buffers))
    if not has_frequencies and not any(_ROTARY_NAME.search(cls.__name__) for cls in type(module).__mro__):
        return False
    inner = any(part._parameters or part._buffers for part in module.modules() if part is not module)
    return not inner and not is_norm(module)


def losses(tree: ModuleTree) -> Fp32Parts:
    """Keep every loss module: a loss rounded to 16 bits hides small changes.

    Loss functions of models are in `hooks/losses.py`.
    """
    class_names = {name: type(module).__name__ for name, module in tree.modules.items() if is_loss(module)}
    return Fp32Parts({name: Reason("loss", f"loss ({class_name})") for name, class_name in class_names.items()})


def is_loss(module: nn.Module) -> bool:
    """Return whether a module is a loss, by the name of its class or a base class.

    With parameters other than single numbers (a temperature), it is a part of the model.
    """
    if not any(_LOSS_NAME.search(cls.__name__) for cls in type(module).__mro__):
        return False
    return not any(parameter.dim() for parameter in module.parameters()) and not (is_norm(module) or is_rotary(module))


def modules_with_torch_losses(tree: ModuleTree) -> list[str]:
    """The modules outside of transformers whose `forward` names one of torch's losses, except for losses themselves."""
    return [
        name
        for name, module in tree.modules.items()
        if uses_torch_losses(module) and not is_code_of_transformers(module) and not is_loss(module)
    ]


def loss_weights(tree: ModuleTree) -> Fp32Parts:
    """Keep class weights: frozen vectors with "weight" in their name that a `forward` with torch's losses uses.

    These losses compute in FP32, so weights in 16 bits would be rounded for nothing.
    """
    # A loss in a checkpoint computes in 16 bits (`hooks/losses.py`), and torch takes no weights of another dtype in it.
    names = {name: names_in_forward(tree.modules[name]) for name in modules_with_torch_losses(tree)}
    used = {join(name, attribute) for name in names for attribute in names[name] if "checkpoint" not in names[name]}
    return Fp32Parts(
        tensors={
            target.name: Reason("loss", "weights of classes in a loss")
            for target in tree.tensors
            for owner in target.owners
            if owner.name in used and _is_class_weight(target.tensor, owner.name)
        }
    )


def _is_class_weight(tensor: Tensor, name: str) -> bool:
    is_vector = shape_of(tensor).numel() == max(shape_of(tensor), default=0)
    is_number = tensor.is_floating_point() and not tensor.requires_grad
    return "weight" in name.rpartition(".")[2] and is_vector and is_number


def matrix_functions(tree: ModuleTree) -> Fp32Parts:
    """Keep modules without children whose `forward` names a function of matrices, and those whose weight is one.

    torch has none of these functions in 16 bits. Most raise an error. The matrix exponential, by which torch's
    `orthogonal` parametrization computes weights, gives NaN.
    """
    parts = Fp32Parts()
    for name, module in tree.modules.items():
        functions = _FUNCTIONS & names_in_forward(module)
        if functions and not module._modules:
            owner = re.sub(r"\.?\bparametrizations\.\w+\.\d+$", "", name)
            kept = name if tree.modules[owner]._modules.keys() - {"parametrizations"} else owner
            parts.modules[kept] = Reason("matrix", f"computes {min(functions)}, which torch does not in 16 bits")
    return parts


def named_by_model_class(tree: ModuleTree) -> Fp32Parts:
    """Keep what the model's class, or the class of a model inside, names: transformers does when it loads the model."""
    return Fp32Parts.combine(
        _matching_parts(tree, prefix, search, Reason("model class", f"named in {type(module).__name__}.{attribute}"))
        for prefix, module in tree.modules.items()
        for attribute in _MODEL_CLASS_ATTRIBUTES
        if (search := _search_listed(module, attribute)) is not None
    )


def _search_listed(module: nn.Module, attribute: str) -> Callable[[str], Any] | None:
    """Searches a name for the expressions that an attribute lists; None if it lists none."""
    # Not getattr: PEFT's wrappers forward it to the model inside, where names have another prefix.
    listed = vars(module).get(attribute, getattr(type(module), attribute, None))
    if not isinstance(listed, list | tuple | set | frozenset) or not listed:
        return None
    return re.compile("|".join(sorted(listed)).replace("*", ".*")).search


def _matching_parts(tree: ModuleTree, prefix: str, search: Callable[[str], Any], reason: Reason) -> Fp32Parts:
    """The modules and tensors below the module `prefix` whose names from there on match."""
    start = f"{prefix}." if prefix else ""

    def matches(name: str) -> bool:
        return name.startswith(start) and search(name[len(start) :]) is not None

    modules = dict.fromkeys(filter(matches, tree.modules), reason)
    # A tensor is kept alone: around one that is named (routers, sinks) the model's own code converts.
    tensors = {t.name: reason for t in tree.tensors if any(matches(owner.name) for owner in t.owners)}
    return Fp32Parts(modules, tensors)


def biases_that_choose_experts(tree: ModuleTree) -> Fp32Parts:
    """Keep biases of routers by their names, and each buffer named bias of a module whose `forward` uses `topk`.

    A router adds such a bias to its scores only to find the highest, so a rounded one would send tokens to other
    experts. Not every model's class names it.
    """
    parts = Fp32Parts()
    for owner, target in ((place, each) for each in tree.tensors for place in each.owners):
        name, is_buffer = owner.name.rpartition(".")[2], not isinstance(target.tensor, nn.Parameter)
        by_topk = is_buffer and "bias" in name and "topk" in names_in_forward(tree.modules[owner.module])
        untrained = "correction" in name or not target.tensor.requires_grad  # some declare corrections as parameters
        if untrained and (by_topk or _BIAS_OF_EXPERTS.fullmatch(name)):
            parts.tensors[target.name] = Reason("router", "bias that chooses experts")
    return parts


FP32_RULES: tuple[Callable[[ModuleTree], Fp32Parts], ...] = (
    quantized_as_fp32,
    listed_classes,
    norms,
    rotary_embeddings,
    losses,
    loss_weights,
    biases_that_choose_experts,
    matrix_functions,
    named_by_model_class,
)
"""The rules that need the model alone. Where several keep a module, the first one gives the reason."""
