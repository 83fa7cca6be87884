"""The inverse frequencies of rotary embeddings: kept, and recomputed where they were rounded."""

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

from hf_lowprec.casting import cast_model
from tests.support.every_architecture.tiny_configs import tiny_config
from tests.support.models import tiny_models
from tests.support.models.inspection import BF16, FP16, FP32, norm_modules, output_dtypes
from tests.support.models.tiny_models import ARCHITECTURES

THETA = {"rope_theta": 10000.0}
ROPE = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0},
    "llama3": {
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    },
}


def tiny(model_type: str) -> nn.Module:
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"no {model_type} in transformers {transformers.__version__}")
    return transformers.AutoModel.from_config(tiny_config(object, model_type))


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{
        name: lambda name=name: ARCHITECTURES[name].build(attention="eager")[0]
        for name in ("llama", "qwen3", "gemma2", "gemma3", "phi3", "gpt_neox")
    },
    **{
        name: lambda name=name: tiny_models.llama(rope_parameters={"rope_type": name, **ROPE[name], **THETA})[0]
        for name in ROPE
    },
    # These make them in their own way.
    **{name: lambda name=name: tiny(name) for name in ("gemma4_text", "parakeet_encoder", "dinov3_vit")},
}


@pytest.mark.parametrize("half", [BF16, FP16])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_rounded_frequencies_are_recomputed(name: str, back: bool, half: torch.dtype) -> None:
    model, fresh = MODELS[name](), MODELS[name]()
    model = model.to(half).float() if back else model.to(half)
    report = cast_model(model)
    buffers = {path: value for path, value in fresh.named_buffers() if "inv_freq" in path}
    assert not all(torch.equal(value, value.to(half).float()) for value in buffers.values())
    assert report.restored and set(report.restored) <= set(buffers) and not report.warnings
    assert "recomputed from the config" in str(report)
    assert all(torch.equal(model.get_buffer(path), value) for path, value in buffers.items())
    assert bool(report.upcast) == (not back)
    weights = {f"{path}.weight" for path in norm_modules(model) if name in ARCHITECTURES}
    assert weights.isdisjoint(report.upcast) if back else weights <= report.upcast.keys()
    assert not cast_model(model).restored


@pytest.mark.parametrize("values", [[1.1, 0.11, 0.011, 0.0011], [1.0, 0.5, 0.25, 0.125]])
def test_frequencies_of_other_origin_stay(values: list[float]) -> None:
    """There is a warning if they look rounded."""
    model, batch = tiny_models.llama()
    model.model.rotary_emb.inv_freq.copy_(torch.tensor(values))
    report = cast_model(model)
    assert torch.equal(model.model.rotary_emb.inv_freq, torch.tensor(values))
    assert not report.restored and len(report.warnings) == (values[0] == 1.0)
    assert "model.rotary_emb" in report.kept and "model.rotary_emb" not in report.boundaries
    assert output_dtypes(model, batch)["model.rotary_emb"] == {BF16}, "it follows the input"


def test_no_way_to_recompute() -> None:
    class AngleRotaryEmbedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(4) / 4), persistent=False)

    assert not cast_model(AngleRotaryEmbedding()).warnings
    for rounded in (AngleRotaryEmbedding().to(BF16), AngleRotaryEmbedding().to(BF16).float()):
        report = cast_model(rounded)
        assert rounded.inv_freq.dtype == FP32 and not report.restored
        assert len(report.warnings) == 1 and "inv_freq" in report.warnings[0]
        assert f"warning: {report.warnings[0]}" in str(report)
