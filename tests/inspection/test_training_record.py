"""The sum of the learning rates between two steps, from what Trainer logged."""

import json

import pytest

from hf_lowprec.tools.inspection.training_record import TrainingRecord, read_training_record
from tests.support.training.tiny_trainer import trained


def test_every_step_is_logged():
    record = TrainingRecord(4, {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4})
    assert record.rate_sum(0, 4) == pytest.approx(1.0)
    assert record.rate_sum(1, 3) == pytest.approx(0.5)
    assert record.rate_sum(4, 4) == 0
    assert record.highest_rate == 0.4


def test_steps_between_logs_have_the_rate_of_the_next_log():
    record = TrainingRecord(25, {10: 1.0, 20: 0.5})
    assert record.rate_sum(0, 20) == pytest.approx(15)
    assert record.rate_sum(5, 15) == pytest.approx(5 + 2.5)
    assert record.rate_sum(0, 25) == pytest.approx(15 + 2.5)


def test_nothing_logged(tmp_path):
    assert TrainingRecord(5, {}).rate_sum(0, 5) is None
    assert read_training_record(tmp_path) is None


def test_a_run_of_trainer(tmp_path):
    trained(tmp_path, max_steps=10, logging_steps=1, save_strategy="steps", save_steps=10, optim="adamw_torch")
    record = read_training_record(tmp_path / "checkpoint-10")
    assert record.step == 10
    # A linear decay from 1e-2 to 0: the mean is 5.5e-3 or 4.5e-3, depending on which end is logged.
    assert record.rate_sum(0, 10) == pytest.approx(5e-2, rel=0.101)
    content = json.loads((tmp_path / "checkpoint-10/trainer_state.json").read_text())
    (tmp_path / "trainer_state.json").write_text(json.dumps([content]))
    with pytest.raises(ValueError, match=r"trainer_state\.json"):
        read_training_record(tmp_path)
