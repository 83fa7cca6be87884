"""`offload_gradients=True`: the bits of the ordinary optimizer in any training loop, or an error that says what to do.

The device is simulated, as in `test_offload.py`.
"""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_lowprec.optim import AdamW, host_steps
from hf_lowprec.optim.algorithms import ALGORITHMS
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from tests.support.optim.every_optimizer import MODES, OPTIONS
from tests.support.optim.optimizer_contents import assert_equal, everything
from tests.support.optim.simulated_copies import simulate_device
from tests.support.random_numbers import randn

BUCKET = 300
"""Elements: the gradients of the model below are in several buckets, of which the table's is the last."""
OFFLOADED = {"offload_states": True, "offload_gradients": True}
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(host_steps, "BUCKET_ELEMENTS", BUCKET)
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", BUCKET)


class Tied(nn.Module):
    """A table that is also the head, a layer that is used twice, a norm in FP32, frozen and unused parameters."""

    def __init__(self, dtype=BF16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(32, 24))
        self.layer, self.second, self.frozen = (nn.Linear(24, 24) for _ in range(3))
        self.sometimes, self.unused = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(0, 3))
        self.frozen.requires_grad_(False)
        self.to(dtype)
        self.norm = nn.LayerNorm(24)

    def forward(self, x, shift: bool = False):
        hidden = self.layer(self.layer(x @ self.table).tanh())
        hidden = self.second(self.norm(hidden.float()).to(x.dtype)) + (self.sometimes.sum() if shift else 0)
        return self.frozen(hidden) @ self.table.T


def loss_of(model: Tied, seed: int, shift: bool = False) -> torch.Tensor:
    return model(randn(8, 32, seed=seed).to(model.table.dtype), shift).float().square().mean()


def backward(model: Tied, *seeds: int) -> None:
    for seed in seeds:
        loss_of(model, seed, shift=seed % 3 == 0).backward()


def train(model: Tied, optimizer: torch.optim.Optimizer, *steps: int, micro_batches: int = 2) -> None:
    for step in steps:
        backward(model, *range(10 * step, 10 * step + micro_batches))
        optimizer.step()
        optimizer.zero_grad()


def clip_by_torch(model: Tied) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def scaled_step(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def both(monkeypatch, run, make=AdamW, dtype=BF16, share=0.3, seed=0, **options) -> list:
    """What `run` returns, weights and states, of the ordinary optimizer and of the one that moves gradients."""
    found = []
    for offloaded in ({}, OFFLOADED):
        with monkeypatch.context() as patch:
            if offloaded:
                simulate_device(patch, share, seed)
            model = Tied(dtype)
            optimizer = make(model.parameters(), lr=0.01, **options, **offloaded)
            found.append([run(model, optimizer), everything(optimizer)])
    return found


def assert_bits_or_error(monkeypatch, run) -> None:
    """Assert that the gradients' move changes no bits, unless an error names it."""
    try:
        found = both(monkeypatch, run)
    except (RuntimeError, ValueError) as error:
        assert "offload_gradients" in str(error)
    else:
        assert_equal(*found)


ELEMENTWISE = ("SGD", "AdamW", "Adam", "RAdam", "Lion", "Adan", "ScheduleFreeAdamW")


@pytest.mark.combinations(1)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [(name, dtype, OPTIONS[name][0] | mode) for name in ELEMENTWISE for dtype, mode in MODES],
    ids=str,
)
def test_micro_batches_have_the_bits_of_the_ordinary_step(monkeypatch, name, dtype, options, share):
    def run(model, optimizer):
        train(model, optimizer, 0, 1, 2, micro_batches=3)

    assert_equal(*both(monkeypatch, run, ALGORITHMS[name], dtype=dtype, share=share, **options))


# Training loops. Each runs with both optimizers.


def backward_twice_and_no_zero_grad(model, optimizer):
    """`step` frees gradients by itself."""
    for step in range(3):
        if not optimizer.offload_gradients:
            optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward(retain_graph=True)
        loss.backward()
        backward(model, 10 * step)
        optimizer.step()


def unfrozen_and_added_later(model, optimizer):
    train(model, optimizer, 0)
    model.frozen.requires_grad_(True)
    model.layer.requires_grad_(False)
    train(model, optimizer, 1)
    model.extra = nn.Linear(24, 24).to(BF16)
    optimizer.add_param_group({"params": model.extra.parameters(), "lr": 1e-3, "rounding": "stochastic"})
    (loss_of(model, 20) + model.extra(model.table).float().sum()).backward()
    model.frozen.requires_grad_(False)  # its gradients are stepped
    train(model, optimizer, 3, 4)


def a_closure_and_a_scheduler(model, optimizer):
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=3)
    for step in range(3):
        optimizer.step(lambda step=step: backward(model, step))
        optimizer.zero_grad()
        scheduler.step()


def a_smaller_parameter_in_the_second_pass(model, optimizer):
    train(model, optimizer, 1, 2)
    backward(model, 1, 3, 4, 6)
    optimizer.step()
    optimizer.zero_grad()


def forgotten_and_interrupted(model, optimizer):
    def interrupt(grad):
        raise KeyboardInterrupt

    train(model, optimizer, 0)
    backward(model, 5)
    handle = model.norm.weight.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        backward(model, 6)
    handle.remove()
    optimizer.zero_grad()
    optimizer.step()
    train(model, optimizer, 1, 2)


def given_by_hand_hooked_and_checkpointed(model, optimizer):
    model.table.register_hook(lambda grad: grad * 0.5)
    for step in range(3):
        for param in (model.table, model.unused, model.frozen.weight):
            param.grad = randn(*param.shape, seed=step).to(BF16)
        inputs = randn(8, 32, seed=step).to(BF16).requires_grad_()
        for reentrant in (True, False):
            checkpoint(model, inputs, use_reentrant=reentrant).float().square().mean().backward()
        train(model, optimizer, step)


def norms_and_limits(model, optimizer):
    norms = []
    for step, limit in enumerate((0.01, 100.0, 0.01)):
        backward(model, step, step + 5)
        norms += [optimizer.global_grad_norm(), optimizer.clip_grad_norm_(limit)]
        optimizer.step()
        norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
    return norms


def saved_and_copied_between(model, optimizer):
    train(model, optimizer, 0)
    backward(model, 5)
    saved = copy.deepcopy(optimizer.state_dict())
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    optimizer.load_state_dict(saved)
    train(model, optimizer, 1)
    for twin, resumed in copies:
        train(twin, resumed, 1, 2)
    return [everything(resumed) for _, resumed in copies]


@pytest.mark.combinations(1)
@pytest.mark.parametrize(
    "loop",
    [
        *(backward_twice_and_no_zero_grad, unfrozen_and_added_later, a_closure_and_a_scheduler),
        a_smaller_parameter_in_the_second_pass,
        *(forgotten_and_interrupted, given_by_hand_hooked_and_checkpointed, norms_and_limits, saved_and_copied_between),
    ],
)
@pytest.mark.parametrize("rounding", ["kahan", "split", "stochastic"])
@pytest.mark.parametrize("limit", [{}, {"max_grad_norm": 0.05, "skip_nonfinite": True}], ids=str)
def test_loops_have_the_bits_of_the_ordinary_optimizer(monkeypatch, loop, rounding, limit):
    assert_equal(*both(monkeypatch, loop, rounding=rounding, **limit))


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

    found = both(monkeypatch, run, rounding="split", max_grad_norm=0.1, skip_nonfinite=True)
    assert_equal(*found)
    assert found[1][0] == 1


def test_one_bucket_of_gradients_exists_on_the_device(monkeypatch):
    simulate_device(monkeypatch)
    model = Tied()
    optimizer = AdamW(model.parameters(), lr=0.01, **OFFLOADED)
    params = [*model.parameters()]
    alive = []

    def count(grad):
        alive.append(grad.numel() + sum(param.grad.numel() for param in params if param.grad is not None))

    for param in params:
        if param.requires_grad:
            param.register_hook(count)
    for _ in range(3):
        backward(model, 1, 2)
        count(torch.empty(0))
        optimizer.step()
        assert all(param.grad is None for param in params)
    largest = max(param.numel() for param in params)
    assert max(alive) < BUCKET + 2 * largest < sum(param.numel() for param in params)
    assert alive[-1] <= BUCKET + largest


def test_clipping_by_torch_is_noticed_and_training_may_go_on(monkeypatch):
    def run(model, optimizer):
        if optimizer.offload_gradients:
            backward(model, 5, 6)
            clip_by_torch(model)
            before = everything(optimizer)
            for call in (optimizer.step, optimizer.global_grad_norm):
                with pytest.raises(RuntimeError, match=r"offload_gradients=True.*optimizer\.clip_grad_norm_"):
                    call()
            assert_equal(everything(optimizer), before)
            optimizer.zero_grad()
        train(model, optimizer, 1, 2)

    assert_equal(*both(monkeypatch, run))


# Loops that the move of gradients could disturb: the same bits, or an error that names it.

DISTURBED = {
    "norm between micro-batches": lambda m, o: (backward(m, 1), o.global_grad_norm(), backward(m, 2, 3)),
    "pass of the last bucket": lambda m, o: (backward(m, 1, 2), (m.table[:3] ** 2).float().sum().backward()),
    "replaced": lambda m, o: (backward(m, 1), setattr(m.second.weight, "grad", torch.ones_like(m.second.weight))),
    "replaced before a pass": lambda m, o: (DISTURBED["replaced"](m, o), backward(m, 2)),
    "zero_grad of the model": lambda m, o: (backward(m, 1), m.zero_grad(), backward(m, 2)),
    "zeros": lambda m, o: (train(m, o, 0), backward(m, 1), o.zero_grad(set_to_none=False)),
    "clipped by torch after the norm": lambda m, o: (backward(m, 1), o.global_grad_norm(), clip_by_torch(m)),
    "scaled": lambda m, o: scaled_step(loss_of(m, 1), o),
}


@pytest.mark.parametrize("bucket", [BUCKET, 1 << 20])
@pytest.mark.parametrize("name", DISTURBED)
def test_gradients_written_to_by_others_are_seen_or_noticed(monkeypatch, name, bucket):
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", bucket)

    def run(model, optimizer):
        DISTURBED[name](model, optimizer)
        optimizer.step()

    assert_bits_or_error(monkeypatch, run)


def test_it_can_be_stopped_between_steps(monkeypatch):
    def run(model, optimizer):
        train(model, optimizer, 0)
        backward(model, 1)
        if optimizer.offload_gradients:
            with pytest.raises(RuntimeError, match=r"call its step\(\) or zero_grad\(\) first"):
                optimizer.stop_gradient_release()
            optimizer.step()
            optimizer.stop_gradient_release()
        else:
            optimizer.step()
            optimizer.zero_grad()
        train(model, optimizer, 2)
        optimizer.offload_gradients = False

    assert_equal(*both(monkeypatch, run))


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("between", [True, False])
def test_a_newer_optimizer_takes_over_all_gradients(monkeypatch, moves, between):
    """Also one that is made between backward pass and step, while the first one still exists."""

    def run(model, optimizer):
        train(model, optimizer, 0)
        if between:
            backward(model, 1)
        options = OFFLOADED if moves and optimizer.offload_gradients else {}
        newer = AdamW(model.parameters(), lr=0.01, **options)
        backward(model, 2)
        newer.step()
        return everything(newer)

    assert_bits_or_error(monkeypatch, run)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload_gradients": True}, "add offload_states=True"),
        (OFFLOADED | {"gradient_release": True}, "use one of the two"),
        (OFFLOADED | {"offload_gradients": "maybe"}, "offload_gradients='maybe'"),
    ],
)
def test_arguments_that_exclude_each_other(options, message):
    with pytest.raises(ValueError, match=message):
        AdamW(Tied().parameters(), **options)
