"""Modules whose own code needs FP32, and tables of frequencies outside rotary embeddings."""

import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_lowprec.casting import cast_model, uncast_model
from hf_lowprec.casting.listed_classes import (
    CLASSES_CALLED_WITH_FP32,
    CLASSES_COMPUTING_IN_FP32,
    CLASSES_RETURNING_FP32,
)
from tests.support.every_architecture.tiny_configs import tiny_config
from tests.support.models.inspection import BF16, FP32

MODELS = (
    *("autoformer", "blip_2", "bros", "clvp", "fastspeech2_conformer", "fnet", "hiera", "minimax_m3_vl", "mra"),
    *("slanet", "timesfm", "tipsv2", "xlnet", "xlstm", "sam", "sam_hq", "sam2", "sam2_video", "sam3_tracker"),
    *("sam3_tracker_video", "edgetam", "edgetam_video"),
)


class TestExceptions:
    def test_inputs(self) -> None:
        class HieraPatchEmbeddings(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.projection = nn.Conv2d(3, 4, 2)

            def forward(self, pixels: torch.Tensor) -> torch.Tensor:
                mask = torch.ones(pixels.shape[-2:])
                return self.projection(pixels * mask)

        model = nn.Sequential(nn.Conv2d(3, 3, 1), HieraPatchEmbeddings())
        report = cast_model(model)
        assert set(report.inputs) == {"", "1.projection"} and model[1].projection.weight.dtype == BF16
        model(torch.randn(2, 3, 4, 4)).sum().backward()
        assert model[1].projection.weight.grad is not None
        assert not cast_model(model).changed
        uncast_model(model)
        assert model(torch.randn(2, 3, 4, 4)).dtype == FP32
        kept = nn.Sequential(nn.Conv2d(3, 3, 1), HieraPatchEmbeddings())
        assert "1.projection" not in cast_model(kept, keep_fp32="1").inputs

    def test_inputs_that_follow_the_dtype_of_a_norm(self) -> None:
        class Decoder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(4, 4)
                self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), nn.Linear(4, 4)])

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.first(x).to(next(iter(self.blocks.parameters())).dtype)
                for block in self.blocks:
                    x = x.float() + block(x)
                return x

        model = Decoder()
        report = cast_model(model)
        assert set(report.inputs) == {"", "first", "blocks.0", "blocks.1"}
        model(torch.randn(2, 4)).sum().backward()
        assert model.blocks[1].weight.grad is not None

    @pytest.mark.parametrize("name", [*CLASSES_COMPUTING_IN_FP32, *CLASSES_CALLED_WITH_FP32, *CLASSES_RETURNING_FP32])
    def test_every_name_is_a_class_of_transformers(self, name: str) -> None:
        name, _, child = name.partition(".")
        models = [m for m in MODELS if name.lower().startswith(m.replace("_", ""))]
        assert models, name
        model_type = max(models, key=len)
        if model_type.replace("_2", "-2") not in transformers.CONFIG_MAPPING:
            pytest.skip(f"no {model_type} in transformers {transformers.__version__}")
        config_class: Any = transformers.CONFIG_MAPPING[model_type.replace("_2", "-2")]
        module = inspect.getmodule(config_class)
        assert module is not None and module.__file__ is not None
        with open(module.__file__.replace("configuration_", "modeling_"), encoding="utf-8") as source:
            _, found, code = source.read().partition(f"class {name}(")
        assert found and (not child or f"self.{child} = " in code.partition("\nclass ")[0])


class Positions(nn.Module):
    """Sines of positions, which go by an FP32 table and come in the dtype of the states."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        frequencies = 1 / 10000 ** (torch.arange(0, config.hidden_size, 2) / config.hidden_size)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.inv_freq: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[1])[:, None] * self.inv_freq
        return torch.cat((angles.sin(), angles.cos()), -1).to(x.dtype)


class TestFrequencies:
    def test_of_any_module(self) -> None:
        positions = Positions(transformers.LlamaConfig(hidden_size=32))
        exact = positions.inv_freq.clone()
        model = nn.Sequential(nn.Linear(32, 32), positions)
        report = cast_model(model)
        assert torch.equal(positions.inv_freq, exact) and "1" in report.kept and not report.boundaries
        assert model(torch.randn(1, 4, 32)).dtype == BF16

    def test_of_fourier_features(self) -> None:
        class GaussianFourierProjection(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(1, 4) * 16, requires_grad=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return (x[:, None] @ self.weight).sin()

        features = GaussianFourierProjection()
        exact = features.weight.clone()
        model = nn.Sequential(features, nn.Linear(4, 4))
        report = cast_model(model)
        assert torch.equal(features.weight, exact) and "Fourier" in report.kept["0"] and report.boundaries == ("0",)
        assert model(torch.rand(3, dtype=BF16)).dtype == BF16

    def test_are_recomputed_from_the_config(self) -> None:
        positions = Positions(transformers.LlamaConfig(hidden_size=32))
        exact = positions.inv_freq.clone()
        report = cast_model(positions.to(BF16))
        assert positions.inv_freq.dtype == FP32 and torch.equal(positions.inv_freq, exact)
        assert report.restored == ("inv_freq",) and not report.warnings

    @pytest.mark.parametrize("model_type", ["gemma4_text", "parakeet_encoder", "dinov3_vit"])
    def test_of_models_that_make_them_in_their_own_way(self, model_type: str) -> None:
        if model_type not in transformers.CONFIG_MAPPING:
            pytest.skip(f"no {model_type} in transformers {transformers.__version__}")
        config = tiny_config(object, model_type)
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config)
        exact = {name: value.clone() for name, value in model.named_buffers() if "inv_freq" in name}
        assert exact and not all(torch.equal(value, value.to(BF16).float()) for value in exact.values())
        report = cast_model(model.to(BF16))
        assert not report.warnings and set(report.restored) <= set(exact)
        assert all(torch.equal(model.get_buffer(name), value) for name, value in exact.items())
