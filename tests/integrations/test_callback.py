"""`LowPrecisionCallback`, given by the user or added by the optimizer's name: its cast, report and log."""

import pytest
import torch
from transformers import Trainer

import hf_lowprec
from tests.integrations.tiny_training import arguments, assert_pure_bf16, counting_data, llama, trained


def test_the_callback_alone_trains_bf16_with_any_optimizer(tmp_path, capsys):
    callback = hf_lowprec.LowPrecisionCallback(keep_fp32=["lm_head"])
    trainer = trained(tmp_path, callbacks=[callback], optim="adamw_torch", bf16=True, max_steps=2)
    assert trainer.model.lm_head.weight.dtype == torch.float32
    assert trainer.model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert trainer.accelerator.mixed_precision == "no"
    assert "not of hf_lowprec" in capsys.readouterr().out


def test_the_users_callback_replaces_ours(tmp_path, capsys):
    callback = hf_lowprec.LowPrecisionCallback(report=False, log_lost_updates=False)
    trainer = trained(tmp_path, callbacks=[callback], optim="adamw_bf16_kahan", max_steps=4)
    ours = [cb for cb in trainer.callback_handler.callbacks if isinstance(cb, hf_lowprec.LowPrecisionCallback)]
    assert ours == [callback]
    assert "hf_lowprec" not in capsys.readouterr().out
    assert all("lost_updates" not in entry for entry in trainer.state.log_history)


def test_a_callback_class_is_accepted(tmp_path):
    trainer = trained(tmp_path, callbacks=[hf_lowprec.LowPrecisionCallback], optim="adamw_bf16_kahan", max_steps=1)
    assert_pure_bf16(trainer.model)


def test_a_callback_added_too_late_says_so(tmp_path):
    trainer = Trainer(model=llama(), args=arguments(tmp_path), train_dataset=counting_data())
    trainer.add_callback(hf_lowprec.LowPrecisionCallback())
    with pytest.raises(RuntimeError, match=r"pass it as Trainer\(callbacks="):
        trainer.train()


def test_one_report_and_the_lost_updates_in_the_log(tmp_path, capsys):
    trainer = trained(tmp_path, optim="adamw_bf16_kahan", optim_args="rounding=nearest", learning_rate=1e-6)
    out = capsys.readouterr().out
    assert out.count("hf_lowprec: bfloat16 training of LlamaForCausalLM") == 1
    assert "weights nearest" in out
    lost = [entry["lost_updates"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(lost) == 3
    # |w| is about 0.02 (initializer_range), where half an ulp is 2^-14 ≈ 6e-5 and the update is at most 1e-6: only
    # the weights below 1e-6 · 2^8 = 2.6e-4, one in a hundred, can take it.
    assert all(0.97 < share <= 1 for share in lost)
