"""What a cast says about tables of numbers and parameters of one number that it rounds."""

import re

import pytest
import torch
from torch import Tensor, nn

from hf_lowprec.casting import cast_model
from tests.support.models.inspection import BF16, FP16, FP32

ROUNDED = torch.tensor([1.0, 1001.0, 3.3])
EXACT = torch.tensor([1.0, 1000.0, 3.25])  # at most 8 significant bits


class Scaled(nn.Module):
    def __init__(self, name: str, tensor: Tensor) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        if isinstance(tensor, nn.Parameter):
            self.register_parameter(name, tensor)
        else:
            self.register_buffer(name, tensor)


def parameter(value: float | list[float]) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("alphas_cumprod", torch.linspace(0.9991, 0.0047, 10)),
        ("sigmas", torch.full((2, 5), 14.6123)),
        ("freqs", torch.full((4, 3), 1 / 3)),
        ("class_weights", ROUNDED),
        ("table", ROUNDED),
        ("num_updates", torch.tensor(4097.0)),
        ("logit_scale", parameter(2.6592)),
        ("temperature", parameter([0.07])),
    ],
)
def test_are_named_with_what_keeps_them(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([Scaled(name, tensor), Scaled(name, tensor.clone())])})
    if isinstance(tensor, nn.Parameter):
        model["blocks"][1] = Scaled(name, nn.Parameter(tensor.detach().clone()))
    before = tensor.detach().clone()
    (warning,) = cast_model(model, dtype).warnings
    assert warning.startswith("2 tensors of numbers lose digits in ")
    entries = re.search(r"keep_fp32=\['([^']*)'\]", warning)
    assert entries is not None and entries[1] == f"blocks.*.{name}"
    assert f'"keep_fp32={entries[1]}"' in warning
    assert cast_model(model, dtype).warnings == ()

    tensor.data = before
    kept = nn.Sequential(Scaled(name, tensor))
    assert cast_model(nn.ModuleDict({"blocks": kept}), dtype, keep_fp32=entries[1]).warnings == ()
    found = getattr(kept[0], name)
    assert found.dtype == FP32 and torch.equal(found, before)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("class_weights", EXACT),
        ("num_updates", torch.tensor(0.0)),
        ("steps", torch.tensor(4097)),  # an integer is not cast
        ("logit_scale", parameter(2.625)),
        ("scale", parameter([0.1, 0.2])),  # weights of a layer
        ("bias", parameter([0.1])),  # of a regression
        ("embed_positions", torch.rand(5, 5)),
        ("weights", torch.rand(5, 5)),  # sines of positions
        ("mask", torch.rand(5, 5)),
        ("scale", torch.empty(3, dtype=BF16, device="meta")),
        ("weight", torch.empty(3, 3, device="meta")),
    ],
)
def test_nothing_is_said_where_nothing_is_lost(name: str, tensor: Tensor) -> None:
    assert cast_model(Scaled(name, tensor)).warnings == ()


def test_numbers_without_values_are_named_before_they_get_them() -> None:
    """On the meta device a table is filled after the cast, in the dtype that the cast has given it."""
    with torch.device("meta"):
        model = nn.Sequential(*(Scaled("freqs", torch.empty(4)) for _ in range(2)))
    (warning,) = cast_model(model).warnings
    assert warning.startswith("2 tensors of numbers on the meta device will be rounded to bfloat16")
    assert "cast_model(model, keep_fp32=['*.freqs'])" in warning

    with torch.device("meta"):
        model = nn.Sequential(*(Scaled("freqs", torch.empty(4)) for _ in range(2)))
    assert cast_model(model, keep_fp32=["*.freqs"]).warnings == ()
    assert model.to_empty(device="cpu")[1].freqs.dtype == FP32
