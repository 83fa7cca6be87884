"""`offload_states=True` in Trainer, on a simulated device: the weights, logs and checkpoints of the ordinary run."""

import pytest
import torch

from tests.support.optim.simulated_copies import simulate_device
from tests.support.training.tiny_trainer import trained


@pytest.mark.parametrize(
    ("optim_args", "settings"),
    [("", {"gradient_accumulation_steps": 2}), ("gradient_release=True,clip=delayed", {"max_grad_norm": 0.5})],
    ids=str,
)
def test_weights_logs_and_resumed_runs_are_those_of_the_ordinary_step(
    tmp_path, capsys, monkeypatch, optim_args, settings
):
    settings |= {"optim": "adamw_bf16_split", "max_steps": 6, "save_steps": 3, "save_strategy": "steps"}
    ordinary = trained(tmp_path / "a", optim_args=optim_args or None, **settings)
    simulate_device(monkeypatch)
    capsys.readouterr()
    offloaded = trained(tmp_path / "b", optim_args=f"offload_states=True,{optim_args}".rstrip(","), **settings)
    assert "states in host memory" in capsys.readouterr().out
    resumed = trained(
        tmp_path / "c",
        resume=str(tmp_path / "a" / "checkpoint-3"),
        optim_args=f"offload_states=True,{optim_args}".rstrip(","),
        **settings,
    )
    for other in (offloaded, resumed):
        pairs = zip(ordinary.model.parameters(), other.model.parameters(), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)
    timeless = [
        [{key: value for key, value in entry.items() if "runtime" not in key and "second" not in key} for entry in log]
        for log in (ordinary.state.log_history, offloaded.state.log_history)
    ]
    assert timeless[0] == timeless[1]
