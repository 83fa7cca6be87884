"""Warnings of lost updates in Trainers without anything of this package, and errors in the measurement of a run.

Such a Trainer warns once if its updates vanish, and nothing else changes. An error ends the measurement, with one
warning, and not the run.
"""

import logging

import pytest
import torch

import hf_lowprec
from hf_lowprec.integrations.transformers import run_monitor
from hf_lowprec.integrations.transformers.run_monitor import LostUpdatesWarning, RunMonitor
from hf_lowprec.monitor.measured_step import MeasuredStep
from tests.support.training.tiny_trainer import is_precision, llama, optimizer_of, trained

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


def test_our_own_runs_have_no_second_monitor(tmp_path):
    trainer = trained(tmp_path, optim="adamw_bf16_kahan", max_steps=1)
    assert not [one for one in trainer.callback_handler.callbacks if isinstance(one, LostUpdatesWarning)]


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
    assert not any("lost_updates" in entry for entry in trainer.state.log_history)
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
    assert any("lost_updates" in entry for entry in trainer.state.log_history)
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
