"""A Trainer without anything of this package: one warning if its updates vanish, and nothing else changes."""

import logging

import pytest
import torch

import hf_lowprec  # noqa: F401  # wraps Trainer's methods
from hf_lowprec.integrations.transformers.reports.lost_updates_warning import LostUpdatesWarning
from tests.support.training.tiny_trainer import is_precision, llama, optimizer_of, trained

SETTINGS = {"optim": "adamw_torch", "learning_rate": 1e-6}


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
