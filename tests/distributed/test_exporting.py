"""`save_pretrained` on several ranks, and `export_checkpoint` of what they saved, give `fp32_state_dict` exactly."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hf_lowprec
from hf_lowprec.tools.inspection import inspect_checkpoints
from tests.scripts.trainer_ranks import llama
from tests.support.processes.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


# Three ranks hold uneven shards: 36 · 70 elements are no multiple of three rows.
@pytest.mark.parametrize(
    ("kind", "ranks", "format"),
    [
        ("fsdp2", 3, "sharded"),
        pytest.param("ddp", 2, "full", marks=pytest.mark.every_case),
        pytest.param("fsdp2", 2, "sharded", marks=pytest.mark.every_case),
        pytest.param("fsdp2", 2, "full", marks=pytest.mark.every_case),
        pytest.param("hsdp", 4, "sharded", marks=pytest.mark.every_case),
    ],
)
def test_an_accelerate_loop(tmp_path, kind, ranks, format):
    """`inspect` reads the state as well, and finds that all weights have moved and nothing is wrong."""
    run_ranks("exported_on_ranks.py", ranks, kind, format, str(tmp_path))
    report = hf_lowprec.export_checkpoint(tmp_path / "state", tmp_path / "out", max_shard_size="50KB")
    llama().save_pretrained(tmp_path / "start")
    inspected = inspect_checkpoints(str(tmp_path / "start"), str(tmp_path / "state"))
    assert inspected.findings == [] and all(row["moved"] > 0 for row in inspected.parts)
    expected = torch.load(tmp_path / "fp32.pt")
    assert report.refined == len([name for name in expected if "norm" not in name])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "live")
    model.load_state_dict(expected)
    tokens = torch.arange(32)[None]
    logits = model(tokens).logits
    for folder in ("live", "out"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        found = loaded.state_dict()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == torch.float32 and torch.equal(found[name], tensor), (folder, name)
        assert torch.equal(loaded(tokens).logits, logits)


@pytest.mark.parametrize("format", ["sharded", pytest.param("full", marks=pytest.mark.every_case)])
def test_sharded_adapters(tmp_path, format):
    pytest.importorskip("peft")
    run_ranks("exported_on_ranks.py", 2, "fsdp2", format, str(tmp_path), "adapters")
    assert hf_lowprec.export_checkpoint(tmp_path / "state", tmp_path / "out").refined == 8
    expected = torch.load(tmp_path / "fp32.pt")
    for folder in ("live", "out"):
        found = load_file(tmp_path / folder / "adapter_model.safetensors")
        assert len(found) == 8
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name.replace(".weight", ".default.weight")]), (folder, name)
    texts = [(tmp_path / folder / "adapter_config.json").read_text() for folder in ("out", "live")]
    texts[1] = texts[1].replace("FSDPLlama", "Llama")  # PEFT saves the class that FSDP2 has made
    found, expected = map(json.loads, texts)
    for config in (found, expected):
        config["target_modules"].sort()  # a set, whose order differs between processes
    assert found == expected


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        ("ddp", "FULL"),
        pytest.param("fsdp2", "SHARDED", marks=pytest.mark.every_case),
        pytest.param("fsdp2", "FULL", marks=pytest.mark.every_case),
    ],
)
def test_a_run_of_trainer(tmp_path, kind, format):
    """Its checkpoint, exported, is what `save_pretrained` writes; `Trainer.save_model` writes the stored weights."""
    words = ["--optim", "adamw_bf16_kahan", "--max_steps", "3", "--save_strategy", "steps", "--save_steps", "3"]
    words += ["--per_device_train_batch_size", "2", "--output_dir", str(tmp_path / "run"), "--learning_rate", "1e-2"]
    environment = {"SAVED_TO": str(tmp_path / "live"), "ROWS": "16", "STATE_DICT_TYPE": f"{format}_STATE_DICT"}
    run_ranks("trainer_ranks.py", 2, kind, *words, **environment)
    checkpoint = tmp_path / "run/checkpoint-3"
    assert (checkpoint / "pytorch_model_fsdp_0").is_dir() == (format == "SHARDED")
    assert hf_lowprec.export_checkpoint(checkpoint, tmp_path / "out").refined > 0
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "live" / name).read_bytes(), name

    stored, exact = (load_file(tmp_path / folder / "model.safetensors") for folder in ("live-stored", "live"))
    assert stored.keys() == exact.keys()
    for name, tensor in stored.items():
        assert tensor.dtype == (torch.float32 if "norm" in name else torch.bfloat16)
        # The compensation is at most half a spacing, 2⁻⁸ of the weight, and one rounding of its own more.
        assert ((exact[name] - tensor.float()).abs() <= (2**-8 + 2**-15) * tensor.float().abs()).all(), name
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "live-stored").dtype == torch.bfloat16
    assert (tmp_path / "live-stored/tokenizer_config.json").exists()
    assert (checkpoint / "model.safetensors").exists() == (format == "FULL"), "checkpoints are as configured"
