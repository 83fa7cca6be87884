"""Gradients that are taken during the backward pass, to be stepped or moved to the host: the bits of the ordinary
optimizer in any training loop, few gradients at a time, or an error that says what to do.
"""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_lowprec.optim import AdamW
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from hf_lowprec.optim.gradients.collector import collector_of
from tests.support.optim.early_gradients import (
    BF16,
    BUCKET,
    KINDS,
    OFFLOADED,
    Tied,
    backward,
    both,
    gradients_alive,
    hooks_of,
    loss_of,
    small_buckets,
    train,
)
from tests.support.optim.every_optimizer import CONFIGURATIONS, NEED_ALL_GRADIENTS, build
from tests.support.optim.optimizer_contents import assert_equal, everything
from tests.support.optim.simulated_copies import simulate_device
from tests.support.random_numbers import randn
from tests.support.triton_available import rarely_on_triton

pytestmark = pytest.mark.usefixtures(small_buckets.__name__)
WHOLE_TENSORS = ("Adafactor", "Muon", "Prodigy", "StableAdamW")
PASSES = {"released": 1, "states": 3, "offloaded": 3}
"""Backward passes per step."""


CASES = [
    pytest.param(*case, kind, [0.0, 0.5, 1.0][number % 3], id=f"{kind}-{case}")
    for kind in KINDS
    for number, case in enumerate(CONFIGURATIONS)
    if case[0] not in (NEED_ALL_GRADIENTS if kind == "released" else WHOLE_TENSORS)
    if kind == "released" or "factored" not in case[2]
]


@pytest.mark.parametrize(("name", "dtype", "options", "kind", "share"), CASES)
def test_weights_and_states_are_those_of_the_ordinary_step(monkeypatch, name, dtype, options, kind, share):

    def run(model, optimizer):
        train(model, optimizer, 0, 1, 2, passes=PASSES[kind])

    def make(params, **keywords):
        return build(name, params, **keywords)

    assert_equal(*both(monkeypatch, run, kind, make, dtype, share, **options))


@rarely_on_triton()
@pytest.mark.parametrize("options", [{}, {"rounding": "split", "state_dtype": torch.int8}], ids=str)
def test_backends_give_the_same_bits(monkeypatch, any_backend, options):
    def run(model, optimizer):
        train(model, optimizer, 0, 1, 2)

    found = both(monkeypatch, run, "released", backend=any_backend, **options)
    assert_equal(*found)
    assert any("exp_avg_code" in states for states in found[1][1]["state"].values()) == bool(options)


# Training loops.


def a_closure_and_a_scheduler(model, optimizer, passes):
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=3)
    for step in range(3):
        optimizer.step(lambda step=step: backward(model, *range(step, step + passes)))
        optimizer.zero_grad()
        scheduler.step()


def unfrozen_and_added_later(model, optimizer, passes):
    train(model, optimizer, 0, passes=passes)
    model.frozen.requires_grad_(True)
    model.layer.requires_grad_(False)
    train(model, optimizer, 1, passes=passes)
    model.extra = nn.Linear(32, 32).to(BF16)
    optimizer.add_param_group({"params": model.extra.named_parameters(), "lr": 1e-3, "rounding": "stochastic"})
    (loss_of(model, 20) + model.extra(model.table).float().sum()).backward()
    model.frozen.requires_grad_(False)  # its gradients are stepped
    if passes == 1:
        optimizer.step()
        optimizer.zero_grad()
    train(model, optimizer, 3, 4, passes=passes)


def given_by_hand_hooked_and_checkpointed(model, optimizer, passes):
    model.table.register_hook(lambda grad: grad * 0.5)
    for step in range(3):
        for param in (model.table, model.unused, model.frozen.weight):
            param.grad = randn(*param.shape, seed=step).to(BF16)
        inputs = randn(8, 24, seed=step).to(BF16).requires_grad_()
        for reentrant in (True, False)[:passes]:
            checkpoint(model, inputs, use_reentrant=reentrant).float().square().mean().backward()
        backward(model, *range(step, step + passes - 1))
        optimizer.step()
        optimizer.zero_grad()


def saved_and_copied(model, optimizer, passes):
    """Where passes are accumulated, between two of them."""
    train(model, optimizer, 0, passes=passes)
    backward(model, *range(5, 4 + passes))
    saved = copy.deepcopy(optimizer.state_dict())
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    optimizer.load_state_dict(saved)
    train(model, optimizer, 1, passes=passes)
    for twin, resumed in copies:
        assert hooks_of(twin) == hooks_of(model)
        train(twin, resumed, 1, 2, passes=passes)
    return [everything(resumed) for _, resumed in copies]


def stopped(model, optimizer, passes):
    train(model, optimizer, 0, passes=passes)
    backward(model, 1)
    if collector_of(optimizer):
        words = r"between the backward pass and step\(\)|call its step\(\) or zero_grad\(\) first"
        with pytest.raises(RuntimeError, match=words):
            optimizer.stop_gradient_release()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.stop_gradient_release()
    assert hooks_of(model) == 0
    train(model, optimizer, 2, 3, passes=3)


def compiled_after_a_step(model, optimizer, passes):
    train(model, optimizer, 0)
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(1, 4):
        loss_of(compiled, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def backward_twice_and_no_zero_grad(model, optimizer, passes):
    """`step` frees gradients by itself."""
    for step in range(3):
        if not optimizer.offload_gradients:
            optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward(retain_graph=True)
        loss.backward()
        backward(model, 10 * step)
        optimizer.step()


def a_smaller_parameter_in_the_second_pass(model, optimizer, passes):
    train(model, optimizer, 1, 2, passes=2)
    backward(model, 1, 3, 4, 6)
    optimizer.step()
    optimizer.zero_grad()


def forgotten_and_interrupted(model, optimizer, passes):
    def interrupt(grad):
        raise KeyboardInterrupt

    train(model, optimizer, 0, passes=2)
    backward(model, 5)
    handle = model.norm.weight.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        backward(model, 6)
    handle.remove()
    optimizer.zero_grad()
    optimizer.step()
    train(model, optimizer, 1, 2, passes=2)


def norms_and_limits(model, optimizer, passes):
    norms = []
    for step, limit in enumerate((0.01, 100.0, 0.01)):
        backward(model, step, step + 5)
        norms += [optimizer.global_grad_norm(), optimizer.clip_grad_norm_(limit)]
        optimizer.step()
        norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
    return norms


def clipped_by_torch_and_noticed(model, optimizer, passes):
    if optimizer.offload_gradients:
        backward(model, 5, 6)
        clip_by_torch(model)
        before = everything(optimizer)
        for call in (optimizer.step, optimizer.global_grad_norm):
            with pytest.raises(RuntimeError, match=r"offload_gradients=True.*optimizer\.clip_grad_norm_"):
                call()
        assert_equal(everything(optimizer), before)
        optimizer.zero_grad()
    train(model, optimizer, 1, 2, passes=2)


LOOPS = (a_closure_and_a_scheduler, unfrozen_and_added_later, given_by_hand_hooked_and_checkpointed, saved_and_copied)
OF_KIND = {
    "released": (*LOOPS, stopped, compiled_after_a_step),
    "offloaded": (
        *(*LOOPS, stopped, backward_twice_and_no_zero_grad, a_smaller_parameter_in_the_second_pass),
        *(forgotten_and_interrupted, norms_and_limits, clipped_by_torch_and_noticed),
    ),
}


@pytest.mark.combinations(1)
@pytest.mark.parametrize(("kind", "loop"), [(kind, loop) for kind, loops in OF_KIND.items() for loop in loops])
@pytest.mark.parametrize("rounding", ["kahan", "split", "stochastic"])
@pytest.mark.parametrize("limit", [{}, {"max_grad_norm": 0.05, "skip_nonfinite": True}], ids=str)
def test_loops_have_the_bits_of_the_ordinary_optimizer(monkeypatch, kind, loop, rounding, limit):
    limit = {} if kind == "released" else limit
    assert_equal(*both(monkeypatch, lambda *pair: loop(*pair, PASSES[kind]), kind, rounding=rounding, **limit))


def test_a_step_with_nonfinite_gradients_is_skipped(monkeypatch):
    def run(model, optimizer):
        train(model, optimizer, 0)
        before = everything(optimizer)
        backward(model, 5)
        (loss_of(model, 6) * float("inf")).backward()
        optimizer.step()
        optimizer.zero_grad()
        after = everything(optimizer)
        assert_equal([after["params"], after["state"]], [before["params"], before["state"]])
        train(model, optimizer, 1)
        return optimizer.skipped_steps

    found = both(monkeypatch, run, "offloaded", rounding="split", max_grad_norm=0.1, skip_nonfinite=True)
    assert_equal(*found)
    assert found[1][0] == 1


# Gradients are freed, and hooks end.


@pytest.mark.parametrize("kind", OF_KIND)
def test_the_gradients_that_exist_at_once_are_those_of_a_bucket(monkeypatch, kind):
    simulate_device(monkeypatch)
    model = Tied()
    largest = max(param.numel() for param in model.parameters())
    everything = sum(param.numel() for param in model.parameters() if param.requires_grad)
    optimizer = AdamW(model.parameters(), lr=0.01, **KINDS[kind])
    for _ in range(3):
        alive = gradients_alive(model, lambda: backward(model, *range(3, 3 + PASSES[kind])))
        assert max(alive) < BUCKET + 2 * largest < everything
        assert alive[-1] <= BUCKET + largest
        optimizer.step()
        assert all(param.grad is None for param in model.parameters())


def test_hooks_do_not_keep_an_optimizer_alive_and_end_with_it(monkeypatch):
    simulate_device(monkeypatch)
    for kind in ("released", "offloaded"):
        model = Tied()
        optimizer = AdamW(model.parameters(), **KINDS[kind])
        assert hooks_of(model) == sum(param.requires_grad for param in model.parameters())
        reference = weakref.ref(optimizer)
        train(model, optimizer, 0, 1)
        del optimizer
        gc.collect()
        assert reference() is None and hooks_of(model) == 0
        train(model, AdamW(model.parameters()), 0)


# Loops that the move of gradients to the host could disturb: the same bits, or an error that names it.


def clip_by_torch(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def scaled_step(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model, 1)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def newer_optimizer(between, moves):
    """One that is built while the first one still exists, also `between` backward pass and step."""

    def run(model, optimizer):
        train(model, optimizer, 0)
        if between:
            backward(model, 1)
        newer = AdamW(model.parameters(), lr=0.01, **(OFFLOADED if moves and optimizer.offload_gradients else {}))
        backward(model, 2)
        newer.step()
        return everything(newer)

    return run


DISTURBED = {
    "norm between passes": lambda m, o: (backward(m, 1), o.global_grad_norm(), backward(m, 2, 3)),
    "pass of the last bucket": lambda m, o: (backward(m, 1, 2), (m.table[:3] ** 2).float().sum().backward()),
    "replaced": lambda m, o: (backward(m, 1), setattr(m.second.weight, "grad", torch.ones_like(m.second.weight))),
    "replaced before a pass": lambda m, o: (DISTURBED["replaced"](m, o), backward(m, 2)),
    "zero_grad of the model": lambda m, o: (backward(m, 1), m.zero_grad(), backward(m, 2)),
    "zeros": lambda m, o: (train(m, o, 0), backward(m, 1), o.zero_grad(set_to_none=False)),
    "clipped by torch after the norm": lambda m, o: (backward(m, 1), o.global_grad_norm(), clip_by_torch(m)),
    "scaled": scaled_step,
}
NEWER = {f"newer optimizer {between}{moves}": newer_optimizer(between, moves) for between in (0, 1) for moves in (0, 1)}


@pytest.mark.parametrize("bucket", [BUCKET, 1 << 20])
@pytest.mark.parametrize("name", [*DISTURBED, *NEWER])
def test_gradients_written_to_by_others_are_seen_or_noticed(monkeypatch, name, bucket):
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", bucket)

    def run(model, optimizer):
        if name in NEWER:
            return NEWER[name](model, optimizer)
        DISTURBED[name](model, optimizer)
        optimizer.step()

    try:
        found = both(monkeypatch, run, "offloaded")
    except (RuntimeError, ValueError) as error:
        assert "offload_gradients" in str(error)
    else:
        assert_equal(*found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_release": True, "max_grad_norm": 1.0}, "use clip='delayed', .* or StableAdamW"),
        ({"gradient_release": True, "skip_nonfinite": True}, "skip_nonfinite=True needs all gradients"),
        ({"gradient_release": True, "clip": "delayed"}, "clip='delayed' needs max_grad_norm"),
        ({"clip": "delayed", "max_grad_norm": 1.0}, "clip='delayed' is only for gradient_release=True"),
        ({"offload_gradients": True}, "add offload_states=True"),
        (OFFLOADED | {"gradient_release": True}, "use one of the two"),
        ({"offload_states": True, "backend": "triton"}, "backend='triton' steps on a GPU"),
    ],
)
def test_arguments_that_exclude_each_other(options, message):
    with pytest.raises(ValueError, match=message):
        AdamW(Tied().parameters(), **options)
