"""The comparison before the first step runs once, and among other hooks of the optimizer."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_lowprec.integrations.accelerate import rank_comparison
from hf_lowprec.reduction.reduction_status import ReductionStatus


@pytest.mark.parametrize("before_step", [True, False], ids=["before the step", "when gradients are clipped"])
def test_it_runs_once_and_other_hooks_run_too(monkeypatch, before_step):
    compared, others = [], []
    monkeypatch.setattr(rank_comparison, "trains_on_several_ranks", lambda *_: compared.append("ran"))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    comparison = rank_comparison.RankComparison(
        SimpleNamespace(num_processes=2, gradient_state=None), ReductionStatus("nearest")
    )
    comparison.watch(optimizer, [])
    optimizer.register_step_pre_hook(lambda *_: others.append("ran"))
    if not before_step:
        comparison.compare(optimizer, 1.0)
    optimizer.step()
    optimizer.step()
    assert compared == ["ran"] and others == ["ran"] * 2
