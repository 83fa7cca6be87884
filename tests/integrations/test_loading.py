"""`same_parameters`: values that arrive in new parameters move into those that were there."""

import torch
from torch import nn

from hf_lowprec.integrations.loading import same_parameters


def test_values_move_and_parameters_stay():
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2))
    kept, untouched = model[0].weight, model[1].weight
    with same_parameters(model):
        model[0].weight = nn.Parameter(torch.full((2, 2), 3.0))
        model[0].bias = resized = nn.Parameter(torch.ones(5))
    assert model[0].weight is kept and model[1].weight is untouched
    assert kept.dtype == torch.bfloat16 and kept.requires_grad
    assert torch.equal(kept, torch.full((2, 2), 3.0, dtype=torch.bfloat16))
    assert model[0].bias is resized, "another shape cannot move"
