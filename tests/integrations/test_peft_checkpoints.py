"""Adapters in Trainer's checkpoints: resumed bit for bit, best ones loaded, saved, merged, and their FP32 estimate."""

import shutil

import pytest
import torch
from transformers import Trainer

import hf_lowprec
from tests.support.models import tiny_models
from tests.support.training.tiny_trainer import arguments, counting_data, optimizer_of, trained

peft = pytest.importorskip("peft")

from tests.support.training.peft_adapters import adapted, trainable  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32


def train(out, method, optim, resume=None, own_optimizer=False, **settings):
    """A Trainer that has trained nine steps and saved three times; with `own_optimizer` ours was built before it."""
    model, options = adapted(method), {}
    if own_optimizer:
        hf_lowprec.cast_model(model)
        optimizer = hf_lowprec.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        options = {"optimizers": (optimizer, None), "callbacks": [hf_lowprec.LowPrecisionCallback(report=False)]}
    args = arguments(out, optim=optim, max_steps=9, save_strategy="steps", save_steps=3, eval_steps=3, **settings)
    trainer = Trainer(model, args, train_dataset=counting_data(), eval_dataset=counting_data(16), **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def holds_what_trains(trainer) -> bool:
    held = {id(p) for group in optimizer_of(trainer).param_groups for p in group["params"]}
    return held == {id(p) for p in trainer.model.parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("method", "optim", "own_optimizer"),
    [
        pytest.param("dora", "adamw_bf16_kahan", False, marks=pytest.mark.every_case),
        ("saved_both", "adamw_bf16_kahan", False),
        pytest.param("saved_both", "adamw_bf16_sr", False, marks=pytest.mark.every_case),
        ("prefix", "adamw_bf16_sr", False),
        # PEFT loads adapters into new FP32 parameters, which an optimizer that is there would not know.
        ("lora", "adamw_torch", True),
    ],
)
def test_resume_continues_bit_for_bit(tmp_path, method, optim, own_optimizer):
    whole = train(tmp_path / "whole", method, optim, own_optimizer=own_optimizer)
    (tmp_path / "killed").mkdir()
    shutil.copytree(tmp_path / "whole/checkpoint-3", tmp_path / "killed/checkpoint-3")
    resumed = train(tmp_path / "killed", method, optim, resume=True, own_optimizer=own_optimizer)
    assert resumed.state.global_step == 9
    assert holds_what_trains(resumed)
    for (name, one), two in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert one.dtype == two.dtype, name
        assert torch.equal(one, two), name
    theirs = optimizer_of(resumed).state.values()
    for state, other in zip(optimizer_of(whole).state.values(), theirs, strict=True):
        assert state.keys() == other.keys() and all(torch.equal(state[key], other[key]) for key in state)
    saved = [tmp_path / run / "checkpoint-9/adapter_model.safetensors" for run in ("whole", "killed")]
    assert saved[0].read_bytes() == saved[1].read_bytes()


@pytest.mark.parametrize("optim", ["adamw_bf16_kahan", "adamw_bf16_sr"])
def test_the_best_adapters_are_loaded_at_the_end(tmp_path, optim):
    """The highest loss is called the best, so it is the first, and not what is there already."""
    settings = {"eval_strategy": "steps", "load_best_model_at_end": True, "greater_is_better": True}
    trainer = train(tmp_path, "saved_both", optim, **settings)
    history = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert history[0] > history[-1] + 0.1
    assert trainer.evaluate()["eval_loss"] == pytest.approx(history[0], abs=1e-6)
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {BF16}
    assert holds_what_trains(trainer)
    full = hf_lowprec.fp32_state_dict(trainer.model, trainer.optimizer)
    for name, parameter in trainer.model.named_parameters():
        # Half a spacing for the compensation of these weights.
        assert torch.allclose(full[name], parameter.float(), rtol=2.0**-8, atol=0.0), name


def test_saved_adapters_come_back(tmp_path):
    trainer = train(tmp_path / "run", "saved_both", "adamw_bf16_sr")
    trainer.save_model(tmp_path / "saved")
    base, batch = tiny_models.llama(tied=True)
    loaded = peft.PeftModel.from_pretrained(base.to(BF16), tmp_path / "saved", is_trainable=True)
    hf_lowprec.cast_model(loaded)
    ours = trainable(trainer.model)
    assert ours.keys() == trainable(loaded).keys()
    assert all(torch.equal(value, ours[name]) for name, value in trainable(loaded).items())
    assert torch.equal(loaded.eval()(**batch).logits, trainer.model.eval()(**batch).logits)


@pytest.mark.parametrize("method", ["dora", "all_linear"])
def test_merging(tmp_path, method):
    """The merged model computes what the adapted one did, up to the rounding of merged weights to BF16."""
    trainer = train(tmp_path, method, "adamw_bf16_kahan")
    model = trainer.model.eval()
    _, batch = tiny_models.llama()
    with torch.no_grad():
        expected = model(**batch).logits.float()
        with model.disable_adapter():
            plain = model(**batch).logits.float()
        model.merge_adapter()
        merged = model(**batch).logits.float()
        model.unmerge_adapter()
        unmerged = model(**batch).logits.float()
        final = model.merge_and_unload()
        unloaded = final(**batch).logits.float()
    # Ten BF16 roundings in depth, of activations in the one and also of weights in the other.
    noise = 20**0.5 * 2**-9 * expected.norm()
    assert (expected - plain).norm() > 10 * noise
    for logits in (merged, unmerged, unloaded):
        assert (logits - expected).norm() < noise
    assert not any("lora_" in name for name, _ in final.named_modules())
    assert {p.dtype for n, p in final.named_parameters() if "norm" not in n} == {BF16}
    assert {p.dtype for n, p in final.named_parameters() if "norm" in n} == {FP32}


def test_a_merged_model_is_frozen_and_can_be_thawed(tmp_path):
    """After `merge_and_unload`, the way out is another than for adapters that were loaded frozen."""
    merged = adapted("lora").merge_and_unload()
    with pytest.raises(ValueError, match=r"merge_and_unload\(\), call model\.requires_grad_\(True\)$"):
        trained(tmp_path, model=merged, optim="adamw_bf16_kahan")
    trained(tmp_path, model=merged.requires_grad_(True), optim="adamw_bf16_kahan", max_steps=1)


def test_adapters_that_were_loaded_frozen_are_pointed_out(tmp_path):
    adapted("lora").save_pretrained(tmp_path / "saved")
    base, _ = tiny_models.llama()
    model = peft.PeftModel.from_pretrained(base, tmp_path / "saved")
    trainer = Trainer(model, arguments(tmp_path, optim="adamw_bf16_kahan"), train_dataset=counting_data())
    with pytest.raises(ValueError, match="is_trainable=True"):
        trainer.train()
