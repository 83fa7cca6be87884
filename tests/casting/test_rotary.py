"""The inverse frequencies of rotary embeddings: kept, and recomputed where they were rounded."""

import pytest
import torch
from torch import nn

from hf_lowprec.casting import cast_model
from tests.support.models import tiny_models
from tests.support.models.inspection import BF16, FP16, FP32, norm_modules, output_dtypes
from tests.support.models.tiny_models import ARCHITECTURES

ROPE = {
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
}


class TestRotary:
    @pytest.mark.parametrize("half", [BF16, FP16])
    @pytest.mark.parametrize("back", [False, True])
    @pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "phi3", "gpt_neox"])
    def test_rounded_frequencies_are_recomputed(self, name: str, back: bool, half: torch.dtype) -> None:
        (model, batch), (fresh, _) = (ARCHITECTURES[name].build(attention="eager") for _ in range(2))
        model = model.to(half).float() if back else model.to(half)
        report = cast_model(model)
        buffers = {path: value for path, value in fresh.named_buffers() if "inv_freq" in path}
        assert buffers and set(report.restored) == set(buffers) and not report.warnings
        assert "recomputed from the config" in str(report)
        for path, value in buffers.items():
            assert torch.equal(model.get_buffer(path), value), path
        assert bool(report.upcast) == (not back)
        for path in norm_modules(model):
            assert model.get_submodule(path).weight.dtype == FP32
            assert (f"{path}.weight" in report.upcast) == (not back)
        model(**batch).loss.backward()
        assert not cast_model(model).restored

    @pytest.mark.parametrize("kind", ROPE)
    def test_scaled_frequencies(self, kind: str) -> None:
        model, fresh = (tiny_models.llama(rope_parameters=dict(ROPE[kind]))[0] for _ in range(2))
        exact = fresh.model.rotary_emb.inv_freq
        assert not torch.equal(exact, exact.to(BF16).float())
        report = cast_model(model.to(BF16))
        assert torch.equal(model.model.rotary_emb.inv_freq, exact) and not report.warnings

    def test_frequencies_that_are_not_rounded_stay(self) -> None:
        model, _ = tiny_models.llama()
        model.model.rotary_emb.inv_freq.mul_(1.1)
        value = model.model.rotary_emb.inv_freq.clone()
        report = cast_model(model)
        assert torch.equal(model.model.rotary_emb.inv_freq, value)
        assert not report.restored and not report.warnings

    def test_frequencies_of_other_origin_stay(self) -> None:
        model, _ = tiny_models.llama()
        model.model.rotary_emb.inv_freq.copy_(torch.tensor([1.0, 0.5, 0.25, 0.125]))
        report = cast_model(model)
        assert model.model.rotary_emb.inv_freq.tolist() == [1.0, 0.5, 0.25, 0.125]
        assert not report.restored and len(report.warnings) == 1

    def test_no_way_to_recompute(self) -> None:
        class AngleRotaryEmbedding(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(4) / 4), persistent=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x

        report = cast_model(nn.Sequential(AngleRotaryEmbedding(), nn.Linear(2, 2)))
        assert not report.warnings and not report.boundaries and report.kept.keys() == {"0"}
        for rounded in (AngleRotaryEmbedding().to(BF16), AngleRotaryEmbedding().to(BF16).float()):
            report = cast_model(rounded)
            assert rounded.inv_freq.dtype == FP32 and not report.restored
            assert len(report.warnings) == 1 and "inv_freq" in report.warnings[0]
            assert f"warning: {report.warnings[0]}" in str(report)

    def test_output_follows_the_input(self) -> None:
        model, batch = tiny_models.llama()
        report = cast_model(model)
        assert "model.rotary_emb" in report.kept and "model.rotary_emb" not in report.boundaries
        assert output_dtypes(model, batch)["model.rotary_emb"] == {BF16}
