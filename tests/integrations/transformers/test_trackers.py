"""What arrives at the trackers that Trainer reports to, read from their files."""

import logging
import sys
from unittest.mock import MagicMock

import numpy as np
import pytest
from transformers import TrainerCallback
from transformers.integrations import INTEGRATION_TO_CALLBACK, TensorBoardCallback

from hf_lowprec.integrations.transformers.reports import trackers
from hf_lowprec.metrics_file import read_metrics
from tests.support.training import tracker_files
from tests.support.training.tiny_trainer import trained


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


def expected_values(folder, prefix="train/"):
    """The numbers of the metrics file, under the names that trackers get: name -> [(step, value), …]."""
    found = {}
    (part,) = read_metrics(folder).parts
    for record in part.steps:
        for kind, values in (record.measured.by_kind if record.measured else {}).items():
            for name, value in values.items():
                found.setdefault(f"{prefix}precision/{kind}/{name}", []).append((record.step, value))
    return found, part


def assert_arrived(tracked: tracker_files.Tracked, folder, rounded=float):
    expected, part = expected_values(folder)
    assert {len(values) for values in expected.values()} == {3}  # steps 4, 8, 12
    assert {name.split("/")[2] for name in expected} == {"all", "embeddings", "attention", "mlp", "norms", "head"}
    assert {name: values for name, values in tracked.values.items() if "precision" in name} == {
        name: [(step, rounded(value)) for step, value in values] for name, values in expected.items()
    }
    losses = [(record.step, rounded(record.logged["loss"])) for record in part.steps if "loss" in record.logged]
    assert tracked.values["train/loss"] == losses  # once per step
    lines = [line.strip() for line in part.run.report.splitlines()]
    assert "bfloat16 training of LlamaForCausalLM" in lines[0]
    text = next(text for name, text in tracked.texts.items() if name.startswith("precision_report"))
    assert [line.strip() for line in text.splitlines()] == lines


def test_tensorboard(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    trainer = trained(tmp_path, optim="adamw_bf16_kahan", report_to=["tensorboard"])
    assert_arrived(tracker_files.tensorboard(tmp_path / "runs"), tmp_path, lambda value: float(np.float32(value)))
    assert "precision/" not in capsys.readouterr().out
    assert not any("precision" in name for entry in trainer.state.log_history for name in entry)
    assert all("on_log" not in vars(callback) for callback in trainer.callback_handler.callbacks)


def test_weights_and_biases(tmp_path):
    import wandb

    try:
        trained(
            tmp_path, optim="adamw_bf16_kahan", report_to=["wandb"],
            eval_strategy="steps", eval_steps=4,
        )  # fmt: skip
    finally:
        wandb.finish()
    found = tracker_files.wandb(tmp_path / "wandb")
    assert_arrived(found, tmp_path)
    # One call for each log: three training logs, three evaluations, the summary at the end.
    assert [value for _, value in found.values["_step"]] == [*range(found.calls)] == [*range(7)]


def test_trackio(tmp_path, monkeypatch):
    for module in ("trackio.utils", "trackio.sqlite_storage"):  # they have read the variable on import
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "trackio")
    trained(tmp_path, optim="adamw_bf16_kahan", report_to=["trackio"])
    found = tracker_files.trackio(tmp_path / "trackio")
    assert_arrived(found, tmp_path)
    assert found.calls == 4  # three training logs and the summary


class Recording(TensorBoardCallback):
    """A tracker that keeps its logs, and fails as told."""

    def __init__(self, fails_with="nothing"):
        self.fails_with, self.logs, self.tb_writer = fails_with, [], None

    def on_train_begin(self, args, state, control, **kwargs):
        self.texts = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.fails_with in "".join(logs):
            raise OSError("the server is away")
        self.logs.append(dict(logs))

    def on_train_end(self, args, state, control, **kwargs):
        pass


def test_a_tracker_that_fails_with_our_numbers_gets_the_others(tmp_path, caplog):
    tracker, other = Recording("precision/"), Recording()
    with caplog.at_level(logging.WARNING, "hf_lowprec"):
        trained(tmp_path, optim="adamw_bf16_kahan", callbacks=[tracker, other])
    for plain, full in zip(tracker.logs[:3], other.logs[:3], strict=True):
        assert {"loss", "grad_norm", "learning_rate", "epoch", "lost_updates"} <= plain.keys()
        assert plain == {name: value for name, value in full.items() if "/" not in name}
        assert full["precision/all/lost_updates"] == full["lost_updates"]
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("hf_lowprec")]
    gone = "hf_lowprec: tensorboard gets no more precision numbers, since they failed: OSError('the server is away')"
    assert messages.count(gone) == 1
    # It has no writer, so the report fails as well.
    assert len([message for message in messages if "tensorboard rejected the precision report" in message]) == 2


def test_an_error_that_a_tracker_raises_without_us_is_raised(tmp_path):
    with pytest.raises(OSError, match="the server is away"):
        trained(tmp_path, optim="adamw_bf16_kahan", callbacks=[Recording("loss")])


def test_every_report_goes_to_a_tracker_that_transformers_knows():
    assert {*trackers._REPORTS, *trackers._PROGRESS_DISPLAYS} <= {*INTEGRATION_TO_CALLBACK}


@pytest.mark.parametrize("name", sorted({*trackers._REPORTS} - {"tensorboard", "wandb", "trackio"}))
def test_a_report_for_a_tracker_that_is_not_installed(monkeypatch, name):
    """Only that the text is passed on; what these libraries do with it is theirs."""
    libraries = {library: MagicMock() for library in ("mlflow", "comet_ml", "clearml", "swanlab")}
    for library, stand_in in libraries.items():
        monkeypatch.setitem(sys.modules, library, stand_in)
    callback = MagicMock()
    trackers._REPORTS[name](callback, "the report")
    assert sum(str(one.mock_calls).count("'the report'") for one in (callback, *libraries.values())) == 1


def test_other_callbacks_see_the_plain_log(tmp_path):
    class Users(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            assert not any("precision" in name for name in logs)

    trained(tmp_path, optim="adamw_bf16_kahan", callbacks=[Users()])
