"""What belongs to the user stays the user's: arguments, lists of callbacks, models that failed to become trainers."""

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments

import hf_lowprec
from tests.support.training.tiny_trainer import arguments, counting_data, llama, optimizer_of, trained


def test_the_users_arguments_and_callbacks_are_not_changed(tmp_path):
    args = arguments(tmp_path, optim="adamw_bf16_kahan", bf16=True, max_steps=1)
    callbacks = [hf_lowprec.LowPrecisionCallback]
    trainer = Trainer(model=llama(), args=args, train_dataset=counting_data(), callbacks=callbacks)
    assert trainer.accelerator.mixed_precision == "no"
    assert args.mixed_precision == "bf16", "the next trainer of these arguments may want it"
    assert Accelerator(mixed_precision="bf16").mixed_precision == "bf16"
    assert callbacks == [hf_lowprec.LowPrecisionCallback]
    Trainer(model=llama(), args=args, train_dataset=counting_data(), callbacks=tuple(callbacks))


@pytest.mark.parametrize("report", [True, False])
def test_a_callback_may_be_used_again(tmp_path, capsys, caplog, report):
    """One message says that autocast is off: in the report, or in the log if there is no report."""
    callback = hf_lowprec.LowPrecisionCallback(report=report)
    for _ in range(2):
        caplog.clear()
        trained(tmp_path, optim="adamw_bf16_kahan", bf16=True, callbacks=[callback], max_steps=1)
        counts = [
            text.count("mixed precision: 'bf16' (the default of some Trainers) is off")
            for text in (capsys.readouterr().out, caplog.text)
        ]
        assert counts == [report, not report]


def test_patterns_of_optim_args_and_of_the_callback_add_up(tmp_path):
    callback = hf_lowprec.LowPrecisionCallback(keep_fp32="*.down_proj")
    trainer = trained(
        tmp_path, optim="adamw_bf16_kahan", optim_args="keep_fp32=lm_head", callbacks=[callback], max_steps=1
    )
    kept = {name for name, p in trainer.model.named_parameters() if p.dtype == torch.float32 and "norm" not in name}
    assert kept == {"lm_head.weight", *(f"model.layers.{k}.mlp.down_proj.weight" for k in (0, 1))}


def test_weight_decay_is_that_of_the_training_arguments(tmp_path):
    """Trainer writes its own, which is 0 unless it is set, over the algorithm's default and any keyword argument."""
    for settings, expected in (({}, 0.0), ({"weight_decay": 0.2}, 0.2)):
        for name in ("adamw_bf16_kahan", "muon_bf16_sr"):
            trainer = trained(tmp_path, optim=name, max_steps=1, **settings)
            assert max(group["weight_decay"] for group in optimizer_of(trainer).param_groups) == expected
    given = hf_lowprec.optimizer_factory("adamw_bf16_kahan", lr=1e-3, weight_decay=0.3)
    trainer = trained(tmp_path, optim="adamw_bf16_kahan", optimizer_cls_and_kwargs=given, max_steps=1)
    assert [group["weight_decay"] for group in optimizer_of(trainer).param_groups] == [0.0, 0.0]


def test_weight_decay_in_optim_args_reaches_the_groups(tmp_path):
    trainer = trained(tmp_path, optim="adamw_bf16_kahan", optim_args="weight_decay=0.1", max_steps=1)
    assert [group["weight_decay"] for group in optimizer_of(trainer).param_groups] == [0.1, 0.0]


def test_a_learning_rate_in_optim_args_is_trainers(tmp_path):
    words = {"output_dir": str(tmp_path), "optim": "adamw_bf16_kahan", "optim_args": "lr=0.125", "use_cpu": True}
    args = TrainingArguments(**words, report_to=[])
    trainer = Trainer(llama(), args)
    assert trainer.create_optimizer().param_groups[0]["lr"] == args.learning_rate == 0.125


@pytest.mark.parametrize(
    ("words", "field", "message"),
    [
        ("weight_decay=0.1", {"weight_decay": 0.2}, r"weight_decay=0\.2 and weight_decay=0\.1 in optim_args differ"),
        (
            "lr=0.1",
            {"learning_rate": 1e-3},
            r"learning_rate=0\.001 and lr=0\.1 in optim_args differ; remove one of them",
        ),
    ],
)
def test_a_field_and_a_different_value_in_optim_args_are_an_error(tmp_path, words, field, message):
    with pytest.raises(ValueError, match=message):
        trained(tmp_path, optim="adamw_bf16_kahan", optim_args=words, **field)


@pytest.mark.parametrize(
    "words", ["beta=0.9", "rounding=foo", "betas=2|3", "state_dtype=nope:bf16", "eps=-1", "reduction=ring"]
)
def test_a_model_is_untouched_when_its_arguments_are_wrong(tmp_path, words):
    model = llama()
    with pytest.raises(ValueError, match=words.split("=")[0]):
        Trainer(model=model, args=arguments(tmp_path, optim="adamw_bf16_kahan", optim_args=words))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_casting_again_at_evaluation_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}=True would cast the model"):
        trained(tmp_path, optim="adamw_bf16_kahan", **{name: True})


def test_an_optimizer_chosen_too_late_is_refused(tmp_path):
    trainer = Trainer(model=llama(), args=arguments(tmp_path), train_dataset=counting_data())
    trainer.args.optim = "adamw_bf16_kahan"
    with pytest.raises(ValueError, match="before the Trainer is built"):
        trainer.train()
