"""`gradient_release=True`: the bits of the ordinary step, gradients that are freed on the way, and what is excluded."""

import copy
import functools
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.utils.checkpoint import checkpoint

from hf_lowprec.monitor.precision_monitor import PrecisionMonitor
from hf_lowprec.optim import SGD, AdamW
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from tests.support.optim.every_optimizer import NEED_ALL_GRADIENTS, build, every_configuration
from tests.support.random_numbers import randn
from tests.support.triton_available import rarely_on_triton

BUCKET = 300
"""Elements; the models below have several buckets of it."""
STEPS = 4


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", BUCKET)


def network(dtype=torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 4)]
    return nn.Sequential(*layers).to(dtype)


def batch(step: int, dtype=torch.bfloat16) -> torch.Tensor:
    return randn(8, 32, seed=step).to(dtype)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step, next(model.parameters()).dtype)).float().square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps=range(STEPS)) -> None:
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> list:
    return [*model.parameters(), *(optimizer.state[param] for param in model.parameters())]


def assert_same_bits(first: list, second: list) -> None:
    for one, other in zip(first, second, strict=True):
        if isinstance(one, dict):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)
        else:
            assert torch.equal(one, other)


def both(make_model, make_optimizer, train=train) -> list[list]:
    """Weights and states after training, ordinary and released."""
    found = []
    for options in ({}, {"gradient_release": True}):
        model = make_model()
        optimizer = make_optimizer(model, **options)
        train(model, optimizer)
        found.append(contents(model, optimizer))
    return found


# The same bits.


@pytest.mark.combinations(1)
@every_configuration
def test_weights_and_states_are_those_of_the_ordinary_step(name, dtype, options):
    if name in NEED_ALL_GRADIENTS:
        pytest.skip("it refuses")

    def make(model, **release):
        return build(name, model.parameters(), lr=0.01, **options, **release)

    assert_same_bits(*both(functools.partial(network, dtype), make))


@rarely_on_triton()
@pytest.mark.parametrize("options", [{}, {"rounding": "split", "state_dtype": torch.int8}], ids=str)
def test_backends_give_the_same_bits(any_backend, options):
    def make(model, **release):
        return AdamW(model.parameters(), lr=0.01, backend=any_backend, **options, **release)

    found = both(network, make)
    assert_same_bits(*found)
    assert any("exp_avg_code" in states for states in found[1][6:]) == bool(options)


class Tied(nn.Module):
    """An embedding that is also the head, as in most language models, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(32, 24))
        self.layer = nn.Linear(24, 24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(5))
        self.to(torch.bfloat16)

    def forward(self, x):
        return self.frozen(self.layer(self.layer(x @ self.table).tanh())) @ self.table.T


def test_a_changing_order_of_the_backward_pass():
    class Shuffled(Tied):
        calls = 0

        def forward(self, x):
            self.calls += 1
            extra = self.unused.sum() if self.calls % 2 else 0
            return super().forward(x) + extra

    assert_same_bits(*both(Shuffled, lambda model, **options: AdamW(model.parameters(), lr=0.01, **options)))


def test_parameters_that_are_unfrozen_and_added_later():
    def run(model, optimizer):
        train(model, optimizer, range(2))
        model[2].requires_grad_(True)
        train(model, optimizer, range(2, 4))
        optimizer.add_param_group({"params": model[4].parameters(), "lr": 1e-3})
        train(model, optimizer, range(4, 6))
        if optimizer.gradient_release:
            most = most_alive(model, optimizer, range(6, 7))
            assert most < sum(param.numel() for param in model.parameters())
        else:
            train(model, optimizer, range(6, 7))

    def make(model, **options):
        model[2].requires_grad_(False)
        return AdamW([*model[0].parameters(), *model[2].parameters()], lr=0.01, **options)

    assert_same_bits(*both(network, make, run))


def test_an_unfrozen_parameter_is_released_from_its_second_step_on_without_zero_grad():
    model = network()
    model[2].requires_grad_(False)
    optimizer = AdamW(model.parameters(), lr=0.01, gradient_release=True)
    loss_of(model, 0).backward()
    optimizer.step()
    model[2].requires_grad_(True)
    for left in (True, False):
        loss_of(model, 1).backward()
        assert (model[2].weight.grad is not None) == left
        optimizer.step()
        assert model[2].weight.grad is None


def test_gradient_checkpointing():
    class Checkpointed(Tied):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    assert_same_bits(*both(Checkpointed, lambda model, **o: AdamW(model.parameters(), lr=0.01, **o)))


def with_a_scheduler(model, optimizer):
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS)
    for step in range(STEPS):
        train(model, optimizer, [step])
        scheduler.step()


def with_a_closure(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 1)
        loss.backward()
        return loss

    for _ in range(STEPS):
        assert optimizer.step(closure) > 0


def with_gradient_hooks_of_others(model, optimizer):
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 0.5)
    train(model, optimizer)


def compiled_after_a_step(model, optimizer):
    train(model, optimizer, [0])
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(1, STEPS):
        loss_of(compiled, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def with_gradients_given_by_hand(model, optimizer):
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


LOOPS = [with_a_scheduler, with_a_closure, with_gradient_hooks_of_others, compiled_after_a_step]


@pytest.mark.parametrize("loop", [*LOOPS, with_gradients_given_by_hand])
def test_loops_have_the_bits_of_the_ordinary_step(loop):
    assert_same_bits(*both(network, lambda model, **release: AdamW(model.parameters(), lr=0.01, **release), loop))


# Gradients are freed.


def most_alive(model: nn.Module, optimizer: torch.optim.Optimizer, steps) -> int:
    """The most elements of gradients that exist at once, seen by hooks that run before those of the optimizer."""
    most = 0

    def count(grad: torch.Tensor) -> None:
        nonlocal most
        most = max(most, grad.numel() + sum(p.grad.numel() for p in model.parameters() if p.grad is not None))

    handles = [param.register_hook(count) for param in model.parameters()]
    train(model, optimizer, steps)
    for handle in handles:
        handle.remove()
    return most


def test_the_gradients_that_exist_at_once_are_those_of_a_bucket():
    model = network()
    largest = max(param.numel() for param in model.parameters())
    everything = sum(param.numel() for param in model.parameters())
    assert most_alive(model, AdamW(model.parameters(), lr=0.01), range(2)) == everything
    optimizer = AdamW(model.parameters(), lr=0.01, gradient_release=True)
    assert most_alive(model, optimizer, range(2)) < BUCKET + largest < everything
    assert all(param.grad is None for param in model.parameters())


def test_plans_of_buckets_are_reused():
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.01, gradient_release=True)
    train(model, optimizer, range(2))
    plans = dict(optimizer.gradients._plans)
    assert len(plans) > 1
    train(model, optimizer, range(2, 5))
    assert optimizer.gradients._plans == plans


# Options and models that are refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_release": True, "max_grad_norm": 1.0}, "use clip='delayed', .* or StableAdamW"),
        ({"gradient_release": True, "skip_nonfinite": True}, "skip_nonfinite=True needs all gradients"),
        ({"gradient_release": True, "clip": "delayed"}, "clip='delayed' needs max_grad_norm"),
        ({"clip": "delayed", "max_grad_norm": 1.0}, "clip='delayed' is only for gradient_release=True"),
    ],
)
def test_arguments_that_exclude_each_other(options, message):
    with pytest.raises(ValueError, match=message):
        AdamW(network().parameters(), **options)


def released(**options) -> tuple[nn.Sequential, AdamW]:
    model = network()
    return model, AdamW(model.named_parameters(), lr=0.01, gradient_release=True, **options)


def test_a_second_gradient_is_an_error_that_names_the_parameter():
    model, _optimizer = released()
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"4\.\w+ got a second gradient.*cannot be accumulated"):
        loss_of(model, 1).backward()


def test_another_optimizer_of_the_same_model_is_told_what_to_do():
    """As in a notebook, where the optimizer of an earlier cell still has its hooks."""
    model, optimizer = released()
    train(model, optimizer, [0])
    second = AdamW(model.parameters(), lr=0.01)
    with pytest.raises(RuntimeError, match=r"its zero_grad\(\), step\(\) and stop_gradient_release\(\), or delete"):
        train(model, second, [1, 2])
    optimizer.zero_grad()
    optimizer.step()  # ends the step of that backward pass
    optimizer.stop_gradient_release()
    train(model, second, [1, 2])


def test_a_parameter_that_was_stepped_may_get_no_gradient_by_hand():
    model, optimizer = released()
    loss_of(model, 0).backward()
    stepped = next(param for param in model.parameters() if param.grad is None)
    stepped.grad = torch.ones_like(stepped)
    with pytest.raises(RuntimeError, match="got a second gradient"):
        optimizer.step()


def test_zero_grad_drops_gradients_that_were_not_released(monkeypatch):
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", 1 << 20)
    model, optimizer = released()
    twin, reference = network(), None
    reference = AdamW(twin.parameters(), lr=0.01)
    loss_of(model, 0).backward()
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.step()
    train(twin, reference, [1])
    assert_same_bits(contents(model, optimizer), contents(twin, reference))


def test_a_shared_layer_in_reentrant_checkpoints_is_an_error():
    """Every reentrant checkpoint has a backward pass of its own, so the layer gets two gradients."""
    layer = nn.Linear(24, 24)
    optimizer = AdamW(layer.parameters(), gradient_release=True)
    x = torch.ones(2, 24, requires_grad=True)
    y = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match="got a second gradient"):
        y.sum().backward()
    del optimizer


def test_clipping_from_outside_is_an_error():
    model, optimizer = released()
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(1\.0\): .* StableAdamW.*clip='delayed'"):
        optimizer.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="no norm before it"):
        optimizer.global_grad_norm()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match=r"gradient of 0\.\w+ was written to .*StableAdamW"):
        optimizer.step()


def test_attributes_set_later_are_checked():
    model, optimizer = released()
    optimizer.max_grad_norm = 1.0
    with pytest.raises(ValueError, match=r"max_grad_norm=1\.0 with clip='exact'"):
        loss_of(model, 0).backward()


def test_a_learning_rate_that_changes_after_the_backward_pass_is_an_error():
    model, optimizer = released()
    loss_of(model, 0).backward()
    optimizer.param_groups[0]["lr"] = 0.02
    with pytest.raises(RuntimeError, match="change settings before the backward pass"):
        optimizer.step()


def test_a_grad_scaler_is_an_error():
    model, optimizer = released()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(RuntimeError, match="GradScaler scales the loss"):
        scaler.step(optimizer)


def test_nothing_is_saved_in_the_middle_of_a_step():
    model, optimizer = released()
    loss_of(model, 0).backward()
    for save in (optimizer.state_dict, lambda: copy.deepcopy(optimizer), optimizer.stop_gradient_release):
        with pytest.raises(RuntimeError, match="between the backward pass and step"):
            save()
    optimizer.step()
    assert optimizer.state_dict()["state"]


def test_loading_forgets_the_step_that_was_under_way():
    model, optimizer = released()
    train(model, optimizer, [0])
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    loss_of(model, 1).backward()
    model.zero_grad()
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    train(model, optimizer, [1, 2])
    twin, reference = released()
    train(twin, reference, range(3))
    assert_same_bits(contents(model, optimizer), contents(twin, reference))


# Hooks, copies.


def hooks_of(model: nn.Module) -> int:
    return sum(len(param._post_accumulate_grad_hooks or ()) for param in model.parameters())


def test_a_loop_goes_on_after_an_interrupted_backward_pass():
    """As if the parameters that the pass has stepped were all that had a gradient."""

    def interrupted(**options):
        model = network()
        optimizer = AdamW(model.parameters(), lr=0.1, **options)
        hook = model[1].register_forward_hook(lambda layer, inputs, output: output.register_hook(fail) and None)
        with pytest.raises(torch.OutOfMemoryError):
            loss_of(model, 0).backward()
        hook.remove()
        return model, optimizer

    def fail(gradient):
        raise torch.OutOfMemoryError

    released, optimizer = interrupted(gradient_release=True)
    stepped = [param in optimizer.state for param in released.parameters()]
    assert any(stepped) and not all(stepped)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"finish its step before you continue: call zero_grad\(\) and step\(\)"):
        loss_of(released, 1).backward()
    optimizer.zero_grad()
    optimizer.step()
    train(released, optimizer)

    ordinary, other = interrupted()
    for param, was_stepped in zip(ordinary.parameters(), stepped, strict=True):
        param.grad = param.grad if was_stepped else None
    other.step()
    other.zero_grad()
    train(ordinary, other)
    assert_same_bits(contents(released, optimizer), contents(ordinary, other))


def test_hooks_do_not_keep_an_optimizer_alive_and_end_with_it():
    model, optimizer = released()
    assert hooks_of(model) == 6
    reference = weakref.ref(optimizer)
    train(model, optimizer, range(2))
    del optimizer
    gc.collect()
    assert reference() is None and hooks_of(model) == 0
    train(model, AdamW(model.parameters()), range(1))


def test_a_new_optimizer_takes_the_parameters_over():
    model, first = released()
    train(model, first, range(2))
    second = AdamW(model.parameters(), lr=0.01, gradient_release=True)
    assert hooks_of(model) == 6
    loss_of(model, 2).backward()
    assert len(first.gradients._versions) == 0 < len(second.gradients._versions)
    first.zero_grad()
    first.step()  # nothing is left for it
    second.step()
    assert hooks_of(model) == 6
    assert {int(state["step"]) for state in first.state.values()} == {2}
    assert {int(state["step"]) for state in second.state.values()} == {1}


def test_the_release_can_be_stopped():
    model, optimizer = released(clip="delayed", max_grad_norm=1e9)
    train(model, optimizer, range(2))
    optimizer.stop_gradient_release()
    assert hooks_of(model) == 0
    train(model, optimizer, range(2, 4))
    twin = network()
    reference = AdamW(twin.parameters(), lr=0.01)
    train(twin, reference)
    assert_same_bits(contents(model, optimizer), contents(twin, reference))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_of_model_and_optimizer_release_too(duplicate):
    model, optimizer = released(clip="delayed", max_grad_norm=0.01)
    train(model, optimizer, range(2))
    twin, copied = duplicate((model, optimizer))
    assert hooks_of(twin) == 6
    for each in ((model, optimizer), (twin, copied)):
        assert most_alive(*each, range(2, 4)) < sum(param.numel() for param in model.parameters())
    assert_same_bits(contents(model, optimizer), contents(twin, copied))


# Clipping by the norm of the step before.


def test_delayed_clipping_clips_by_the_norm_of_the_step_before():
    """Against torch's SGD in FP64; ours computes w - lr · g in FP32, five roundings of relative size 2^-24 per step."""
    limit, lr = 0.02, 0.5
    model, exact = network(torch.float32), network(torch.float32).double()
    optimizer = SGD(model.parameters(), lr=lr, gradient_release=True, clip="delayed", max_grad_norm=limit)
    reference = torch.optim.SGD(exact.parameters(), lr=lr)
    before = 0.0
    for step in range(STEPS):
        loss_of(model, step).backward()
        assert float(optimizer.clip_grad_norm_(limit)) > 0
        optimizer.step()
        optimizer.zero_grad()
        loss_of(exact, step).backward()
        norm = float(torch.nn.utils.get_total_norm([param.grad for param in exact.parameters()]))
        assert float(optimizer.grad_norm) == pytest.approx(norm, rel=1e-5)
        for param in exact.parameters():
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
    model, optimizer = released(clip="delayed", max_grad_norm=0.05)
    train(model, optimizer, range(2))
    weights, states = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    train(model, optimizer, range(2, 4))
    twin, resumed = released(clip="delayed", max_grad_norm=0.05)
    set_state_dict(twin, resumed, model_state_dict=weights, optim_state_dict=states, options=options)
    train(twin, resumed, range(2, 4))
    assert_same_bits(contents(model, optimizer), contents(twin, resumed))


def test_clip_grad_norm_of_another_norm_is_an_error():
    model, optimizer = released(clip="delayed", max_grad_norm=1.0)
    loss_of(model, 0).backward()
    with pytest.raises(ValueError, match=r"set optimizer\.max_grad_norm before the backward pass"):
        optimizer.clip_grad_norm_(0.5)


# Measuring.


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "Muon", "StableAdamW", "Adafactor"])
def test_the_precision_monitor_measures_the_same(name, resumes):
    found = []
    for release in (False, True):
        model = network()
        optimizer = build(name, model.named_parameters(), lr=0.01, gradient_release=release)
        monitor = PrecisionMonitor(optimizer, model, every=2)
        if resumes:
            optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer)
        found.append((monitor.last.step, monitor.last.by_kind))
        monitor.close()
    assert found[0] == found[1]
    assert optimizer.before_part == []
