"""Every bias of transformers' models that chooses experts is exact after a cast."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.models.auto.configuration_auto import model_type_to_module_name

from hf_lowprec.casting import cast_model
from tests.support.chosen_cases import nightly_except
from tests.support.every_architecture.model_classes import classes_by_type, main_class
from tests.support.every_architecture.tiny_batches import offers
from tests.support.every_architecture.tiny_configs import tiny_config
from tests.support.models.inspection import FP32

FILES = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
SOURCES = {file.parent.name: text for file in FILES if "topk(" in (text := file.read_text()) and "experts" in text}
UNTRAINED = r"self\.(\w*bias\w*) = nn\.(?:Buffer\(|Parameter\((?:(?!self\.\w+ =).)*?requires_grad=False)"
NAMES = {name for text in SOURCES.values() for name in re.findall(UNTRAINED, text, re.DOTALL)} - {
    "std_bias"
}  # of pixels
TYPES = {name: classes for name, classes in classes_by_type().items() if model_type_to_module_name(name) in SOURCES}
NOT_TINY = re.compile(
    r"inkling_mm_model|dots3_note|gemma4_\w*assistant|qwen3_omni_moe$"
)  # or cannot be built from sizes
PER_ELEMENT = {"add", "mul", "view", "squeeze", "unsqueeze", "to", "float", "masked_fill"}
SHORT = ("ernie4_5_moe", "laguna", "lfm2_moe", "longcat_flash", "minimax_m2", "zaya")


def mixture(model_type: str) -> nn.Module:
    model_class: Any = getattr(transformers, main_class(TYPES[model_type]))
    torch.manual_seed(0)
    model = model_class(tiny_config(model_class, model_type)).eval()
    for name, tensor in untrained(model).items():
        if "bias" in name:
            tensor.data = tensor.data + 7 + torch.rand_like(tensor) / 5
    return model


def untrained(model: nn.Module) -> dict[str, Tensor]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in tensors if tensor.is_floating_point() and not tensor.requires_grad}


class Chosen(TorchFunctionMode):
    """Finds the tensors without gradient from which, element by element, the arguments of `topk` are computed."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(tensor): {name} for name, tensor in untrained(model).items()}
        self.alive: list[Tensor] = []  # so that no id is used again
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.__name__.strip("_")
        names = set().union(*(self.names.get(id(arg), ()) for arg in args))
        if name == "topk":
            self.found |= names
        elif names and name in PER_ELEMENT:
            self.alive.append(result)
            self.names[id(result)] = names
        return result


@pytest.mark.parametrize("model_type", nightly_except(SHORT, [name for name in TYPES if not NOT_TINY.match(name)]))
def test_what_chooses_experts_is_exact(model_type: str) -> None:
    model = mixture(model_type)
    exact = {name: tensor.clone() for name, tensor in untrained(model).items()}
    report = cast_model(model)
    for _, batch in offers(model):
        with contextlib.suppress(Exception), torch.no_grad(), Chosen(model) as chosen:
            model(**batch)
            break
    assert bool(chosen.found) == any(name.rpartition(".")[2] in NAMES for name in untrained(model))
    assert chosen.found or model_type not in SHORT
    for name in chosen.found:
        assert torch.equal(untrained(model)[name], exact[name]) and untrained(model)[name].dtype == FP32
        assert any(name.startswith(kept) for kept in report.kept)
