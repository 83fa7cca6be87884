"""What a cast says about numbers that it rounds, and about tensors that arrive rounded; nothing if nothing is lost."""

import copy
import json
import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_lowprec.casting import cast_model
from tests.support.models import tiny_models
from tests.support.models.inspection import BF16, FP16, FP32, NORM_PATH
from tests.support.models.quantized_models import quantize_linears

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
    assert warning.startswith("2 tensors lose digits in ")
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
        model, kept = (nn.Sequential(*(Scaled("freqs", torch.empty(4)) for _ in range(2))) for _ in range(2))
    (warning,) = cast_model(model).warnings
    assert warning.startswith("2 tensors on the meta device will be rounded to bfloat16")
    assert "cast_model(model, keep_fp32=['*.freqs'])" in warning
    assert cast_model(kept, keep_fp32=["*.freqs"]).warnings == ()
    assert kept.to_empty(device="cpu")[1].freqs.dtype == FP32


SAID = (
    r"tensors that are kept in FP32 \(.*Norm.*\) were loaded in bfloat16\..*from_pretrained\(…, dtype=torch\.float32\)"
)


GAIN = r"split weights and Kahan summation start from the FP32 values of (\d+) trainable tensors"


def norms(tensors: Any) -> dict[str, torch.Tensor]:
    return {n: t.detach().clone() for n, t in dict(tensors).items() if NORM_PATH.search(n.rpartition(".")[0])}


@pytest.fixture(scope="module")
def trained() -> Any:
    """A classifier whose norms are no longer ones."""
    model, _ = tiny_models.bert()
    cast_model(model)
    with torch.no_grad():
        for name in norms(model.named_parameters()):
            parameter = model.get_parameter(name)
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)), alpha=0.1)
    return model


def test_a_saved_model_that_is_loaded_as_its_config_says(trained, tmp_path):
    """The default rounds every norm weight that has learnt; the way that the message names brings all bits back."""
    trained.save_pretrained(tmp_path)
    learnt = norms(trained.named_parameters())
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in norms(load_file(tmp_path / "model.safetensors")).values()} == {FP32}
    rounded = type(trained).from_pretrained(tmp_path)
    report = cast_model(rounded)
    found = norms(rounded.named_parameters())
    differ = sum(int((found[name] != tensor).sum()) for name, tensor in learnt.items())
    assert differ > 0.9 * sum(tensor.numel() for tensor in learnt.values())
    assert len(report.warnings) == 1
    assert re.search(SAID, report.warnings[0])
    assert f"warning: {report.warnings[0]}" in str(report)
    assert report.warnings[0].startswith(f"{len(learnt)} tensors")

    exact = type(trained).from_pretrained(tmp_path, dtype=FP32)
    assert cast_model(exact).warnings == ()
    for name, tensor in trained.state_dict().items():
        assert exact.state_dict()[name].dtype == tensor.dtype, name
        assert torch.equal(exact.state_dict()[name], tensor), name


@pytest.mark.parametrize("place", ["folder", "shards", "cache", "base"])
def test_a_checkpoint_of_16_bits_loses_nothing(trained, tmp_path, monkeypatch, place):
    model = copy.deepcopy(trained).to(BF16)
    folder = tmp_path
    if place == "cache":  # of the hub
        folder = tmp_path / "models--somebody--something" / "snapshots" / "0123"
        model.save_pretrained(folder)
        (tmp_path / "models--somebody--something" / "refs").mkdir()
        (tmp_path / "models--somebody--something" / "refs" / "main").write_text("0123")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    elif place == "base":
        model.bert.save_pretrained(tmp_path)
    else:
        model.save_pretrained(tmp_path, max_shard_size="20KB" if place == "shards" else "1GB")
    assert place != "shards" or len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = type(model).from_pretrained(folder, dtype=BF16)
    if place == "cache":
        loaded.name_or_path = "somebody/something"
    report = cast_model(loaded)
    assert {name for name in report.upcast if "Norm" in name} == norms(loaded.named_parameters()).keys()
    assert report.warnings == ()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_an_fp32_checkpoint_that_is_loaded_in_16_bits(trained, tmp_path, dtype):
    copy.deepcopy(trained).float().save_pretrained(tmp_path)
    loaded = type(trained).from_pretrained(tmp_path, dtype=dtype)
    (warning,) = cast_model(loaded, dtype).warnings
    assert re.search(SAID.replace("bfloat16", str(dtype).removeprefix("torch.")), warning)
    assert re.search(GAIN, warning).group(1) == str(sum(parameter.dtype == dtype for parameter in loaded.parameters()))


class WithoutNorms(PreTrainedModel):
    """A model in which a cast keeps nothing in FP32."""

    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.post_init()


def test_trainable_weights_of_an_fp32_checkpoint_that_is_loaded_in_16_bits(tmp_path):
    model = WithoutNorms(PreTrainedConfig())
    for param in model.parameters():
        nn.init.normal_(param)  # zeros have no low digits
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=BF16)
    report = cast_model(loaded)
    (warning,) = report.warnings
    weights = [name for name, _ in loaded.named_parameters()]
    assert f"{len(weights)} trainable tensors ({weights[0]}, …) were loaded in bfloat16, but their" in warning
    assert "from_pretrained(…, dtype=torch.float32)" in warning
    assert re.search(GAIN, warning).group(1) == str(len(weights))
    assert f"warning: {warning}" in str(report)
    assert cast_model(loaded).warnings == (), "said once"

    exact = type(model).from_pretrained(tmp_path, dtype=FP32)
    report = cast_model(exact)
    assert set(report.low_bits) == set(weights), "the line that the warning names gives what it promises"
    assert report.warnings == ()
    assert cast_model(exact).warnings == (), "they are 16-bit now because they were cast"


def test_frozen_weights_and_adapters_on_them_gain_nothing(tmp_path):
    model = WithoutNorms(PreTrainedConfig())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=BF16).requires_grad_(False)
    loaded.adapter = nn.Linear(4, 4).to(BF16)  # not in the checkpoint
    assert cast_model(loaded).warnings == ()


def test_quantized_models_are_loaded_in_16_bits_as_the_guide_says(trained, tmp_path):
    copy.deepcopy(trained).float().save_pretrained(tmp_path)
    loaded = quantize_linears(type(trained).from_pretrained(tmp_path, dtype=BF16), skip="classifier")
    report = cast_model(loaded)
    assert any("Norm" in name for name in report.upcast)
    assert report.warnings == ()


@pytest.mark.parametrize("place", ["16 bits on disk", "no checkpoint", "damaged"])
def test_weights_whose_checkpoint_has_no_more_digits(tmp_path, place):
    model = WithoutNorms(PreTrainedConfig()).to(BF16)
    if place != "no checkpoint":
        model.save_pretrained(tmp_path)
        model = type(model).from_pretrained(tmp_path)
    if place == "damaged":
        (tmp_path / "model.safetensors").unlink()  # the weights are mapped from this file
        (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert cast_model(model).warnings == ()


def test_names_of_an_older_checkpoint_are_not_taken_for_16_bits(trained, tmp_path):
    """As bert-base-uncased has them: gamma and beta."""
    copy.deepcopy(trained).float().save_pretrained(tmp_path)
    old = {n.replace("Norm.weight", "Norm.gamma"): t for n, t in load_file(tmp_path / "model.safetensors").items()}
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert len(cast_model(type(trained).from_pretrained(tmp_path, dtype=BF16)).warnings) == 1


def test_norms_as_they_begin_and_norms_of_another_origin():
    fresh, _ = tiny_models.bert()
    assert cast_model(fresh.to(BF16)).warnings == ()
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to(BF16)
    with torch.no_grad():
        model[1].weight.fill_(0.75)
    assert len(cast_model(model).warnings) == 1
    assert not cast_model(model).warnings, "said once: it is FP32 now"
    with torch.device("meta"):
        assert cast_model(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to(BF16)).warnings == ()


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, (10).to_bytes(8, "little") + b'{"a": 1}  '])
def test_a_damaged_checkpoint_is_no_error(trained, tmp_path, damage):
    model = copy.deepcopy(trained).to(BF16)
    (tmp_path / "model.safetensors").write_bytes(damage)
    model.name_or_path = str(tmp_path)
    assert len(cast_model(model).warnings) == 1
