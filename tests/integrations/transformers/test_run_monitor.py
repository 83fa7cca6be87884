"""An error in the measurement of a run ends the measurement, with one warning, and not the run."""

import logging

import pytest
import torch

import hf_lowprec
from hf_lowprec.integrations.transformers.reports import run_monitor
from hf_lowprec.integrations.transformers.reports.run_monitor import RunMonitor
from hf_lowprec.monitor.measured_step import MeasuredBlocks
from tests.support.training.tiny_trainer import llama, optimizer_of, trained

STEPS = 4
PLANTED = ("__init__", "measure_next_step", "_before_step", "add_plan", "_after_step", "findings")
"""Methods in which an error is planted. In `add_plan`, a step is planned at that moment."""


def fail(*args, **kwargs):
    raise RuntimeError("planted")


def plant(monkeypatch, method: str) -> None:
    owner = MeasuredBlocks if hasattr(MeasuredBlocks, method) and method != "__init__" else run_monitor.PrecisionMonitor
    monkeypatch.setattr(owner, method, fail)


def warnings(caplog) -> list[str]:
    records = (record for record in caplog.records if record.name.startswith("hf_lowprec"))
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


def run(tmp_path, own: bool):
    settings = {"logging_steps": 1, "max_steps": STEPS}
    if own:
        return trained(tmp_path, optim="adamw_bf16_kahan", **settings)
    return trained(tmp_path, model=llama().bfloat16(), optim="adamw_torch", learning_rate=1e-6, **settings)


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
    optimizer = optimizer_of(trainer)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


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
