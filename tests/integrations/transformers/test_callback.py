"""`LowPrecisionCallback`, given by the user or added by the optimizer's name: its cast, report, log and warnings."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer, TrainerCallback

import hf_lowprec
from hf_lowprec.integrations.transformers import run_monitor
from hf_lowprec.integrations.transformers.callback import logged_numbers
from hf_lowprec.integrations.transformers.run_monitor import RunMonitor
from hf_lowprec.monitor.measured_step import MeasuredStep
from tests.support.training.tiny_trainer import (
    arguments,
    counting_data,
    is_precision,
    llama,
    logged,
    optimizer_of,
    trained,
)


def test_the_callback_alone_trains_bf16_with_any_optimizer(tmp_path, capsys):
    callback = hf_lowprec.LowPrecisionCallback(keep_fp32=["lm_head"])
    trainer = trained(tmp_path, callbacks=[callback], optim="adamw_torch", bf16=True, max_steps=2)
    assert trainer.model.lm_head.weight.dtype == torch.float32
    assert trainer.model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert trainer.accelerator.mixed_precision == "no"
    assert "not from hf_lowprec" in capsys.readouterr().out


def test_the_users_callback_replaces_ours(tmp_path, capsys):
    callback = hf_lowprec.LowPrecisionCallback(report=False, log_lost_updates=False)
    trainer = trained(tmp_path, callbacks=[callback], optim="adamw_bf16_kahan", max_steps=4)
    ours = [cb for cb in trainer.callback_handler.callbacks if isinstance(cb, hf_lowprec.LowPrecisionCallback)]
    assert ours == [callback]
    assert "hf_lowprec" not in capsys.readouterr().out
    assert not logged(trainer, "lost_updates")


def test_patterns_of_optim_args_and_of_the_callback_add_up(tmp_path):
    callback = hf_lowprec.LowPrecisionCallback(keep_fp32="*.down_proj")
    trainer = trained(
        tmp_path, optim="adamw_bf16_kahan", optim_args="keep_fp32=lm_head", callbacks=[callback], max_steps=1
    )
    kept = {name for name, p in trainer.model.named_parameters() if p.dtype == torch.float32 and "norm" not in name}
    assert kept == {"lm_head.weight", *(f"model.layers.{k}.mlp.down_proj.weight" for k in (0, 1))}


def test_a_callback_added_too_late_says_so(tmp_path):
    trainer = Trainer(model=llama(), args=arguments(tmp_path), train_dataset=counting_data())
    trainer.add_callback(hf_lowprec.LowPrecisionCallback())
    with pytest.raises(RuntimeError, match=r"pass it as Trainer\(callbacks="):
        trainer.train()


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_one_report_and_one_warning(tmp_path, capsys, caplog, level):
    with caplog.at_level(level, "hf_lowprec"):
        trained(tmp_path, optim="adamw_bf16_kahan", optim_args="rounding=nearest", learning_rate=1e-6)
    out = capsys.readouterr().out
    if level == "INFO":
        assert "hf_lowprec" not in out
        out = "\n".join(record.getMessage() for record in caplog.records if "kept in fp32" in record.getMessage())
    assert out.count("hf_lowprec: bfloat16 training of LlamaForCausalLM") == 1
    assert "weights nearest" in out
    (message,) = [record.getMessage() for record in caplog.records if "are lost in rounding" in record.getMessage()]
    assert "Use rounding='split'" in message


def test_other_callbacks_and_the_saved_state_get_the_numbers_of_each_log_once(tmp_path):
    """A part of the model is in the log where it loses updates. At this rate, only small weights move."""
    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append({"step": state.global_step, **logs})

    settings = {"optim": "adamw_bf16_kahan", "optim_args": "rounding=nearest", "learning_rate": 1e-6}
    callbacks = [Reporter(), hf_lowprec.LowPrecisionCallback(report=False)]
    trained(tmp_path, callbacks=callbacks, save_strategy="steps", save_steps=12, **settings)
    saved = json.loads((tmp_path / "checkpoint-12" / "trainer_state.json").read_text())["log_history"]
    steps = [entry for entry in seen if "loss" in entry]
    assert steps == saved and [entry["step"] for entry in steps] == [4, 8, 12]
    parts = {f"lost_updates/{kind}" for kind in ("embeddings", "attention", "mlp", "head")}  # norms are in FP32
    for entry in seen:
        measured = {name: value for name, value in entry.items() if name.startswith("lost_updates")}
        assert measured.keys() == ({"lost_updates", *parts} if "loss" in entry else set())
        # |w| is about 0.02 (initializer_range), where half an ulp is 2^-14 ≈ 6e-5 and the update is at most 1e-6: only
        # the weights below 1e-6 · 2^8 = 2.6e-4, one in a hundred, can take it.
        assert all(0.95 < share <= 1 for share in measured.values())


def test_a_schedule_that_enters_nearest_rounding_is_warned_of_then(tmp_path, capsys, caplog):
    settings = {"optim": "adamw_bf16_kahan", "learning_rate": 1e-6, "logging_steps": 1, "max_steps": 6}
    trained(tmp_path, optim_args="rounding=kahan:0.5|nearest", **settings)
    assert "rounding modes: kahan to step 3, then nearest" in capsys.readouterr().out
    (message,) = [record.getMessage() for record in caplog.records if "are lost in rounding" in record.getMessage()]
    assert "step 4" in message


def test_many_micro_batches_in_16_bits_are_pointed_out(tmp_path, capsys):
    class Leave(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    def said(steps, **settings):
        with pytest.raises(KeyboardInterrupt):
            settings |= {"optim": "adamw_bf16_kahan", "gradient_accumulation_steps": steps}
            trained(tmp_path, callbacks=[Leave()], **settings)
        return capsys.readouterr().out

    assert "grad_accumulation" not in said(127)
    words = "gradient_accumulation_steps=128 rounds gradients once per micro-batch; grad_accumulation='fp32'"
    assert words in said(128)
    assert "rounds gradients" not in said(128, optim_args="grad_accumulation=fp32")


def test_optim_args_win_over_the_callback(tmp_path, capsys):
    callback = hf_lowprec.LowPrecisionCallback(grad_accumulation="fp32", check_replicas_every=3)
    trained(tmp_path, optim="adamw_bf16_sr", callbacks=[callback], max_steps=1)
    assert callback.reduction.grad_accumulation == "fp32"
    assert "FP32 sums from the second one on, 4 bytes per parameter" in capsys.readouterr().out
    callback.requested_reduction = "nccl"
    for settings in ({"callbacks": [callback]}, {"optim_args": "reduction=nccl"}):
        with pytest.raises(ValueError, match="reduction='nccl' needs FSDP2, but distributed_type="):
            trained(tmp_path, optim="adamw_bf16_sr", **settings)
    words = "grad_accumulation=nearest,check_replicas_every=2,reduction=rank_order"
    trained(tmp_path, optim="adamw_bf16_sr", optim_args=words, callbacks=[callback], max_steps=1)
    assert (callback.reduction.grad_accumulation, callback.reduction.reduction) == ("nearest", "rank_order")


@pytest.mark.parametrize(
    ("measured", "logged"),
    [
        ({"all": {"lost_updates": (0.02, 0.1), "lost_second_moment": (0.72, 0.92)}, "norms": {"never_moved": (0, 0)}},
         {"lost_updates": 0.02}),
        ({"all": {"lost_updates": (0.33, 0.73)}}, {}),
        ({"all": {"lost_updates": (0.9, 0.25)}}, {"lost_updates": 0.9}),
        ({"all": {"lost_second_moment": (0.2, 0.05), "lost_weight_decay": (0.2, 0.07)},
          "norms": {"never_moved": (0.5, 0)}}, {"lost_second_moment": 0.2, "norms_never_moved": 0.5}),
        ({"all": {"lost_updates": (0.1, 0.1)}, "mlp": {"lost_updates": (0.2, 0.07)},
          "head": {"lost_updates": (0.4, 0.13), "never_moved": (0.5, 0)}},
         {"lost_updates": 0.1, "lost_updates/head": 0.4}),
    ],
)  # fmt: skip
def test_numbers_are_logged_where_they_say_something(measured, logged):
    by_kind = {
        kind: {name: value for name, (value, _) in of_kind.items()}
        | {f"{name}_error": error for name, (_, error) in of_kind.items()}
        for kind, of_kind in measured.items()
    }
    assert logged_numbers(SimpleNamespace(by_kind=by_kind)) == logged


# The monitor of a run: warnings of lost updates also without anything of this package, and errors in it.


SETTINGS = {"optim": "adamw_torch", "learning_rate": 1e-6}
"""Of a Trainer whose updates vanish."""
STEPS = 4
"""Of runs in which an error is planted."""
PLANTED = ("__init__", "measure_next_step", "_before_step", "add_plan", "_after_step", "findings")
"""Methods in which an error is planted. In `add_plan`, a step is planned at that moment."""


def warnings(caplog) -> list[str]:
    """The warnings of this package."""
    records = (record for record in caplog.records if record.name.startswith("hf_lowprec"))
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


def hooks(trainer) -> int:
    optimizer = optimizer_of(trainer)
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def test_vanishing_updates_are_warned_of_once(tmp_path, caplog):
    trainer = trained(tmp_path, model=llama().bfloat16(), logging_steps=1, **SETTINGS)
    (message,) = warnings(caplog)
    assert "of the 16-bit weights changed in step 1 (torch.optim.AdamW, learning rate 1e-06)" in message
    assert "optim='adamw_bf16_split'" in message
    assert not any(is_precision(name) for entry in trainer.state.log_history for name in entry)
    assert hooks(trainer) == 0  # after the warning it no longer watches


def test_later_logs_are_looked_at_as_well(tmp_path, caplog):
    """With a decaying rate, updates vanish towards the end."""
    settings = {"learning_rate": 5e-2, "lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 12.0}}
    trained(tmp_path, model=llama().bfloat16(), optim="adamw_torch", logging_steps=1, max_steps=17, **settings)
    (message,) = warnings(caplog)
    assert "step 16" in message or "step 8" in message


@pytest.mark.parametrize("settings", [{"logging_steps": 500}, {"logging_strategy": "no"}])
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_bf16_kahan"])
def test_a_run_without_logs_has_its_warning_at_the_end(tmp_path, caplog, optim, settings):
    model = llama().bfloat16() if optim == "adamw_torch" else llama()
    options = {} if optim == "adamw_torch" else {"optim_args": "rounding=nearest"}
    trainer = trained(tmp_path, model=model, **{**SETTINGS, "optim": optim}, **settings, **options)
    (message,) = warnings(caplog)
    assert "step 6 (" in message  # of 12: learning rates are not at an end
    assert hooks(trainer) == 0


# Without logs, the last steps of a schedule have small rates, and prove nothing.
@pytest.mark.parametrize(
    ("dtype", "rate", "every"), [("float32", 1e-6, 1), ("bfloat16", 1e-2, 1), ("bfloat16", 1e-2, 99)]
)
def test_healthy_runs_are_not_warned_of(tmp_path, caplog, dtype, rate, every):
    model, settings = llama().to(getattr(torch, dtype)), {"optim": "adamw_torch", "learning_rate": rate}
    trainer = trained(tmp_path, model=model, logging_steps=every, **settings)
    assert warnings(caplog) == []
    assert hooks(trainer) == 0


def fail(*args, **kwargs):
    raise RuntimeError("planted")


def plant(monkeypatch, method: str) -> None:
    owner = MeasuredStep if hasattr(MeasuredStep, method) and method != "__init__" else run_monitor.PrecisionMonitor
    monkeypatch.setattr(owner, method, fail)


def run(tmp_path, own: bool):
    settings = {"logging_steps": 1, "max_steps": STEPS}
    if own:
        return trained(tmp_path, optim="adamw_bf16_kahan", **settings)
    return trained(tmp_path, model=llama().bfloat16(), **SETTINGS, **settings)


def weights(trainer) -> torch.Tensor:
    return torch.cat([param.detach().float().flatten() for param in trainer.model.parameters()])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[bool, torch.Tensor]:
    """The weights after training with our optimizer, or without, in which no error is planted."""
    return {own: weights(run(tmp_path_factory.mktemp("run"), own)) for own in (True, False)}


@pytest.mark.parametrize("own", [True, False], ids=["our run", "stock run"])
@pytest.mark.parametrize("method", PLANTED)
def test_training_goes_on_after_one_warning(tmp_path, monkeypatch, caplog, undisturbed, method, own):
    caplog.clear()
    plant(monkeypatch, method if own or method != "add_plan" else "add_rest")
    trainer = run(tmp_path, own)
    (message,) = warnings(caplog)
    assert message == (
        "hf_lowprec: training continues, but its precision is no longer measured, because of an error: "
        "RuntimeError('planted')"
    )
    assert trainer.state.global_step == STEPS
    assert torch.equal(weights(trainer), undisturbed[own])
    assert not logged(trainer, "lost_updates")
    assert hooks(trainer) == 0


def test_an_error_while_a_clipped_step_is_computed(tmp_path, monkeypatch, caplog):
    """The gradients are clipped all the same."""
    settings = {"optim": "adamw_bf16_kahan", "optim_args": "max_grad_norm=0.1", "logging_steps": 1, "max_steps": 4}
    expected = weights(trained(tmp_path, **settings))
    monkeypatch.setattr("hf_lowprec.monitor.exact_update.FusedGroupUpdates.compute", fail)
    assert torch.equal(weights(trained(tmp_path, **settings)), expected)
    (message,) = warnings(caplog)
    assert "planted" in message


def test_a_later_run_is_measured_again(tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as patches:
        plant(patches, "findings")
        trainer = run(tmp_path, own=True)
    trainer.train()
    assert logged(trainer, "lost_updates")
    assert len(warnings(caplog)) == 1


def test_only_one_rank_warns_and_shards_need_all_ranks(tmp_path, monkeypatch, caplog):
    plant(monkeypatch, "__init__")
    param = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = hf_lowprec.SGD([param], lr=0.1)
    RunMonitor(optimizer, torch.nn.Linear(1, 1), warns=False, across_ranks=True)
    assert warnings(caplog) == []
    monkeypatch.setattr(run_monitor, "is_sharded", lambda tensor: True)
    RunMonitor(optimizer, torch.nn.Linear(1, 1), warns=False, across_ranks=False)
    with pytest.raises(RuntimeError, match="planted"):
        RunMonitor(optimizer, torch.nn.Linear(1, 1), warns=True, across_ranks=True)
