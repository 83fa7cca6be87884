"""`gradient_release=True`: what parameters that were stepped in the backward pass exclude, and delayed clipping.

That weights and states have the bits of the ordinary step is in `test_early_gradients.py`.
"""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from hf_lowprec.monitor.precision_monitor import PrecisionMonitor
from hf_lowprec.optim import SGD, AdamW
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from tests.support.optim.early_gradients import Tied, backward, hooks_of, small_buckets, train
from tests.support.optim.every_optimizer import build
from tests.support.optim.optimizer_contents import assert_equal, everything

pytestmark = pytest.mark.usefixtures(small_buckets.__name__)
CLIPPED = {"clip": "delayed", "max_grad_norm": 0.01}


def released(release: bool = True, **options) -> tuple[nn.Module, AdamW]:
    """A model and an optimizer of the parameters that get gradients: torch's checkpoints save no others correctly."""
    model = Tied()
    params = [pair for pair in model.named_parameters() if pair[1].requires_grad and pair[1].numel()]
    return model, AdamW(params, lr=0.01, gradient_release=release, **options)


def assert_same(first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
    """The same weights and states."""
    found = [everything(optimizer) for optimizer in (first, second)]
    assert_equal(*([contents["params"], sorted(contents["state"].items())] for contents in found))


def test_an_unfrozen_parameter_is_released_from_its_second_step_on_without_zero_grad():
    model, optimizer = released()
    model.second.requires_grad_(False)
    train(model, optimizer, 1)
    model.second.requires_grad_(True)
    for left in (True, False):
        backward(model, 1)
        assert (model.second.weight.grad is not None) == left
        optimizer.step()
        assert model.second.weight.grad is None


def test_plans_of_buckets_are_reused():
    model, optimizer = released()
    train(model, optimizer, 1)
    plans = dict(optimizer.gradients._plans)
    assert len(plans) > 1
    train(model, optimizer, 2, 4, 5)
    assert optimizer.gradients._plans == plans


# Between the backward pass and step().


def stepped_again_by_hand(model, optimizer):
    model.second.weight.grad = torch.ones_like(model.second.weight)
    optimizer.step()


def another_learning_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.02
    optimizer.step()


def clipped_by_torch(model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def scaled(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


MIDDLE = r"between the backward pass and step"
ERRORS = {
    "a second backward pass": (lambda m, o: backward(m, 1), r"\w+ got a second gradient.*cannot be accumulated"),
    "a gradient by hand": (stepped_again_by_hand, r"second\.weight got a second gradient"),
    "another learning rate": (another_learning_rate, "change settings before the backward pass"),
    "clipped by torch": (clipped_by_torch, r"gradient of \w+(\.\w+)? was written to .*StableAdamW"),
    "clipped": (lambda m, o: o.clip_grad_norm_(1.0), r"clip_grad_norm_\(1\.0\): .* StableAdamW.*clip='delayed'"),
    "a norm": (lambda m, o: o.global_grad_norm(), "never known before a step"),
    "a scaler": (scaled, "GradScaler scales the loss"),
    "saved": (lambda m, o: o.state_dict(), MIDDLE),
    "copied": (lambda m, o: copy.deepcopy(o), MIDDLE),
    # As in a notebook, where the optimizer of an earlier cell still has its hooks.
    "another optimizer": (lambda m, o: AdamW(m.parameters()).step(), r"its zero_grad\(\), step\(\) and stop_gradient"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_comes_too_late_once_parameters_are_stepped(name):
    model, optimizer = released()
    backward(model, 1)
    call, message = ERRORS[name]
    with pytest.raises(RuntimeError, match=message):
        call(model, optimizer)


def test_attributes_set_later_are_checked():
    model, optimizer = released()
    optimizer.max_grad_norm = 1.0
    with pytest.raises(ValueError, match=r"max_grad_norm=1\.0 with clip='exact'"):
        backward(model, 1)


def test_zero_grad_drops_gradients_that_were_not_released(monkeypatch):
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", 1 << 20)
    (model, optimizer), (twin, reference) = released(), released(False)
    backward(model, 0)
    optimizer.zero_grad()
    train(model, optimizer, 1)
    train(twin, reference, 1)
    assert_same(optimizer, reference)


def test_loading_forgets_the_step_that_was_under_way():
    (model, optimizer), (twin, reference) = released(**CLIPPED), released(**CLIPPED)
    train(model, optimizer, 0)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    backward(model, 10)
    model.zero_grad()
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    train(model, optimizer, 1, 2)
    train(twin, reference, 0, 1, 2)
    assert_same(optimizer, reference)


def test_a_loop_goes_on_after_an_interrupted_backward_pass():
    """As if the parameters that the pass has stepped were all that had a gradient."""

    def fail(gradient):
        raise torch.OutOfMemoryError

    (model, optimizer), (twin, other) = released(), released(False)
    for interrupted in (model, twin):
        hook = interrupted.layer.register_forward_hook(
            lambda layer, inputs, output: output.register_hook(fail) and None
        )
        with pytest.raises(torch.OutOfMemoryError):
            backward(interrupted, 0)
        hook.remove()
    stepped = [param in optimizer.state for param in model.parameters()]
    assert any(stepped) and not all(stepped)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"finish its step before you continue: call zero_grad\(\) and step\(\)"):
        backward(model, 1)
    optimizer.zero_grad()
    optimizer.step()

    for param, was_stepped in zip(twin.parameters(), stepped, strict=True):
        param.grad = param.grad if was_stepped else None
    other.step()
    other.zero_grad()
    for pair in ((model, optimizer), (twin, other)):
        train(*pair, 1, 2)
    assert_same(optimizer, other)


def test_a_new_optimizer_takes_the_parameters_over():
    model, first = released()
    train(model, first, 1, 2)
    hooks = hooks_of(model)
    second = AdamW(first.param_groups[0]["params"], lr=0.01, gradient_release=True)
    backward(model, 4)
    first.zero_grad()
    first.step()  # nothing is left for it
    second.step()
    assert hooks_of(model) == hooks
    assert {int(state["step"]) for state in first.state.values()} == {2}
    assert {int(state["step"]) for state in second.state.values()} == {1}


# Clipping by the norm of the step before.


def test_delayed_clipping_clips_by_the_norm_of_the_step_before():
    """Against torch's SGD in FP64; ours computes w - lr · g in FP32, five roundings of relative size 2^-24 per step."""
    limit, lr = 0.02, 0.5
    model, exact = Tied(torch.float32), Tied(torch.float32).double()
    optimizer = SGD(model.parameters(), lr=lr, gradient_release=True, clip="delayed", max_grad_norm=limit)
    reference = torch.optim.SGD(exact.parameters(), lr=lr)
    before = 0.0
    for step in range(4):
        backward(model, step)
        assert float(optimizer.clip_grad_norm_(limit)) > 0
        optimizer.step()
        optimizer.zero_grad()
        backward(exact, step)
        trained = [param for param in exact.parameters() if param.grad is not None]
        norm = float(torch.nn.utils.get_total_norm([param.grad for param in trained]))
        assert float(optimizer.grad_norm) == pytest.approx(norm, rel=1e-5)
        for param in trained:
            param.grad *= min(1.0, limit / (before + 1e-6))
        reference.step()
        reference.zero_grad()
        before = norm
        assert norm > limit
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("flat", [False, True])
def test_distributed_checkpoints_hold_the_norm(flat):
    """Loading initializes the states of a new optimizer by a step with zero gradients given by hand."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    (model, optimizer), (twin, resumed) = released(**CLIPPED), released(**CLIPPED)
    train(model, optimizer, 0, 1)
    weights, states = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    set_state_dict(twin, resumed, model_state_dict=weights, optim_state_dict=states, options=options)
    for pair in ((model, optimizer), (twin, resumed)):
        train(*pair, 2, 3)
    assert_same(optimizer, resumed)


def test_clip_grad_norm_of_another_norm_is_an_error():
    model, optimizer = released(**CLIPPED)
    backward(model, 1)
    with pytest.raises(ValueError, match=r"set optimizer\.max_grad_norm before the backward pass"):
        optimizer.clip_grad_norm_(0.5)


# Measuring.


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "Muon", "StableAdamW", "Adafactor"])
def test_the_precision_monitor_measures_the_same(name, resumes):
    found = []
    for release in (False, True):
        model = Tied()
        optimizer = build(name, model.named_parameters(), lr=0.01, gradient_release=release)
        monitor = PrecisionMonitor(optimizer, model, every=2)
        if resumes:
            optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, 1, 2, 4, 5)
        found.append((monitor.last.step, monitor.last.by_kind))
        monitor.close()
    assert found[0] == found[1]
    assert optimizer.before_part == []
