"""`offload_states=True`: the bits of the ordinary step, whenever copies are made, and what is refused.

The device is simulated: its tensors are on the CPU, and copies are made late or in random order. Training loops are in
`test_early_gradients.py`.
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

from hf_lowprec.monitor.byte_counts import expected_memory
from hf_lowprec.optim import AdamW, StableAdamW
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from hf_lowprec.optim.host_steps import SLOTS, OffloadedStep, Slot, staging_bytes
from hf_lowprec.optim.state.fp32_weights import fp32_state_dict
from tests.support.optim.early_gradients import BF16, KINDS, OFFLOADED, Tied, both, small_buckets, train
from tests.support.optim.optimizer_contents import assert_equal, everything
from tests.support.optim.simulated_copies import simulate_device

pytestmark = pytest.mark.usefixtures(small_buckets.__name__)


@pytest.fixture
def simulate(monkeypatch):
    """Makes a simulated device of the CPU; returns its copies."""
    return functools.partial(simulate_device, monkeypatch)


def offloaded(**options) -> tuple[nn.Module, AdamW]:
    model = Tied()
    return model, AdamW(model.named_parameters(), lr=0.01, offload_states=True, **options)


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
    found = []
    for offload in ({}, {"offload_states": True}):
        more = {key: value for key, value in options.items() if offload or key != "offload_gradients"}
        copies, model = simulate(0.3, seed) if offload else None, Tied()
        optimizer = AdamW(model.parameters(), lr=0.01, **more, **offload)
        train(model, optimizer, 1, 2, 4, 5)
        found.append(everything(optimizer))
    assert_equal(found[0]["params"], found[1]["params"])
    assert_equal(*(sorted(contents["state"].items()) for contents in found))
    weights = 4 * sum(param.nbytes for param in model.parameters() if param in optimizer.state)
    assert copies.sent == weights
    clip_factors = copies.fetched - 2 * weights
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
    optimizer = AdamW(params, **OFFLOADED)
    optimizer.gradients.average_later(params)
    for param in params:
        param.sum().backward()
    optimizer.host_steps.submit(copies, Slot(), (), lambda: gate.wait() and ())  # the thread is busy
    bucket = torch.full((16,), 3.0, dtype=BF16)
    assert optimizer.gradients.take_means(params, bucket.split([4, 12])) == [True, True]
    bucket.fill_(7.0)
    gate.set()
    assert float(optimizer.global_grad_norm()) == 12.0


def test_all_buckets_are_done_when_a_failed_one_is_reported(simulate, monkeypatch):
    simulate()
    (model, optimizer), done, step = offloaded(), [], OffloadedStep.step_on_host
    train(model, optimizer, 1)

    def failing_first(bucket):
        time.sleep(0.05)
        done.append(bucket)
        if len(done) == 1:
            raise RuntimeError("the first bucket")
        return step(bucket)

    monkeypatch.setattr(OffloadedStep, "step_on_host", failing_first)
    with pytest.raises(RuntimeError, match="the first bucket"):
        train(model, optimizer, 2)
    assert len(done) == SLOTS


def test_a_failed_copy_is_reported_by_step(simulate):
    copies, (model, optimizer) = simulate(), offloaded()

    def fail(name: str) -> None:
        if name == "send":
            raise RuntimeError("the device is gone")

    copies.before_call = fail
    with pytest.raises(RuntimeError, match="the device is gone"):
        train(model, optimizer, 1)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own handler, also in a process that was started in the background, where shells ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.combinations(1)
@pytest.mark.parametrize("kind", ["states", "offloaded"])
@pytest.mark.parametrize("number", range(12))
def test_a_signal_at_any_copy_leaves_a_whole_step(simulate, number, kind):
    """Ctrl-C is handled after the step that it interrupts; so weights and states are of one step."""
    copies, steps = simulate(0.5, number), [1, 2, 4]
    model = Tied()
    optimizer = AdamW(model.named_parameters(), lr=0.01, rounding="split", **KINDS[kind])
    train(model, optimizer, *steps[:1])
    copies.calls.clear()
    copies.before_call = lambda name: len(copies.calls) == number + 1 and signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, *steps[1:])
    copies.before_call = lambda name: None
    done = int(optimizer.state[model.table]["step"])
    assert done in ((1, 2, 3) if kind == "offloaded" else (2, 3))
    twin = Tied()
    reference = AdamW(twin.named_parameters(), lr=0.01, rounding="split")
    train(twin, reference, *steps[:done])
    assert_equal(everything(optimizer), everything(reference))


@pytest.mark.parametrize("options", [{"rounding": "split"}, {"rounding": "kahan", "state_dtype": torch.int8}], ids=str)
def test_a_checkpoint_resumes_with_and_without(monkeypatch, options):
    def resumed(model, optimizer):
        train(model, optimizer, 1, 2)
        saved, offload = copy.deepcopy(optimizer.state_dict()), optimizer.offload_states
        contents = []
        for elsewhere in (offload, not offload):
            twin = copy.deepcopy(model)
            with monkeypatch.context() as patch:
                simulate_device(patch)
                other = AdamW(twin.named_parameters(), lr=0.01, offload_states=elsewhere, **options)
                other.load_state_dict(copy.deepcopy(saved))
                train(twin, other, 4, 5)
                contents.append(everything(other))
        assert_equal(*contents)
        return contents

    assert_equal(*both(monkeypatch, resumed, "states", **options))


def test_the_mode_may_change_and_fp32_weights_be_read(monkeypatch):
    def change(model, optimizer):
        train(model, optimizer, 1, 2)
        weights = fp32_state_dict(model, optimizer)
        optimizer.param_groups[0]["rounding"] = "kahan"
        train(model, optimizer, 4, 5)
        return [*weights.values()]

    assert_equal(*both(monkeypatch, change, "states", rounding="split"))


def test_what_is_refused(simulate):
    with pytest.raises(ValueError, match=r"offload_states=True keeps .* but a parameter is on the CPU"):
        train(*offloaded(), 1)
    with pytest.raises(ValueError, match="StableAdamW needs whole tensors"):
        StableAdamW(Tied().parameters(), offload_states=True)
