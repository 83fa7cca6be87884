"""`TrainingArguments(optim=…)` with the stock Trainer: what the string does, and what it leaves alone."""

import gc
import weakref

import pytest
from transformers import (
    Trainer,
    TrainingArguments,
)

import hf_lowprec
from tests.support.chosen_cases import nightly_except
from tests.support.training.tiny_trainer import (
    arguments,
    assert_pure_bf16,
    counting_data,
    llama,
    losses,
    optimizer_of,
    trained,
)

SAVE_EVERY_STEP = {"save_strategy": "steps", "save_steps": 1}
SETTINGS = {
    "plain": {},
    "gradient_accumulation": {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2, "max_steps": 4},
    "clipping": {"max_grad_norm": 0.05},
    "warmup_and_cosine": {"warmup_steps": 4, "lr_scheduler_type": "cosine"},
    "weight_decay": {"weight_decay": 0.1},
    "bf16_by_habit": {"bf16": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 4},
    "label_smoothing": {"label_smoothing_factor": 0.1},
}
SHORT = ("plain", "gradient_accumulation", "clipping", "bf16_by_habit", "evaluation")


@pytest.mark.combinations(1)
@pytest.mark.parametrize("name", ["adamw_bf16_kahan", "adamw_bf16_sr"])
@pytest.mark.parametrize("setting", nightly_except(SHORT, SETTINGS))
def test_training_follows_fp32(tmp_path, setting, name):
    """The same loss as FP32 AdamW under the same settings.

    BF16 activations carry a relative error of 2^-9 per operation; through about ten operations in depth and with errors
    that are independent that is √10 · 2^-9 ≈ 0.6% of a logit of size one. Loss curves that fall from 4.2 towards 1 in a
    dozen steps amplify it by their slope; 2.5% of the starting loss bounds both.
    """
    settings = SETTINGS[setting]
    reference = trained(tmp_path, optim="adamw_torch", **{k: v for k, v in settings.items() if k != "bf16"})
    trainer = trained(tmp_path, optim=name, **settings)
    assert_pure_bf16(trainer.model)
    assert isinstance(optimizer_of(trainer), hf_lowprec.AdamW)
    assert trainer.accelerator.mixed_precision == "no"
    assert len(losses(trainer)) == len(losses(reference)) > 0
    for ours, theirs in zip(losses(trainer), losses(reference), strict=True):
        assert abs(ours - theirs) < 0.025 * losses(reference)[0]
    if len(losses(trainer)) > 1:
        assert losses(trainer)[-1] < losses(trainer)[0]


@pytest.mark.parametrize("optim_args", ["", "state_dtype=int8", "gradient_release=True"])
def test_a_trainer_is_freed_with_its_last_reference(tmp_path, optim_args):
    """As with torch's optimizers: no model waits on a device for Python's garbage collector."""
    trainer = trained(
        tmp_path, optim="adamw_bf16_split", optim_args=optim_args, max_steps=1, max_grad_norm=0, **SAVE_EVERY_STEP
    )
    references = [weakref.ref(it) for it in (trainer, trainer.model, trainer.accelerator, optimizer_of(trainer))]
    gc.collect()
    gc.disable()
    try:
        del trainer
        assert [it() for it in references] == [None] * 4
    finally:
        gc.enable()


def test_fp16_is_refused(tmp_path):
    args = arguments(tmp_path, optim="adamw_bf16_kahan")
    args.mixed_precision = "fp16"  # as `accelerate launch --mixed_precision fp16` sets it
    with pytest.raises(ValueError, match="fp16"):
        Trainer(model=llama(), args=args, train_dataset=counting_data())


def test_model_init_is_cast_each_time(tmp_path):
    built = []

    def model_init():
        built.append(llama())
        return built[-1]

    trainer = trained(tmp_path, model_init=model_init, optim="adamw_bf16_kahan", max_steps=2)
    assert len(built) == 2
    for model in built:
        assert_pure_bf16(model)
    assert trainer.model is built[-1]


def test_optimizer_factory_feeds_trainer(tmp_path):
    pair = hf_lowprec.optimizer_factory("adamw_bf16_sr", lr=5e-3, seed=3)
    trainer = trained(
        tmp_path, optimizer_cls_and_kwargs=pair, callbacks=[hf_lowprec.LowPrecisionCallback()], max_steps=2
    )
    optimizer = optimizer_of(trainer)
    assert isinstance(optimizer, hf_lowprec.AdamW)
    assert optimizer.defaults["lr"] == 5e-3
    with pytest.raises(ValueError, match=r"'adamw_bf16_kahn' is unknown \(did you mean 'adamw_bf16_kahan'\?\)"):
        hf_lowprec.optimizer_factory("adamw_bf16_kahn")
    with pytest.raises(ValueError, match="'sed' is not an argument"):
        hf_lowprec.optimizer_factory("adamw_bf16_sr", sed=1)


def test_registering_again_changes_nothing():
    before = (Trainer.__init__, Trainer.train, list(type(TrainingArguments(output_dir="out").optim)))
    hf_lowprec.register()
    assert (Trainer.__init__, Trainer.train, list(type(TrainingArguments(output_dir="out").optim))) == before
