"""Follow layers' outputs through the source of a `forward`, to torch's losses and to code that needs equal dtypes.

The source is evaluated abstractly, see `source_evaluation.py`: a value is described by the layers that it is computed
from, and by whether it may have 16 bits. Code that is not understood is assumed to need equal dtypes.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType

import torch
from torch import Tensor, nn

from hf_lowprec.casting.fp32_rules.losses import is_loss
from hf_lowprec.casting.hooks.argument_roles import role_of
from hf_lowprec.casting.hooks.flow_values import PLAIN, Value, any_of, promoted
from hf_lowprec.casting.hooks.forward_code import TORCH_LOSSES
from hf_lowprec.casting.hooks.source_evaluation import Environment, NotUnderstood, SourceEvaluation
from hf_lowprec.casting.module_tree import join
from hf_lowprec.rounding import LOW_PRECISION_DTYPES


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHAPES = """view reshape flatten unflatten squeeze unsqueeze transpose swapaxes permute movedim contiguous expand
    expand_as repeat repeat_interleave t clone detach narrow chunk split unbind tile view_as reshape_as gather
    index_select masked_select take_along_dim diagonal diag tril triu flip roll cat concat stack vstack hstack
    zeros_like ones_like full_like rand_like randn_like new_zeros new_ones new_full"""
_ELEMENTWISE = """softmax log_softmax sigmoid logsigmoid tanh relu gelu silu softplus leaky_relu elu exp exp2 log log2
    log1p expm1 sqrt rsqrt square pow abs neg sign sin cos clamp clip clamp_min clamp_max dropout normalize add sub mul
    div true_divide maximum minimum where nan_to_num"""
_REDUCTIONS = "mean sum max min amax amin logsumexp norm std var cumsum topk sort prod nanmean"
_SAME_DTYPE = _names(f"{_SHAPES} masked_fill")
"""Functions and methods whose result has the dtype of their first tensor."""

_PROMOTING = _names(f"{_ELEMENTWISE} {_REDUCTIONS} cosine_similarity pairwise_distance")
"""Functions and methods that take tensors of several dtypes and compute in the widest."""

_PRODUCTS = _names("matmul mm bmm mv dot inner outer einsum cdist addmm baddbmm linear_cross_entropy")
"""Functions and methods whose tensors have to have one dtype."""

_CONVERSIONS = _names("to type_as")  # their result has the dtype of what they are given, if it is a tensor
_CONTAINERS = _names("dict tuple list set zip enumerate reversed append extend values items keys get")
_PLAIN_RESULTS = _names("len int float bool isinstance print size dim numel argmax argmin item tolist any all")
_PLAIN_ATTRIBUTES = _names("shape device ndim is_cuda requires_grad")
_EQUAL_DTYPES = _names("huber_loss HuberLoss binary_cross_entropy BCELoss")
"""Losses that take predictions and targets of one dtype only."""

_OF_CLASSES = _names("cross_entropy CrossEntropyLoss nll_loss NLLLoss NLLLoss2d ctc_loss CTCLoss")
"""Losses whose targets are integers, as a rule."""

INHERITED_FORWARD = "super().forward"
"""Stands for the layers that make the predictions of an inherited `forward` of transformers."""

_LOSSES = TORCH_LOSSES | {"binary_cross_entropy_with_logits", "kl_div"}


@dataclass
class ForwardFlow(SourceEvaluation):
    """One evaluation of a `forward`, in which all layers but the excluded ones return FP32 copies."""

    module: nn.Module
    mixes_dtypes: bool
    dtype_of: Callable[[Tensor], torch.dtype]
    before: frozenset[str]  # layers that return 16 bits, from earlier evaluations
    fp32_layers: frozenset[str]  # layers that return FP32 anyway
    keeps_weights: bool  # whether weights of losses are kept in FP32 where the predictions are FP32
    excluded: set[str] = field(default_factory=set)  # layers whose copies meet what needs equal dtypes
    reached: set[str] = field(default_factory=set)  # layers whose copies reach a loss
    in_products: set[str] = field(default_factory=set)  # layers whose copies are multiplied with 16-bit tensors
    layers: set[str] = field(default_factory=set)  # all layers with copies
    weights: set[str] = field(default_factory=set)  # tensors that weigh classes in losses of copies
    bound_tensors: set[str] = field(default_factory=set)  # tensors that are also used where equal dtypes are needed

    def run(self, function: ast.FunctionDef) -> None:
        arguments = function.args
        names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        self_name = names[0].arg
        names += [extra for extra in (arguments.vararg, arguments.kwarg) if extra is not None]
        env = {a.arg: Value(is_16_bit=role_of(a.arg, 2) in ("activation", "mask")) for a in names}
        env[self_name] = Value(module="")
        self.execute(function.body, env)

    def is_16_bit(self, tensor: Tensor) -> bool:
        return self.dtype_of(tensor) in LOW_PRECISION_DTYPES

    def has_16_bits(self, module: nn.Module) -> bool:
        return any(self.is_16_bit(tensor) for tensor in (*module.parameters(), *module.buffers()))

    def exclude(self, values: Iterable[Value]) -> None:
        for value in values:
            self.excluded |= value.layers
            if value.tensor is not None:
                self.bound_tensors.add(value.tensor)

    def attribute(self, base: Value, name: str) -> Value:
        if base.module is None:
            if name in _PLAIN_ATTRIBUTES:
                return PLAIN
            return base  # a view, a field of an output, or `dtype`, which stands for its tensor
        owner = self.module.get_submodule(base.module)
        if isinstance(owner._modules.get(name), nn.Module):
            return Value(module=join(base.module, name))
        tensor = owner._parameters.get(name, owner._buffers.get(name, vars(owner).get(name)))
        if not isinstance(tensor, Tensor):
            return PLAIN
        qualified_name = join(base.module, name) if name in owner._parameters or name in owner._buffers else None
        return Value(is_16_bit=self.is_16_bit(tensor), tensor=qualified_name)

    def call(
        self,
        function: ast.expr,
        arguments: Sequence[ast.expr],
        keywords: Sequence[ast.keyword],
        env: Environment,
    ) -> Value:
        positional = [self.value(argument, env) for argument in arguments]
        named = {keyword.arg or "**": self.value(keyword.value, env) for keyword in keywords}
        operands = [*positional, *named.values()]
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if self.is_inherited_forward(function):
            self.exclude(operands)
            self.exclude_below("")  # the layers that it calls
            if INHERITED_FORWARD in self.before:
                return Value(is_16_bit=True)
            self.layers.add(INHERITED_FORWARD)
            return Value(frozenset([INHERITED_FORWARD]))

        base = None
        if isinstance(function, ast.Attribute) and not _is_namespace(function.value, env):
            base = self.value(function.value, env)

        called = self.value(function, env)
        if called.loss is not None:
            return self.loss(called.loss, positional, named, called)
        if called.module is not None:
            return self.layer(called.module, operands)
        if base is not None and base.module is not None:
            return self.method(base.module, name, operands)
        if name in _LOSSES:
            if name[0].isupper():  # a loss module, which is called later
                return replace(any_of(operands), loss=name)
            return self.loss(name, positional, named, PLAIN)

        if base is not None:
            operands = [base, *operands]
        if name in _PLAIN_RESULTS:
            return PLAIN
        if name in _PRODUCTS:
            return self.product(operands)
        if name in _CONVERSIONS and base is not None:
            return self.conversion(base, operands[1:], [*arguments, *(keyword.value for keyword in keywords)])
        if name in ("float", "double") and base is not None:
            return replace(base, is_16_bit=False)
        if name in _SAME_DTYPE and operands:
            return replace(any_of(operands), is_16_bit=operands[0].is_16_bit)
        if name in _PROMOTING:
            return promoted(operands)
        if name in _CONTAINERS and isinstance(function, ast.Attribute | ast.Name):
            combined = any_of(operands)
            if name in ("append", "extend") and isinstance(function, ast.Attribute):
                if not isinstance(function.value, ast.Name):
                    self.exclude([combined])
                else:
                    env[function.value.id] = combined
            return combined
        if name.endswith("Output"):  # of a model
            return any_of(operands)
        if name == "super":  # its other methods call layers of this module
            raise NotUnderstood
        return self.unknown(operands)

    def is_inherited_forward(self, function: ast.expr) -> bool:
        """Return whether a function is `super().forward`, and that of a model of transformers."""
        match function:
            case ast.Attribute(ast.Call(ast.Name("super"), []), "forward"):
                owners = [cls for cls in type(self.module).__mro__ if "forward" in vars(cls)]
                return len(owners) > 1 and owners[1].__module__.startswith("transformers.")
        return False

    def unknown(self, operands: Sequence[Value]) -> Value:
        """A call of code that is not evaluated. It may call the modules that it is given."""
        self.exclude(operands)
        for operand in operands:
            if operand.module is not None:
                self.exclude_below(operand.module)
        return Value(is_16_bit=any(operand.is_16_bit or operand.module is not None for operand in operands))

    def exclude_below(self, path: str) -> None:
        """Exclude a module and everything in it."""
        start = f"{path}." if path else ""
        names = [name for name, _ in self.module.named_modules() if name]
        self.excluded |= {name for name in names if name == path or name.startswith(start)}

    def layer(self, path: str, operands: Sequence[Value]) -> Value:
        """A call of a module. It computes with its own weights, so it takes no copies, unless it is a loss."""
        module = self.module.get_submodule(path)
        if is_loss(module):
            return promoted(operands)
        if not _computes(module):
            if type(module).__module__.startswith("torch."):  # an activation function or dropout
                return promoted(operands)
            return self.unknown(operands)
        self.exclude(operands)
        if path in self.fp32_layers:
            return Value(frozenset([path]))
        # A container stands for the layers in it, one of which is called.
        is_container = type(module).forward is nn.Module.forward
        parts = [f"{path}.{name}" for name in module._modules] if is_container else [path]
        names = [name for part in parts if (name := self.upcast_layer(part)) is not None]
        if len(names) < len(parts):
            self.excluded.update(names)
            return Value(is_16_bit=True)
        self.layers.update(names)
        return Value(frozenset(names))

    def upcast_layer(self, path: str) -> str | None:
        """The name under which a layer is listed; None if it returns 16 bits, or has several uses."""
        module = self.module.get_submodule(path)
        if path in self.before or not self.has_16_bits(module) or type(module).forward is nn.Module.forward:
            return None
        uses = [name for name, other in self.module.named_modules(remove_duplicate=False) if other is module]
        is_model = hasattr(type(module), "main_input_name")  # it has many outputs, and its own losses
        return None if len(uses) > 1 or is_model else path

    def method(self, path: str, name: str, operands: Sequence[Value]) -> Value:
        """A call of a method other than `forward`. The layers that its code names return 16 bits to it."""
        self.exclude(operands)
        owner = self.module.get_submodule(path)
        for attribute in _names_used(type(owner), name):
            if isinstance(owner._modules.get(attribute), nn.Module):
                self.exclude_below(join(path, attribute))
        return Value(is_16_bit=True)

    def product(self, operands: Sequence[Value]) -> Value:
        """A product of tensors, which must all be copies, or else none of them."""
        if any(operand.is_16_bit for operand in operands):
            self.exclude(operands)
            self.in_products.update(*(operand.layers for operand in operands))
        return any_of(operands)

    def conversion(self, base: Value, targets: Sequence[Value], nodes: Sequence[ast.expr]) -> Value:
        """`base.to(…)`: FP32 if it is given FP32, or a device for a base that is FP32."""
        names = {getattr(node, "attr", getattr(node, "id", "")) for node in nodes}
        if names & {"float", "float32", "double", "float64"}:
            return replace(base, is_16_bit=False)
        if all("device" in name for name in names):
            return base
        if any(target.layers for target in targets):
            self.exclude([base] if any_of(targets).is_16_bit else [])
            return any_of(targets)
        self.exclude([base])
        return replace(base, is_16_bit=True)

    def loss(self, name: str, positional: Sequence[Value], named: dict[str, Value], constructed: Value) -> Value:
        """A call of one of torch's losses: it takes copies, with FP32 weights, and targets that it can mix with."""
        tensors = [*positional, *named.values()]
        if name in _PRODUCTS or name.startswith("Linear"):
            return self.product(tensors)
        weights = [
            constructed,
            *positional[2:],
            *(named[key] for key in ("weight", "pos_weight", "var") if key in named),
        ]
        compared = [*positional[:2]] + [value for key, value in named.items() if key not in ("weight", "pos_weight")]
        needs_one_dtype = name in _EQUAL_DTYPES or not self.mixes_dtypes
        is_fp32 = any(value.layers and not value.is_16_bit for value in compared)
        for weight in weights:
            if self.keeps_weights and weight.tensor is not None and is_fp32:
                self.weights.add(weight.tensor)
            elif weight.is_16_bit:
                self.exclude([*tensors, constructed])
        if needs_one_dtype and name not in _OF_CLASSES and any(value.is_16_bit for value in compared):
            self.exclude(tensors)
        for value in (*tensors, constructed):
            self.reached |= value.layers
        return replace(any_of(tensors), tensor=None)


def _is_namespace(node: ast.expr, env: Environment) -> bool:
    """Return whether an expression is a Python module (`torch.nn.functional`): it does not start from a variable."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id not in env


def _computes(module: nn.Module) -> bool:
    return any(tensor.is_floating_point() for tensor in (*module.parameters(), *module.buffers()))


def _names_used(cls: type, method: str) -> set[str]:
    """The names in the code of a method, and of the methods that it names in turn."""
    names, pending = set[str](), [method]
    while pending:
        function = inspect.getattr_static(cls, pending.pop(), None)
        if isinstance(function, property):
            function = function.fget
        if isinstance(function, FunctionType):
            new = set(function.__code__.co_names) - names
            names |= new
            pending += new
    return names
