"""`hf-lowprec export` calls `export_checkpoint`, and says in one line what is wrong with its input."""

import torch
from transformers import AutoModelForCausalLM

from hf_lowprec import fp32_state_dict
from tests.support.command_output import hf_lowprec, refused
from tests.support.training.tiny_trainer import trained


def run(*words):
    return hf_lowprec("export", *words)


def test_export(tmp_path):
    trainer = trained(tmp_path, optim="adamw_bf16_kahan", max_steps=2, save_strategy="steps", save_steps=2)
    result = run(tmp_path / "checkpoint-2", tmp_path / "out", "--max-shard-size", "40KB")
    assert result.exit_code == 0, result.output
    assert "21 tensors, float32; compensation or remainder added to 16 of them" in result.output
    assert (tmp_path / "out/model.safetensors.index.json").exists()
    expected = fp32_state_dict(trainer.model, trainer.optimizer)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert run(tmp_path / "checkpoint-2", tmp_path / "bf16", "--dtype", "bfloat16").exit_code == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bf16").dtype == torch.bfloat16


def test_errors_are_messages(tmp_path):
    assert "there is no checkpoint" in refused("export", tmp_path / "nothing", tmp_path / "out")
    words = ("export", tmp_path, tmp_path / "out", "--dtype", "float64")
    assert "'float64' is not one of 'float32', 'bfloat16'" in refused(*words)
