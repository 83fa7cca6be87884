"""`save_pretrained` on several ranks, and `export_checkpoint` of what they saved, give `fp32_state_dict` exactly."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hf_lowprec
from hf_lowprec.tools.inspection import inspect_checkpoints
from tests.distributed.test_same_bits import prepare, train
from tests.scripts.trainer_ranks import llama
from tests.support.processes.fsdp_on_cpu import allow_fsdp_on_cpu
from tests.support.processes.ranks import on_ranks, run_trainer
from tests.support.processes.shards import gathered

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def adapted_llama() -> torch.nn.Module:
    import peft

    return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))


def train_and_save(kind: str, format: str, folder: str, adapters: bool = False) -> None:
    """Write FOLDER/live by `save_pretrained`, the checkpoint FOLDER/state, and `fp32.pt`, the whole FP32 state dict."""
    allow_fsdp_on_cpu()
    accelerator, model, optimizer = prepare(kind, "kahan", format, adapted_llama if adapters else llama)
    train(accelerator, model, optimizer, range(3))
    before = [param.detach().clone() for param in model.parameters()]
    hf_lowprec.save_pretrained(model, optimizer, Path(folder, "live"), max_shard_size="50KB")
    written = "adapter_config.json" if adapters else "model.safetensors.index.json"
    if kind != "ddp" or accelerator.is_main_process:
        assert Path(folder, "live", written).exists()  # complete on every rank
    accelerator.save_state(str(Path(folder, "state")))
    full = hf_lowprec.fp32_state_dict(accelerator.unwrap_model(model), optimizer)
    full = {name: gathered(tensor) for name, tensor in full.items()}
    if accelerator.is_main_process:
        torch.save(full, Path(folder, "fp32.pt"))
    for param, was in zip(model.parameters(), before, strict=True):
        assert param.dtype == was.dtype
        assert torch.equal(*(tensor.to_local() if kind != "ddp" else tensor for tensor in (param, was)))
    if kind != "ddp":
        Path(folder, "a file").touch()
        kind_of_error, said = (OSError, "") if dist.get_rank() == 0 else (RuntimeError, "rank 0 could not save")
        with pytest.raises(kind_of_error, match=said):
            hf_lowprec.save_pretrained(model, optimizer, Path(folder, "a file", "below"))


# Three ranks hold uneven shards: 36 · 70 elements are no multiple of three rows.
@pytest.mark.parametrize(
    ("kind", "ranks", "format"),
    [
        ("fsdp2-checkpointing", 3, "sharded"),  # which adds a wrapper to names of parameters
        pytest.param("ddp", 2, "full", marks=pytest.mark.every_case),
        pytest.param("fsdp2", 2, "sharded", marks=pytest.mark.every_case),
        pytest.param("fsdp2", 2, "full", marks=pytest.mark.every_case),
        pytest.param("hsdp", 4, "sharded", marks=pytest.mark.every_case),
    ],
)
def test_an_accelerate_loop(tmp_path, kind, ranks, format):
    """`inspect` reads the state as well, and finds that all weights have moved and nothing is wrong."""
    on_ranks(train_and_save, ranks, kind, format, tmp_path)
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
    on_ranks(train_and_save, 2, "fsdp2", format, tmp_path, True)
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
    words = "--optim adamw_bf16_kahan --max_steps 3 --save_strategy steps --save_steps 3"
    environment = {"SAVED_TO": str(tmp_path / "live"), "ROWS": "16", "STATE_DICT_TYPE": f"{format}_STATE_DICT"}
    run_trainer(2, kind, tmp_path / "run", words, **environment)
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
