"""A model's convolutions are probed within a bound, and nothing of the model changes."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hf_lowprec.casting import cast_model
from hf_lowprec.monitor import broken_convolutions
from hf_lowprec.monitor.broken_convolutions import (
    find_broken_convolutions,
    keep_fp32_patterns,
    workarounds,
)
from hf_lowprec.monitor.layer_probes import layer_computations, probe_layer
from tests.support.broken_kernels.planted import break_function, off_by

pytestmark = pytest.mark.usefixtures("own_kernels")


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Conv1d(8, 8, 3, padding=1, groups=4), nn.GELU()) for _ in range(3)]
        self.layers = nn.ModuleList(blocks)
        self.position = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 16, padding=8, groups=4), dim=2)
        self.head = nn.Conv1d(8, 4, 1)


def test_a_models_convolutions_are_probed_once_for_each_configuration(monkeypatch):
    model = Speech()
    cast_model(model)
    probed = []
    monkeypatch.setattr(
        broken_convolutions, "probe_layer", lambda layer, *args: probed.append(layer) or probe_layer(layer, *args)
    )
    assert find_broken_convolutions(model) == [] and len(probed) == 3
    break_function(monkeypatch, "conv1d", off_by(1.1), only=lambda values: values[1].shape[-1] > 1)
    names = [probe.names for probe in find_broken_convolutions(model)]
    assert names == [("layers.0.0", "layers.1.0", "layers.2.0"), ("position",)]


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        (["layers.0.0", "layers.1.0", "layers.2.0", "position"], ["layers.*.0", "position"]),
        (["layers.0.0", "layers.2.0"], ["layers.0.0", "layers.2.0"]),
    ],
)
def test_the_patterns_keep_what_is_broken_and_nothing_else(names, patterns):
    model = Speech()
    assert keep_fp32_patterns(model, names) == patterns
    cast_model(model, keep_fp32=patterns)
    kept = {name for name, module in model.named_modules() if isinstance(module, nn.Conv1d) and wide(module)}
    assert kept == set(names)


def wide(module: nn.Module) -> bool:
    return {parameter.dtype for parameter in module.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "cast", [lambda model: model, lambda model: model.to("meta").bfloat16(), lambda model: model.double()]
)
def test_what_has_no_16_bit_storage_is_not_probed(monkeypatch, cast):
    break_function(monkeypatch, "conv1d", off_by(1.1))
    assert find_broken_convolutions(cast(Speech())) == []


def test_a_layer_without_its_shapes_is_not_probed():
    """Torch initializes it at the first forward."""
    layers = nn.LazyConv1d(4, 3, dtype=torch.bfloat16), nn.LazyConvTranspose2d(4, 3, bias=False, dtype=torch.bfloat16)
    assert find_broken_convolutions(nn.Sequential(*layers)) == []


@pytest.mark.parametrize(
    ("layer", "multiplications"),
    [
        (nn.Conv1d(8, 6, 5, padding=4, dilation=2, groups=2, bias=False, device="meta"), 2 * 24),
        (nn.Conv2d(4, 6, 3, stride=2, padding=1, device="meta"), 2 * 5 * 5),
        (nn.Conv2d(4, 6, 3, padding="same", device="meta"), 2 * 5 * 5),
        (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", device="meta"), 2 * 5 * 5),
        (nn.Conv3d(4, 6, 2, stride=2, device="meta"), 2 * 3**3 + 2),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, device="meta"), 2 * 5 * 5),
        (
            nn.Conv1d(96, 96, 128, padding=64, groups=16, device="meta"),
            2 * 65,
        ),  # the smallest input that each weight meets
    ],
    ids=str,
)
def test_the_multiplications_of_a_probe_are_counted(layer, multiplications):
    """Against torch's own count, which is two operations for each."""
    computations = layer_computations(layer)
    with FlopCounterMode(display=False) as counter:
        for computation in computations:
            computation.compute(**{name: torch.zeros(shape) for name, shape in computation.shapes.items()})
    weights = layer.weight.numel()
    assert counter.get_total_flops() == 2 * weights * multiplications
    assert broken_convolutions._probe_cost(layer) == weights * (
        multiplications + len(computations) * broken_convolutions._COST_PER_WEIGHT
    )


def test_the_probes_of_a_model_are_bounded_and_begin_with_unusual_convolutions(monkeypatch):
    with torch.device("meta"):
        stem, grouped = nn.Conv2d(3, 8, 3, padding=1), nn.Conv1d(96, 96, 64, padding=32, groups=16)
        skipping, large = nn.Conv2d(16, 16, 1, stride=2), [nn.Conv2d(2560, size, 3) for size in (1280, 1281, 1282)]
    model = nn.Sequential(*large, stem, skipping, grouped).bfloat16()
    monkeypatch.setattr(
        broken_convolutions, "_probed_weight", lambda layer: layer.weight
    )  # without storage, as they are
    probed = []
    monkeypatch.setattr(broken_convolutions, "probe_layer", lambda layer, *args: probed.append(layer))
    assert find_broken_convolutions(model) == []
    assert probed == [stem, skipping, grouped]  # each of the large ones exceeds the bound
    probed.clear()
    monkeypatch.setattr(
        broken_convolutions,
        "MAX_COST",
        broken_convolutions._probe_cost(grouped) + broken_convolutions._probe_cost(skipping),
    )
    find_broken_convolutions(model)
    assert probed == [skipping, grouped]


def test_nothing_of_the_callers_changes(monkeypatch):
    model = Speech()
    cast_model(model)
    calls = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: calls.append(1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random, mode = torch.get_rng_state(), torch.is_grad_enabled()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            assert find_broken_convolutions(model) == []
            assert torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()
        with torch.inference_mode():
            assert find_broken_convolutions(model) == []
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(random, torch.get_rng_state()) and torch.is_grad_enabled() == mode
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not calls and all(p.grad is None for p in model.parameters())


def test_the_variable_is_named_where_there_is_amx(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True}, raising=False)
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in workarounds(cpu)
    assert "ONEDNN" not in workarounds(torch.device("cuda"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": False}, raising=False)
    assert "ONEDNN" not in workarounds(cpu)
