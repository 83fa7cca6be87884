"""Under Trainer, an FP32 model keeps its low bits; what the report says; resuming, adapters, model_init."""

import functools
import re

import pytest
import torch
from transformers import TrainerCallback

import hf_lowprec
from hf_lowprec import fp32_state_dict
from hf_lowprec.rounding.attached_low_bits import attached_low_bits
from tests.support.rounding.kept_low_bits import kept_values
from tests.support.training.peft_adapters import adapted
from tests.support.training.tiny_trainer import llama, optimizer_of, trained

KAHAN = {"optim": "adamw_bf16_kahan"}


def initial_values(printed: str) -> dict[str, int]:
    """The kinds of initial compensations in the report, with their numbers of elements."""
    (line,) = re.findall(r"(?:compensation|remainder) +starts with (.*)", printed)
    return {kind: int(count.replace(",", "")) for kind, count in re.findall(r"([a-z ]+?) ([\d,]+)(?:, |$)", line)}


def in_16_bits(model) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad and p.dtype == torch.bfloat16)


class FirstStep(TrainerCallback):
    """Keeps the FP32 estimates before the first step, and which parameters have low bits before and after it."""

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.estimates = fp32_state_dict(model, optimizer)
        self.with_low_bits = {name for name, param in model.named_parameters() if attached_low_bits(param) is not None}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.with_low_bits_later = {name for name, param in model.named_parameters() if "_low_bits" in vars(param)}


@pytest.mark.parametrize("optim", ["adamw_bf16_kahan", "adamw_bf16_split"])
@pytest.mark.parametrize("how", ["model", "model_init"])
def test_an_fp32_model_starts_with_its_low_bits(tmp_path, capsys, how, optim):
    first, exact = FirstStep(), llama().state_dict()
    source = {"model_init": functools.partial(llama, 0)} if how == "model_init" else {"model": llama()}
    trainer = trained(tmp_path, **source, callbacks=[first], max_steps=2, optim=optim)
    assert initial_values(capsys.readouterr().out) == {"low bits": in_16_bits(trainer.model)}
    for name, weights in exact.items():
        assert torch.equal(first.estimates[name], weights if "norm" in name else kept_values(weights)), name
    assert first.with_low_bits == {n for n, p in trainer.model.named_parameters() if p.dtype == torch.bfloat16}
    assert not first.with_low_bits_later


def test_a_model_in_bf16_starts_at_zero(tmp_path, capsys):
    trainer = trained(tmp_path, llama().to(torch.bfloat16), max_steps=1, **KAHAN)
    assert initial_values(capsys.readouterr().out) == {"zero": in_16_bits(trainer.model)}


def test_modes_without_a_compensation_keep_no_low_bits(tmp_path, capsys):
    first = FirstStep()
    trained(tmp_path, max_steps=1, callbacks=[first], optim="adamw_bf16_sr")
    assert not first.with_low_bits
    assert "starts with" not in capsys.readouterr().out


def test_adapters_in_fp32_have_low_bits(tmp_path, capsys):
    """LoRA's B starts at zero, in FP32 as in 16 bits: no low bits."""
    first = FirstStep()
    model = adapted("lora")
    exact = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    trainer = trained(tmp_path, model, max_steps=1, learning_rate=0.0, callbacks=[first], **KAHAN)
    assert initial_values(capsys.readouterr().out)["low bits"] == sum(
        weights.numel() for name, weights in exact.items() if "lora_A" in name
    )
    for found in (first.estimates, fp32_state_dict(trainer.model, optimizer_of(trainer))):
        for name, weights in exact.items():
            assert ((found[name] - weights).abs() <= 2.0**-16 * weights.abs()).all(), name


def test_resuming_is_bit_exact(tmp_path, capsys):
    settings = {**KAHAN, "save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    whole = trained(tmp_path, **settings)
    capsys.readouterr()
    resumed = trained(tmp_path, llama(seed=1), resume=str(tmp_path / "checkpoint-3"), **settings)
    said = initial_values(capsys.readouterr().out)
    assert said == {"values of a checkpoint or of earlier steps": in_16_bits(whole.model)}
    estimates = [fp32_state_dict(trainer.model, optimizer_of(trainer)) for trainer in (whole, resumed)]
    assert all(torch.equal(estimates[0][name], estimates[1][name]) for name in estimates[0])
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
        for name, value in optimizer_of(whole).state[a].items():
            assert torch.equal(value, optimizer_of(resumed).state[b][name]), name


def test_an_optimizer_that_was_passed_decides(tmp_path):
    for name, keeps in (("adamw_bf16_kahan", True), ("adamw_bf16_sr", False)):
        factory, first = hf_lowprec.optimizer_factory(name, lr=1e-3), FirstStep()
        callbacks = [hf_lowprec.LowPrecisionCallback(), first]
        trained(tmp_path, max_steps=1, optimizer_cls_and_kwargs=factory, callbacks=callbacks)
        assert bool(first.with_low_bits) == keeps
