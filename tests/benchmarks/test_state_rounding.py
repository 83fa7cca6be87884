"""The benchmark of state rounding runs, and rounds the states that it says."""

import pytest
import torch

from benchmarks import state_rounding


@pytest.mark.slow
def test_settings_differ_as_they_say(monkeypatch):
    monkeypatch.setattr(state_rounding, "STEPS", 40)
    monkeypatch.setattr(state_rounding, "DROP", 20)
    drifts = state_rounding.drift(seed=0, elements=2000, mean=0.3)
    assert list(drifts) == list(state_rounding.SETTINGS)
    errors = {name: error for name, (error, _) in drifts.items()}
    # After the drop, a second moment that is rounded to nearest stays where it was, at β2 = 0.999.
    assert errors["all states FP32"] < errors["all BF16, the default"] < errors["all BF16, all nearest (textbook)"]
    assert all(torch.isfinite(torch.tensor(values)).all() for values in drifts.values())
