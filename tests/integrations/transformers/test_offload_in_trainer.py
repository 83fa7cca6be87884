"""`offload_states=True` in Trainer, on a simulated device: the weights, logs and checkpoints of the ordinary run."""

import pytest
import torch

from hf_lowprec.optim import host_steps
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from tests.support.optim.simulated_copies import simulate_device
from tests.support.training.tiny_trainer import trained

RELEASE = "gradient_release=True,clip=delayed"


@pytest.mark.parametrize(
    ("ordinary_args", "more_args", "settings"),
    [
        (None, "", {"gradient_accumulation_steps": 2}),
        (RELEASE, f",{RELEASE}", {"max_grad_norm": 0.5}),
        (None, ",offload_gradients=True", {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5}),
    ],
    ids=str,
)
def test_weights_logs_and_resumed_runs_are_those_of_the_ordinary_step(
    tmp_path, capsys, caplog, monkeypatch, ordinary_args, more_args, settings
):
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", 4000)  # of 23,000
    monkeypatch.setattr(host_steps, "BUCKET_ELEMENTS", 4000)
    settings |= {
        "optim": "adamw_bf16_split",
        "max_steps": 4,
        "save_steps": 2,
        "save_strategy": "steps",
        "logging_steps": 1,
    }
    ordinary = trained(tmp_path / "a", optim_args=ordinary_args, **settings)
    simulate_device(monkeypatch)
    capsys.readouterr()
    optim_args = f"offload_states=True{more_args}"
    offloaded = trained(tmp_path / "b", optim_args=optim_args, **settings)
    moved = "states and gradients" if "offload_gradients" in optim_args else "states"
    assert f", {moved} in host memory" in capsys.readouterr().out
    resumed = [
        trained(tmp_path / f"from_{run}", resume=str(tmp_path / run / "checkpoint-2"), optim_args=args, **settings)
        for run, args in (("a", optim_args), ("b", ordinary_args))
    ]
    for other in (offloaded, *resumed):
        pairs = zip(ordinary.model.parameters(), other.model.parameters(), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)
    timeless = [
        [{key: value for key, value in entry.items() if "runtime" not in key and "second" not in key} for entry in log]
        for log in (ordinary.state.log_history, offloaded.state.log_history)
    ]
    assert timeless[0] == timeless[1]
    assert ("grad_norm" in timeless[0][0]) == (settings.get("max_grad_norm", 1.0) > 0)
    assert not caplog.messages  # such as that weights have no gradients
