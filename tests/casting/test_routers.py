"""Routers of experts are in FP32 where the model wants it, and so is every bias that chooses experts."""

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
from tests.support.models.inspection import BF16, FP32, bits

SOURCES = {
    path.parent.name: path.read_text() for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
}
SOURCES = {folder: text for folder, text in SOURCES.items() if "topk(" in text and "experts" in text}
UNTRAINED_BIAS = re.compile(
    r"self\.(\w*bias\w*) = nn\.(?:Buffer\(|Parameter\((?:(?!self\.\w+ =).)*?requires_grad=False)", re.DOTALL
)
TYPES = {name: classes for name, classes in classes_by_type().items() if model_type_to_module_name(name) in SOURCES}
NAMES = {name for text in SOURCES.values() for name in UNTRAINED_BIAS.findall(text)}
NEED_OTHER_CONFIGS = (
    "inkling_mm_model",
    "dots3_note",
    "dots3_note_text",
    "gemma4_assistant",
    "gemma4_unified_assistant",
    "qwen3_omni_moe",
)
PER_ELEMENT = {
    *("add", "mul", "sub", "view", "reshape", "squeeze", "unsqueeze"),
    *("to", "float", "masked_fill", "sum"),
}
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


def leaf(name: str) -> str:
    return name.rpartition(".")[2]


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


@pytest.mark.parametrize("model_type", nightly_except(SHORT, sorted(TYPES.keys() - NEED_OTHER_CONFIGS)))
def test_what_chooses_experts_is_exact(model_type: str) -> None:
    model = mixture(model_type)
    exact = {name: tensor.clone() for name, tensor in untrained(model).items()}
    report = cast_model(model)
    for _, batch in offers(model):
        with contextlib.suppress(Exception), torch.no_grad(), Chosen(model) as chosen:
            model(**batch)
            break
    assert bool(chosen.found) == any(name in NAMES - {"std_bias"} for name in map(leaf, untrained(model)))
    assert chosen.found or model_type not in SHORT
    for name in chosen.found:
        assert torch.equal(untrained(model)[name], exact[name]) and untrained(model)[name].dtype == FP32
        assert any(name.startswith(kept) for kept in report.kept)


def test_names_in_transformers() -> None:
    for name in NAMES - {"std_bias"}:  # which pixels lie around
        layer = nn.Linear(2, 2)
        layer.register_buffer(name, torch.tensor([7.1, 6.9]))
        assert cast_model(layer).kept == {name: "bias that chooses experts"}, name


class Router(nn.Linear):
    """Of a model with code of its own."""

    def __init__(self, name: str, bias: Tensor) -> None:
        super().__init__(4, 4)
        self.name = name
        self.register_parameter(name, bias) if isinstance(bias, nn.Parameter) else self.register_buffer(name, bias)

    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x).sigmoid()
        chosen = torch.topk(scores + getattr(self, self.name), 2).indices
        return scores.gather(-1, chosen)


@pytest.mark.parametrize(
    ("name", "bias", "kept"),
    [
        ("e_score_correction_bias", nn.Parameter(torch.zeros(4)), True),  # so it is in DeepSeek's own code
        ("load_bias", torch.zeros(4), True),
        ("load_bias", nn.Parameter(torch.zeros(4)), False),
        ("expert_bias", nn.Parameter(torch.zeros(4)), False),  # which experts add to their results
        ("expert_bias", nn.Parameter(torch.zeros(4), requires_grad=False), True),
    ],
)
def test_models_with_their_own_code(name: str, bias: Tensor, kept: bool) -> None:
    model = nn.Sequential(Router(name, bias), nn.Linear(2, 2)).requires_grad_(bias.requires_grad)
    cast_model(model)
    assert bits(model)[f"0.{name}"].dtype == (FP32 if kept else BF16)
    assert bits(model)["0.bias"].dtype == BF16
    assert model(torch.randn(3, 4)).dtype == BF16
