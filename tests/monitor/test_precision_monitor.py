"""`PrecisionMonitor`: what a measurement contains, on tensors whose answer is known."""

import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import Adafactor

import hf_lowprec
from hf_lowprec.monitor.step_precision import sum_over_steps


def weights(value: float = 1.0, count: int = 4096) -> nn.Parameter:
    return nn.Parameter(torch.full((count // 64, 64), value, dtype=torch.bfloat16))


def step(optimizer, grad: float | torch.Tensor = 1.0) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param) * torch.as_tensor(grad, dtype=param.dtype)
    optimizer.step()


def measured(optimizer, grad: float | torch.Tensor = 1.0, monitor=None):
    monitor = monitor or hf_lowprec.PrecisionMonitor(optimizer)
    monitor.measure_next_step()
    step(optimizer, grad)
    return monitor.last


def nearest(params, lr: float) -> hf_lowprec.SGD:
    return hf_lowprec.SGD(params, lr=lr, rounding="nearest")


@pytest.mark.parametrize(("lr", "lost"), [(2.0**-7 / 10, 1), (2.0**-8, 0)])
def test_updates_of_a_tenth_of_a_spacing_are_lost_and_those_of_a_spacing_are_stored(lr, lost):
    """Below 1, where the updates go, the spacing is 2^-8."""
    numbers = measured(nearest([weights()], lr=lr)).by_kind["all"]
    assert numbers["lost_updates"] == pytest.approx(lost, abs=1e-6)
    assert numbers["lost_updates_error"] < 0.05
    assert numbers["never_moved"] == lost
    assert numbers["update_to_weight"] == pytest.approx(lr, rel=1e-6)


@pytest.mark.parametrize(("lr", "changed"), [(2.0**-7 / 10, 0), (2.0**-8, 1)])
def test_of_other_optimizers_it_is_known_which_weights_with_a_gradient_changed(lr, changed):
    has_gradient = torch.arange(64) % 4 == 0
    numbers = measured(torch.optim.SGD([weights(), weights(count=64 * 512)], lr=lr), has_gradient).by_kind["all"]
    assert numbers == {"changed": changed, "never_moved": pytest.approx(1 - changed / 4, rel=1e-3)}  # of a sample


def held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The stored value of each weight, computed from its bits: an FP32 number as an integer, or an exact FP64 sum."""
    values = []
    for param in optimizer.param_groups[0]["params"]:
        state, bits = optimizer.state[param], param.detach().view(torch.int16).long() << 16
        bits += state.get("remainder", torch.tensor(0)).long()
        values.append(param.double() + state["compensation"].double() if "compensation" in state else bits)
    return values


@pytest.mark.parametrize("measured_at", [{1, 6}, {6}])
@pytest.mark.parametrize("rounding", ["split", "kahan", "stochastic", "nearest"])
@pytest.mark.parametrize("gradient_release", [False, True])
def test_weights_have_moved_if_their_low_bits_have(rounding, measured_at, gradient_release):
    """A quarter of the weights never has a gradient; updates of the others are below the spacing of 16-bit weights."""
    torch.manual_seed(0)
    start = torch.randn(64, 64).bfloat16()
    options = {"lr": 3e-5, "rounding": rounding}
    params, twins = ([nn.Parameter(start.clone()), nn.Parameter(start.clone())] for _ in range(2))
    step(twin := hf_lowprec.SGD(twins, **options), 0.0)  # creates the states and changes nothing
    optimizer = hf_lowprec.SGD(params, **options, gradient_release=gradient_release)
    monitor = hf_lowprec.PrecisionMonitor(optimizer)
    for k in range(1, 7):
        if k in measured_at:
            monitor.measure_next_step()
        used = params if k < 3 else params[:1]
        sum((param * torch.randn(64, 64).bfloat16() * (torch.arange(64) % 4 > 0)).sum() for param in used).backward()
        optimizer.step()
        optimizer.zero_grad()
        if k in measured_at:
            found = [numbers["never_moved"] for numbers in monitor.last.by_tensor.values()]
            expected = [(now == first).double().mean() for now, first in zip(held(optimizer), held(twin), strict=True)]
            assert found == expected
    assert found[0] < 0.3 or rounding not in ("split", "kahan")


def test_weight_decay_that_arrives():
    torch.manual_seed(0)
    lost = {}
    for name, options in {
        "kahan": {"rounding": "kahan"},
        "nearest": {"rounding": "nearest"},
        "none": {"weight_decay": 0},
    }.items():
        options = {"lr": 0.05, "weight_decay": 0.002, **options}
        optimizer = hf_lowprec.AdamW([nn.Parameter(torch.randn(1000, 100).bfloat16())], **options)
        monitor = hf_lowprec.PrecisionMonitor(optimizer)
        for k in range(40):
            if k % 8 == 0:
                monitor.measure_next_step()
            step(optimizer, torch.randn(1000, 100))
        lost[name] = monitor.last
    numbers = {name: precision.by_kind["all"] for name, precision in lost.items()}
    # The decay is 1e-4 of a weight, a fiftieth of its spacing. In one rounding with the rest of an update of several
    # spacings, every fiftieth weight gets one spacing of it.
    for name in ("kahan", "nearest"):
        share, error = (numbers[name][key] for key in ("lost_weight_decay", "lost_weight_decay_error"))
        assert abs(share) < 4 * error < 1, name
    assert "lost_weight_decay" not in numbers["none"]


def test_numbers_by_kind_and_tensor():
    model = nn.ModuleDict({"lm_head": nn.Linear(64, 64, bias=False), "norm": nn.LayerNorm(64)}).bfloat16()
    optimizer = nearest(model.parameters(), lr=1e-3)
    precision = measured(optimizer, monitor=hf_lowprec.PrecisionMonitor(optimizer, model))
    assert list(precision.by_kind) == ["all", "norms", "head"]
    assert list(precision.by_tensor) == ["lm_head.weight", "norm.weight", "norm.bias"]
    assert precision.by_kind["head"] == precision.by_tensor["lm_head.weight"]
    assert precision.by_tensor["norm.weight"]["lost_updates"] == 1
    # `norm.bias` is zero, where any update can be stored.
    assert precision.by_tensor["norm.bias"]["lost_updates"] == pytest.approx(0, abs=0.01)


def test_a_learning_rate_that_was_loaded():
    """Loading replaces the dictionaries of the parameter groups."""
    optimizer, other = hf_lowprec.SGD([weights()], lr=2.0**-8), hf_lowprec.SGD([weights()], lr=2.0**-7)
    monitor = hf_lowprec.PrecisionMonitor(optimizer)
    for rate, loaded in ((2.0**-8, optimizer), (2.0**-7, other)):
        optimizer.load_state_dict(loaded.state_dict())
        assert measured(optimizer, monitor=monitor).by_kind["all"]["update_to_weight"] == pytest.approx(rate, rel=0.01)


def test_names_are_those_without_wrappers():
    """As of a model that DDP wraps and `torch.compile` compiles."""
    model = nn.ModuleDict(
        {"_orig_mod": nn.ModuleDict({"module": nn.ModuleDict({"layer": nn.Linear(8, 8)})})}
    ).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = measured(optimizer, monitor=hf_lowprec.PrecisionMonitor(optimizer, model))
    assert list(precision.by_tensor) == ["layer.weight", "layer.bias"]


def test_measurements_happen_when_they_are_asked_for():
    optimizer = torch.optim.SGD([weights()], lr=1e-3)
    monitor = hf_lowprec.PrecisionMonitor(optimizer, every=4)
    steps = []
    for _ in range(9):
        step(optimizer)
        steps.append(monitor.last.step)
    assert steps == [1, 1, 1, 4, 4, 4, 4, 8, 8]
    monitor.measure_next_step(number=100)
    step(optimizer)
    assert monitor.last.step == 100
    with pytest.raises(ValueError, match="every=-1 is negative"):
        hf_lowprec.PrecisionMonitor(optimizer, every=-1)


def test_findings_of_a_monitor_that_was_never_asked_to_measure():
    optimizer = torch.optim.SGD([weights()], lr=1e-3)
    monitor = hf_lowprec.PrecisionMonitor(optimizer)
    assert monitor.findings() == []
    step(optimizer)
    with pytest.raises(RuntimeError, match=r"any of the 1 steps so far; set every=100 .* call measure_next_step\(\)"):
        monitor.findings()
    monitor.measure_next_step()
    step(optimizer)
    assert [finding.code for finding in monitor.findings()] == ["updates_lost"]


def test_accelerates_wrapper_is_taken_off():
    from accelerate import Accelerator

    optimizer = torch.optim.SGD([weights()], lr=1e-3)
    monitor = hf_lowprec.PrecisionMonitor(Accelerator(cpu=True).prepare(optimizer))
    assert monitor.optimizer is optimizer


def test_a_skipped_step_and_one_with_a_closure_are_no_measurement():
    optimizer = hf_lowprec.SGD([weights()], lr=1e-3, skip_nonfinite=True)
    monitor = hf_lowprec.PrecisionMonitor(optimizer)
    assert measured(optimizer, monitor=monitor) is not None
    assert measured(optimizer, float("nan"), monitor) is None
    assert monitor.findings() == []
    assert measured(optimizer, monitor=monitor) is not None
    monitor.measure_next_step()
    optimizer.step(lambda: torch.zeros(()))
    assert monitor.last is None


def test_nan_is_no_number():
    optimizer = torch.optim.SGD([weights()], lr=1e-3)
    assert "lost_updates" not in measured(optimizer, float("nan")).by_kind["all"]


def test_parameters_without_gradients_and_groups_that_change():
    first, second = weights(), weights()
    optimizer = hf_lowprec.SGD([first, second], lr=1e-2)
    monitor = hf_lowprec.PrecisionMonitor(optimizer)
    for grads in ((1.0, None), (1.0, 1.0), (None, 1.0)):
        for param, grad in zip((first, second), grads, strict=True):
            param.grad = None if grad is None else torch.full_like(param, grad)
        monitor.measure_next_step()
        optimizer.step()
        moved = [numbers["never_moved"] for numbers in monitor.last.by_tensor.values()]
        assert moved == [0, 0 if second.grad is not None or grads[0] is None else 1]
    optimizer.add_param_group({"params": [weights()]})
    assert len(measured(optimizer, monitor=monitor).by_tensor) == 3


@pytest.mark.parametrize("cls", [hf_lowprec.SGD, torch.optim.SGD])
def test_a_parameter_that_is_replaced(cls):
    optimizer = cls([weights(), weights()], lr=2.0**-8)
    monitor = hf_lowprec.PrecisionMonitor(optimizer)
    measured(optimizer, monitor=monitor)
    optimizer.param_groups[0]["params"][1] = weights(2.0, count=64)
    numbers = list(measured(optimizer, monitor=monitor).by_tensor.values())
    if cls is hf_lowprec.SGD:
        ratios = [number["update_to_weight"] for number in numbers]
        assert ratios == pytest.approx([2.0**-8, 2.0**-9], rel=0.01)  # the first weight is a spacing below 1 by now
    else:
        assert [number["changed"] for number in numbers] == [1, 0]  # half a spacing of 2 is rounded to even


def test_updates_of_fp32_weights_are_not_measured():
    numbers = measured(torch.optim.SGD([nn.Parameter(torch.ones(64))], lr=1e-3)).by_kind["all"]
    assert numbers == {"never_moved": 0}


def test_steps_add_up():
    optimizer = nearest([weights()], lr=2.0**-7 / 10)
    lost, stored = measured(optimizer), measured(optimizer, 10.0)
    both = sum_over_steps([lost, stored]).by_kind["all"]["lost_updates"]
    assert both == pytest.approx(1 / (1 + 100), rel=0.05)


def test_a_closed_monitor_is_gone():
    optimizer = torch.optim.SGD([weights()], lr=1e-3)
    monitor = hf_lowprec.PrecisionMonitor(optimizer, every=1)
    step(optimizer)
    monitor.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    gone = weakref.ref(monitor)
    del monitor
    gc.collect()
    assert gone() is None


class Twice(torch.optim.SGD):
    """Both its own `step` and its parent's run hooks, once an optimizer of each class was built."""

    def step(self, closure=None):
        return super().step(closure)


def test_a_subclass_that_calls_its_parents_step_is_measured_once():
    torch.optim.SGD([weights()])
    optimizer = Twice([weights()], lr=2.0**-7 / 10)
    monitor = hf_lowprec.PrecisionMonitor(optimizer)
    assert measured(optimizer, monitor=monitor).by_kind["all"]["changed"] == 0
    assert monitor.steps == 1


def test_an_optimizer_that_chooses_its_learning_rate_is_watched():
    """Adafactor with `relative_step` has `lr=None` in its parameter groups."""
    optimizer = Adafactor([weights()])
    assert optimizer.param_groups[0]["lr"] is None
    precision = measured(optimizer)
    assert precision.learning_rate is None
    assert precision.by_kind["all"]["changed"] == 1  # its first rate is 0.01, more than a spacing below 1


@pytest.mark.parametrize("cls", [hf_lowprec.SGD, torch.optim.SGD, Twice])
def test_measurements_go_on_after_a_step_that_raised(cls):
    torch.optim.SGD([weights()])
    optimizer = cls([weights()], lr=2.0**-8)
    monitor = hf_lowprec.PrecisionMonitor(optimizer, every=1)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    step(optimizer)
    assert monitor.steps == monitor.last.step == 1
