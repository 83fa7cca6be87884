"""`cast_model` on modules of torch and of the user's own: norms, buffers, frozen and quantized parameters."""

import copy

import pytest
import torch
from torch import nn

from hf_lowprec.casting import cast_model
from tests.support.models.inspection import BF16, FP32, assert_same_bits, bits, fp32_names, gradient_dtypes
from tests.support.models.norm_layers import (
    Derived,
    EncoderStableLayerNorm,
    FrozenBatchNorm2d,
    LayerNormPerHead,
    PreLayerNormModel,
    ScaleLayerNorm2d,
    ScaleRMSNorm,
    ScaleRMSNormGated,
)


class TestPlainModules:
    def test_norm_first_with_fp32_input(self) -> None:
        norm = nn.LayerNorm(8)
        model = nn.Sequential(norm, nn.Linear(8, 4))
        x = torch.randn(5, 8, requires_grad=True)
        expected = copy.deepcopy(norm)(x).detach().to(BF16)
        cast_model(model)
        assert torch.equal(norm(x), expected)
        model(x).sum().backward()
        assert x.grad is not None and x.grad.dtype == FP32
        assert gradient_dtypes(norm) == {FP32} and gradient_dtypes(model[1]) == {BF16}

    @pytest.mark.parametrize(
        "norm",
        [
            nn.LayerNorm(4),
            nn.GroupNorm(2, 4),
            nn.RMSNorm(4),
            nn.BatchNorm1d(4),
            nn.BatchNorm1d(4, affine=False),
            nn.SyncBatchNorm(4),
            nn.InstanceNorm1d(4, affine=True),
            ScaleRMSNorm(4),
            ScaleRMSNormGated(4),
            ScaleLayerNorm2d(4),
            Derived(4),
            FrozenBatchNorm2d(4),
            LayerNormPerHead(4),
        ],
        ids=lambda norm: type(norm).__name__,
    )
    def test_kinds_of_norm(self, norm: nn.Module) -> None:
        model = nn.Sequential(nn.Linear(4, 4), norm.eval(), nn.Linear(4, 4))
        original = bits(norm)
        report = cast_model(model)
        assert_same_bits(bits(norm), original)
        assert set(report.boundaries) == {"1"}
        if not isinstance(norm, nn.SyncBatchNorm):
            x = torch.randn(2, 4, 4) if isinstance(norm, nn.InstanceNorm1d) else torch.randn(2, 4)
            assert norm(x.to(BF16)).dtype == BF16

    def test_keyword_inputs(self) -> None:
        norm = ScaleRMSNormGated(4)
        cast_model(norm)
        x = torch.randn(2, 4, dtype=BF16)
        assert norm(x=x, gate=x).dtype == BF16

    def test_norm_in_name_only(self) -> None:
        model = nn.Sequential(EncoderStableLayerNorm(4), PreLayerNormModel(4, 4))
        report = cast_model(model)
        assert fp32_names(model) == {"0.layer_norm.weight", "0.layer_norm.bias"}
        assert set(report.boundaries) == {"0.layer_norm"}
        assert model(torch.randn(2, 4, dtype=BF16)).dtype == BF16

    def test_norm_without_tensors(self) -> None:
        model = nn.Sequential(nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 4))
        report = cast_model(model)
        assert not report.boundaries and not report.kept
        assert model(torch.randn(2, 4, dtype=BF16)).dtype == BF16

    def test_buffers(self) -> None:
        model = nn.Linear(2, 2)
        values = {
            "persistent": torch.randn(3),
            "transient": torch.randn(3),
            "wide": torch.randn(3, dtype=torch.float64),
            "mask": torch.ones(3, dtype=torch.bool),
            "index": torch.arange(3),
            "phase": torch.randn(3, dtype=torch.complex64),
            "eighth": torch.randn(3).to(torch.float8_e4m3fn),
        }
        for name, value in values.items():
            model.register_buffer(name, value.clone(), persistent=name != "transient")
        keys = list(model.state_dict())
        report = cast_model(model)
        assert list(model.state_dict()) == keys and "transient" not in keys
        for name, value in values.items():
            cast = name in ("persistent", "transient", "wide")
            expected = value.to(BF16) if cast else value
            assert getattr(model, name).dtype == expected.dtype
            if name != "eighth":
                assert torch.equal(getattr(model, name), expected)
        assert set(report.untouched) == {"mask", "index", "phase", "eighth"}

    def test_quantized_parameters(self) -> None:
        model = nn.Linear(2, 2)
        model.packed = nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False)
        model.tiny = nn.Parameter(torch.ones(4).to(torch.float8_e5m2), requires_grad=False)
        cast_model(model)
        assert model.packed.dtype == torch.uint8 and model.tiny.dtype == torch.float8_e5m2

    def test_frozen_parameters(self) -> None:
        model = nn.Linear(2, 2).requires_grad_(False)
        cast_model(model)
        assert model.weight.dtype == BF16 and not model.weight.requires_grad

    def test_memory_format(self) -> None:
        model = nn.Conv2d(3, 4, 3)
        model.weight.data = model.weight.data.contiguous(memory_format=torch.channels_last)
        cast_model(model)
        assert model.weight.is_contiguous(memory_format=torch.channels_last)
