"""Models of several seeds at once are those of one seed each, and the ways to train round what they say."""

import copy

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("scipy")
pytest.importorskip("sklearn")

from benchmarks.evidence.experiments.applications import TASKS
from benchmarks.evidence.training import tasks
from benchmarks.evidence.training.modes import MODES


@pytest.fixture(scope="module", params=TASKS)
def task(request):
    found = TASKS[request.param]
    return found, tasks.Batches(found.arrays(), [3, 4], 4)


def single(task, seed):
    torch.manual_seed(seed)
    return task.make()


def test_each_seed_is_a_model_of_its_own(task):
    """FP32 sums in another order differ by some 2⁻²⁴ of the terms; 1e-4 leaves room for a thousand of them."""
    task, batches = task
    stacked, (inputs, labels) = tasks.Stacked(task.make, [3, 4]), batches.of_step(0)
    stacked.losses((inputs, labels)).sum().backward()
    for k, seed in enumerate((3, 4)):
        model = single(task, seed)
        loss = F.cross_entropy(model(inputs[k]).flatten(0, -2), labels[k].flatten())
        loss.backward()
        torch.testing.assert_close(stacked.losses((inputs, labels))[k], loss, rtol=1e-4, atol=1e-5)
        for name, param in model.named_parameters():
            both = stacked.each.get_parameter(name)
            assert torch.equal(both[k], param)
            torch.testing.assert_close(both.grad[k], param.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["nearest", "split", "sr"])
def test_a_seed_does_not_see_the_others_data(task, mode):
    task, batches = task
    trained = []
    for change in (0, 1):
        model = tasks.Stacked(task.make, [3, 4])
        optimizer = MODES[mode].optimizer(model, lr=task.lr, **task.options)
        for step in range(2):
            inputs, labels = batches.of_step(step)
            inputs = inputs.clone()
            inputs[1] = inputs[1].flip(0) * (1 - change)
            model.losses((inputs, labels)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([param.detach().clone() for param in model.parameters()])
    assert all(torch.equal(a[0], b[0]) for a, b in zip(*trained, strict=True))
    assert not all(torch.equal(a[1], b[1]) for a, b in zip(*trained, strict=True))


@pytest.mark.parametrize("algorithm", ["AdamW", "SGD"])
def test_weights_that_are_rounded_after_each_step_are_rounded_in_nothing_else(algorithm):
    """The states are those of torch's own FP32 step from the same weights."""
    rounded = torch.nn.Linear(16, 4)
    optimizer = MODES["rounded"].optimizer(rounded, algorithm, lr=0.01)
    reference = copy.deepcopy(rounded)
    exact = getattr(torch.optim, algorithm)(reference.parameters(), lr=0.01, fused=algorithm == "AdamW")
    for step in range(3):
        for model, stepper in ((rounded, optimizer), (reference, exact)):
            model.zero_grad()
            model(torch.full((1, 16), 0.1 * (step + 1))).square().sum().backward()
            stepper.step()
        for param, other in zip(rounded.parameters(), reference.parameters(), strict=True):
            assert torch.equal(param, other.bfloat16().float())
            other.data.copy_(param)


def test_arrays_of_a_file_replace_generated_ones(tmp_path):
    arrays = tasks.digits()
    import numpy as np

    np.savez(tmp_path / "images.npz", **{name: part.numpy() for name, part in arrays._asdict().items()})
    for read, part in zip(tasks.read(tmp_path / "images.npz"), arrays, strict=True):
        assert torch.equal(read, part)
