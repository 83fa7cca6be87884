"""Modules with parametrized weights: weight norm and spectral norm; orthogonal weights, which stay in FP32."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from hf_lowprec.casting import cast_model
from tests.support.models.inspection import BF16, bits, fp32_names

UNIT = 2.0**-8  # rounding to BF16 errs by at most this much of the value


@pytest.mark.parametrize("parametrize", [parametrizations.weight_norm, parametrizations.spectral_norm])
@pytest.mark.parametrize("make", [lambda: nn.Linear(6, 6), lambda: nn.Conv1d(6, 6, 3, padding=1)])
def test_parametrized_weights(parametrize: Any, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = parametrize(make()).eval()
    model = nn.Sequential(module, nn.LayerNorm(6))
    x = torch.randn(2, 6, 6)
    exact = copy.deepcopy(model)(x)
    names = set(bits(model))
    cast_model(model)
    assert set(bits(model)) == names
    # A spectral norm's power iteration is a norm, and goes on in FP32.
    assert {name for name in fp32_names(model) if not name.endswith(("._u", "._v"))} == {"1.weight", "1.bias"}
    out = model(x)
    out.sum().backward()
    # The weight is a quotient of products and norms of rounded numbers, about five roundings; the sums have six to 18
    # terms, and the norm divides by a deviation that is not much smaller than the values.
    assert out.dtype == BF16 and (out - exact).abs().max() <= 8 * UNIT * exact.abs().max()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in module.parameters())


class MatrixFunction(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.matrix_exp(self.weight).T


def with_child(layer: nn.Module) -> nn.Module:
    layer.add_module("child", nn.Dropout(0.0))
    return layer


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda: parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="matrix_exp"), "1"),
        (lambda: parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley"), "1"),
        (lambda: parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="householder"), "1"),
        (lambda: MatrixFunction(8, 8, bias=False), "1"),
        (lambda: parametrizations.orthogonal(with_child(nn.Linear(8, 8))), "1.parametrizations.weight.0"),
    ],
)
def test_functions_of_matrices_in_float32(make: Callable[[], nn.Module], kept: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), make(), nn.Linear(8, 8))
    exact, x = copy.deepcopy(model), torch.randn(2, 8)
    report = cast_model(model)
    assert report.kept.keys() == {kept} and "which torch does not in 16 bits" in report.kept[kept]
    out, expected = model(x), exact(x)
    assert out.dtype == BF16 and (out - expected).abs().max() <= 4 * UNIT * expected.abs().max()
    out.float().square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert (ours.grad - theirs.grad).norm() <= 8 * UNIT * theirs.grad.norm()
