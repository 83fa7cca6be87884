"""`offload_states=True`: the bits of the ordinary step, whenever copies are made, and what is refused.

The device is simulated: its tensors are on the CPU, and copies are made late or in random order.
"""

import copy
import functools
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hf_lowprec.monitor.memory_estimate import expected_memory
from hf_lowprec.optim import AdamW, Lion, StableAdamW, host_steps
from hf_lowprec.optim.algorithms import ALGORITHMS
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from hf_lowprec.optim.host_steps import Bucket, Slot, staging_bytes
from hf_lowprec.optim.state.fp32_weights import fp32_state_dict
from tests.support.optim.every_optimizer import MODES, OPTIONS
from tests.support.optim.optimizer_contents import assert_equal, everything
from tests.support.optim.simulated_copies import simulate_device
from tests.support.random_numbers import randn

STEPS = 4
BUCKET = 300
"""Elements: the model below has four buckets, one more than are on the host at once."""
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(host_steps, "BUCKET_ELEMENTS", BUCKET)
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", BUCKET)


@pytest.fixture
def simulate(monkeypatch):
    """Makes a simulated device of the CPU; returns its copies."""
    return functools.partial(simulate_device, monkeypatch)


def network(dtype=BF16) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Linear(32, 24),
        nn.GELU(),
        nn.Linear(24, 24),
        nn.GELU(),
        nn.Linear(24, 24),
        nn.GELU(),
        nn.Linear(24, 4),
    ]
    return nn.Sequential(*layers).to(dtype)


def train(model, optimizer, steps=range(STEPS), micro_batches=1) -> None:
    for step in steps:
        for micro_batch in range(micro_batches):
            inputs = randn(8, 32, seed=10 * step + micro_batch).to(model[0].weight.dtype)
            model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(make, dtype=BF16, **how) -> list:
    model = network(dtype)
    optimizer = make(model.parameters())
    train(model, optimizer, **how)
    return everything(optimizer)


SHARES = [0.0, 0.5, 1.0]
ELEMENTWISE = ("SGD", "AdamW", "Adam", "RAdam", "Lion", "Adan", "ScheduleFreeAdamW")


@pytest.mark.combinations(1)
@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [(name, dtype, OPTIONS[name][0] | mode) for name in ELEMENTWISE for dtype, mode in MODES],
    ids=str,
)
def test_weights_and_states_are_those_of_the_ordinary_step(simulate, name, dtype, options):
    def make(params, **more):
        return ALGORITHMS[name](params, lr=0.01, **options, **more)

    expected = trained(make, dtype)
    for share in SHARES:
        simulate(share)
        assert_equal(trained(lambda params: make(params, offload_states=True), dtype), expected)


HOW = [
    {"max_grad_norm": 0.01},
    {"max_grad_norm": 0.01, "skip_nonfinite": True},
    {"gradient_release": True},
    {"gradient_release": True, "clip": "delayed", "max_grad_norm": 0.01},
    {"state_dtype": torch.int8, "gradient_release": True, "rounding": "split"},
    {"backend": "eager"},
    {"offload_gradients": True},
    {"offload_gradients": True, "max_grad_norm": 0.01},
    {"offload_gradients": True, "max_grad_norm": 0.01, "skip_nonfinite": True, "rounding": "split"},
    {"offload_gradients": True, "state_dtype": torch.int8, "rounding": "stochastic"},
]


@pytest.mark.parametrize("options", HOW, ids=str)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.every_case) for seed in range(2, 5))])
def test_options_have_the_same_bits_in_any_order_of_copies(simulate, options, seed):
    ordinary = {key: value for key, value in options.items() if key != "offload_gradients"}
    expected = trained(functools.partial(AdamW, lr=0.01, **ordinary))
    copies = simulate(0.3, seed)
    assert_equal(trained(functools.partial(AdamW, lr=0.01, offload_states=True, **options)), expected)
    weights = sum(param.numel() for param in network().parameters())
    assert copies.sent == STEPS * 2 * weights
    clip_factors = copies.fetched - STEPS * 4 * weights
    assert (clip_factors > 0) == ("max_grad_norm" in options)


@pytest.mark.parametrize(
    ("offload_gradients", "together", "slot"), [(False, 1, 4096), (True, 1, 2048), (True, 3, 4096)]
)
def test_the_host_needs_what_is_estimated(monkeypatch, simulate, offload_gradients, together, slot):
    """Buckets of gradients may be larger than those of steps."""
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", 1 + together * 600)
    model = nn.ModuleList(nn.Linear(30, 20, bias=False, dtype=BF16) for _ in range(4))
    options = {"rounding": "split", "offload_states": True, "offload_gradients": offload_gradients}
    copies, optimizer = simulate(), AdamW(model.parameters(), **options)
    for _ in range(3):
        sum(layer.weight.sum() for layer in model).backward()
        optimizer.step()
        optimizer.zero_grad()
    estimated = expected_memory(model, optimizer)
    states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert sum(value.nbytes for value in states) == estimated.state.total() == 6 * 4 * 600
    clip_factors = 4 * 4
    assert copies.allocated - clip_factors == staging_bytes(model.parameters(), offload_gradients)
    assert staging_bytes(model.parameters(), offload_gradients) == 3 * slot


def test_means_over_ranks_are_copied_before_ddp_writes_to_its_bucket_again(simulate):
    params = [nn.Parameter(torch.ones(size, dtype=BF16)) for size in (4, 12)]
    copies, gate = simulate(0.0), threading.Event()
    optimizer = AdamW(params, offload_states=True, offload_gradients=True)
    optimizer.gradients.average_later(params)
    for param in params:
        param.sum().backward()
    optimizer.host_steps.submit(copies, Slot(), (), lambda: gate.wait() and ())  # the thread is busy
    bucket = torch.full((16,), 3.0, dtype=BF16)
    assert optimizer.gradients.take_means(params, bucket.split([4, 12])) == [True, True]
    bucket.fill_(7.0)
    gate.set()
    assert float(optimizer.global_grad_norm()) == 12.0


def test_all_buckets_are_done_when_a_failed_one_is_reported(simulate):
    model, done = network(), []
    optimizer = AdamW(model.parameters(), lr=0.01, offload_states=True)
    simulate()
    train(model, optimizer, range(1))
    step = Bucket.step

    def failing_first(bucket):
        time.sleep(0.05)
        done.append(bucket)
        if len(done) == 1:
            raise RuntimeError("the first bucket")
        return step(bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "step", failing_first)
        with pytest.raises(RuntimeError, match="the first bucket"):
            train(model, optimizer, range(1, 2))
    assert len(done) == 3  # as many as there are slots


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own handler, also in a process that was started in the background, where shells ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.combinations(1)
@pytest.mark.parametrize("offload_gradients", [False, True])
@pytest.mark.parametrize("number", range(12))
def test_a_signal_at_any_copy_leaves_a_whole_step(simulate, number, offload_gradients):
    """Ctrl-C is handled after the step that it interrupts; so weights and states are of one step."""
    model = network()
    offload = {"offload_states": True, "offload_gradients": offload_gradients}
    optimizer = AdamW(model.parameters(), lr=0.01, rounding="split", **offload)
    copies = simulate(0.5, number)
    train(model, optimizer, range(1))
    copies.calls.clear()
    copies.before_call = lambda name: len(copies.calls) == number + 1 and signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, range(1, 3))
    copies.before_call = lambda name: None
    done = int(optimizer.state[model[0].weight]["step"])
    assert done in ((1, 2, 3) if offload_gradients else (2, 3))
    assert_equal(everything(optimizer), trained(lambda p: AdamW(p, lr=0.01, rounding="split"), steps=range(done)))


def test_a_failed_copy_is_reported_by_step(simulate):
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.01, offload_states=True)
    copies = simulate()

    def fail(name: str) -> None:
        if name == "send":
            raise RuntimeError("the device is gone")

    copies.before_call = fail
    with pytest.raises(RuntimeError, match="the device is gone"):
        train(model, optimizer)


@pytest.mark.parametrize("options", [{"rounding": "split"}, {"rounding": "kahan", "state_dtype": torch.int8}], ids=str)
def test_a_checkpoint_resumes_with_and_without(simulate, options):
    def make(params, offload):
        return AdamW(params, lr=0.01, offload_states=offload, **options)

    expected = trained(lambda params: AdamW(params, lr=0.01, **options), steps=range(4))
    for saver, loader in ((True, False), (False, True), (True, True)):
        model = network()
        simulate()
        optimizer = make(model.parameters(), saver)
        train(model, optimizer, range(2))
        saved = copy.deepcopy(optimizer.state_dict())
        resumed = make(model.parameters(), loader)
        resumed.load_state_dict(saved)
        train(model, resumed, range(2, 4))
        assert_equal(everything(resumed), expected)


def test_the_mode_may_change_and_fp32_weights_be_read(simulate):
    def change(params, **more):
        model = network()
        optimizer = AdamW(model.parameters(), lr=0.01, rounding="split", **more)
        train(model, optimizer, range(2))
        weights = fp32_state_dict(model, optimizer)
        optimizer.param_groups[0]["rounding"] = "kahan"
        train(model, optimizer, range(2, 4))
        return [everything(optimizer), [*weights.values()]]

    expected = change(None)
    simulate()
    assert_equal(change(None, offload_states=True), expected)


def test_what_is_refused(simulate):
    params = [*network().parameters()]
    with pytest.raises(ValueError, match=r"offload_states=True keeps .* but a parameter is on the CPU"):
        train(model := network(), AdamW(model.parameters(), offload_states=True))
    with pytest.raises(ValueError, match="StableAdamW needs whole tensors"):
        StableAdamW(params, offload_states=True)
    with pytest.raises(ValueError, match="backend='triton' steps on a GPU"):
        Lion(params, offload_states=True, backend="triton")
