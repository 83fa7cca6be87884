"""Probes of layers: correct kernels pass on every path of this CPU, and kernels broken on purpose are found."""

from pathlib import Path

import pytest
import torch
from torch import nn

from hf_lowprec.monitor.layer_probes import TOLERANCE, layer_computations, probe_layer
from hf_lowprec.tools.doctor import layers as doctor
from tests.support.broken_kernels.planted import break_function, fill, off_by
from tests.support.processes import forkserver

SCRIPT = Path(__file__).parents[1] / "scripts" / "probe_layers.py"

pytestmark = pytest.mark.usefixtures("own_kernels")


def positional(groups: int = 16) -> nn.Conv1d:
    """A positional convolution, as speech models have it."""
    return nn.Conv1d(96, 96, 128, padding=64, groups=groups, device="meta")


def found(layer: nn.Module, **options) -> set[str]:
    return set(probe_layer(layer, **options).broken)


@pytest.mark.parametrize(
    ("where", "distort", "broken"),
    [
        ("output", off_by(1.1), "output"),
        ("output", off_by(0.05), "output"),
        ("output", off_by(1.1, (slice(None), slice(6, 12))), "output"),  # one group of sixteen
        ("output", off_by(0.05, (slice(None), slice(6, 12))), "output"),
        ("output", off_by(1.1, (1,)), "output"),  # the second sample
        ("output", off_by(1.1, (..., -1)), "output"),  # the last position
        ("output", fill(float("nan"), (1, 17, 5)), "output"),
        ("output", fill(0.0), "output"),
        ("input", off_by(1.1), "grad_input"),
        ("input", off_by(0.05), "grad_input"),
        ("input", fill(float("nan"), (0, 3, 0)), "grad_input"),
        ("weight", off_by(1.1), "grad_weight"),
        ("weight", off_by(0.05), "grad_weight"),
        ("weight", off_by(0.05, (slice(0, 6),)), "grad_weight"),
        ("weight", off_by(1.1, (..., 127)), "grad_weight"),  # one tap of the kernel
        ("weight", fill(float("inf"), (95, 5, 127)), "grad_weight"),
        ("bias", off_by(0.1), "grad_bias"),
    ],
)
def test_a_broken_convolution_is_found(monkeypatch, where, distort, broken):
    assert not found(positional())
    break_function(monkeypatch, "conv1d", distort, where)
    assert found(positional()) == {broken}


def test_a_fault_of_one_shape_is_that_shapes(monkeypatch):
    break_function(monkeypatch, "conv1d", off_by(1.1), only=lambda values: values[1].shape == (96, 6, 128))
    assert found(positional()) and not found(positional(groups=8))


def test_a_fault_of_one_input_size_is_found_with_that_size(monkeypatch):
    layer = nn.Conv3d(3, 8, 4, stride=4, device="meta")
    break_function(monkeypatch, "conv3d", off_by(1.1), only=lambda values: values[0].shape[-1] == 20)
    assert not found(layer) and found(layer, input_shape=(2, 3, 20, 20, 20))


def test_patches_are_probed_one_at_a_time_too(monkeypatch):
    break_function(monkeypatch, "conv3d", off_by(1.1), only=lambda values: values[0].shape[-1] == 4)
    assert found(nn.Conv3d(3, 8, 4, stride=4, device="meta"))


def test_a_fault_of_one_memory_format_is_found(monkeypatch):
    break_function(monkeypatch, "conv1d", off_by(1.1), only=lambda values: not values[0].is_contiguous())
    assert found(positional())


@pytest.mark.parametrize(
    ("function", "layer"),
    [
        ("conv2d", nn.Conv2d(3, 8, 3, padding="same", padding_mode="reflect", device="meta")),
        ("conv_transpose1d", nn.ConvTranspose1d(4, 6, 5, stride=2, output_padding=1, groups=2, device="meta")),
        ("conv_transpose2d", nn.ConvTranspose2d(4, 6, 5, bias=False, device="meta")),
        ("conv_transpose3d", nn.ConvTranspose3d(4, 6, 2, stride=2, device="meta")),
        ("linear", nn.Linear(16, 8, device="meta")),
    ],
)
@pytest.mark.parametrize(("where", "broken"), [("output", "output"), ("input", "grad_input")])
def test_every_kind_of_layer_is_probed(monkeypatch, function, layer, where, broken):
    assert not found(layer)
    break_function(monkeypatch, function, off_by(0.05), where)
    assert found(layer) == {broken}


def test_a_layer_that_is_not_known_is_not_probed():
    assert probe_layer(nn.GELU()) is None


def test_the_format_of_16_bits_may_be_the_other():
    assert not found(positional(), dtype=torch.float16)


@pytest.mark.parametrize("instructions", ["AVX512_CORE_BF16", "AVX2"])
def test_correct_kernels_are_within_the_tolerance(instructions):
    """The first is the way out where there is AMX. With the second oneDNN has no BF16: torch's own kernels run.

    They round each of the 128 taps of a convolution: √(129/2)/√3 = 4.6 units of 2⁻⁸, if all of them add up numbers.
    """
    done = forkserver.run(SCRIPT, [], timeout=120, ONEDNN_MAX_CPU_ISA=instructions)
    assert done.returncode == 0, done.stderr
    count, unsupported, worst = done.stdout.split()
    assert (int(count), int(unsupported)) == (len(doctor.layers()) + len(doctor.functions()), 0)
    assert float(worst) <= 4.6 * 2**-8 < 0.6 * TOLERANCE


def test_a_layer_is_probed_under_inference_mode():
    layer = nn.Conv1d(4, 2, 3)
    expected = probe_layer(layer).errors
    with torch.inference_mode():
        assert probe_layer(layer).errors == expected
        assert probe_layer(nn.LayerNorm(4)) and probe_layer(nn.Embedding(8, 4))


def test_autocast_and_reduced_precision_do_not_reach_the_reference():
    layer = nn.Linear(64, 64, device="meta")
    expected = probe_layer(layer).errors
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert probe_layer(layer).errors == expected


def test_every_weight_of_a_padded_convolution_is_probed():
    (computation,) = layer_computations(positional())
    tensors = {name: torch.ones(shape) for name, shape in computation.shapes.items()}
    weight = tensors["weight"].requires_grad_()
    (gradient,) = torch.autograd.grad(computation.compute(**tensors).sum(), weight)
    assert (gradient > 0).all()
