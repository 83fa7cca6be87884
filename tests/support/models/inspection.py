"""Read from a model what casting changes: dtypes, values, norms, hooks, outputs of modules; and copy it."""

import copy
import dataclasses
import io
import pickle
import re
from typing import Any

import torch
from torch import nn

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Found by the names of attributes, where the code under test goes by class.
NORM_PATH = re.compile(r"(^|\.)(\w*norm\w*|ln_\w+)$", re.IGNORECASE)

COPIES = ["deepcopy", "pickle", "torch.save"]


def copy_of(model: nn.Module, through: str) -> Any:
    """A copy, made as one of `COPIES` says."""
    if through == "deepcopy":
        return copy.deepcopy(model)
    if through == "pickle":
        return pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def assert_downcast(value: Any, original: Any) -> None:
    """Assert that `value` is `original`, containers and all, with each floating tensor rounded to BF16."""
    assert type(value) is type(original)
    if isinstance(original, torch.Tensor):
        assert torch.equal(value, original.to(BF16) if original.is_floating_point() else original)
    elif isinstance(original, dict):
        assert list(value) == list(original)
        for key in original:
            assert_downcast(value[key], original[key])
    elif isinstance(original, tuple | list):
        for one, two in zip(value, original, strict=True):
            assert_downcast(one, two)
    elif dataclasses.is_dataclass(original):
        assert_downcast(vars(value), vars(original))
    else:
        assert value == original


def norm_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose attribute is named as a norm's."""
    return {name: module for name, module in model.named_modules() if NORM_PATH.search(name)}


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.dtype for name, tensor in tensors}


def fp32_names(model: nn.Module) -> set[str]:
    return {name for name, dtype in dtypes(model).items() if dtype == FP32}


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in tensors}


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert torch.equal(value, right[name]), name


def gradient_dtypes(module: nn.Module) -> set[torch.dtype | None]:
    return {None if p.grad is None else p.grad.dtype for p in module.parameters()}


def hook_counts(model: nn.Module) -> list[tuple[int, int]]:
    """Of every module, how many forward pre-hooks and forward hooks."""
    return [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]


def output_dtypes(model: nn.Module, batch: dict[str, Any]) -> dict[str, set[torch.dtype]]:
    """Dtypes of the floating tensors that each module returned during one forward pass."""
    seen: dict[str, set[torch.dtype]] = {}

    def flatten(value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value] if value.is_floating_point() else []
        values = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else []
        return [tensor for item in values for tensor in flatten(item)]

    handles = [
        module.register_forward_hook(
            lambda m, a, out, name=name: seen.setdefault(name, set()).update(t.dtype for t in flatten(out))
        )
        for name, module in model.named_modules()
    ]
    model(**batch)
    for handle in handles:
        handle.remove()
    return seen
