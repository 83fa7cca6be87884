"""Low bits: compensations and remainders start with those that a cast has kept, and the next optimizer gets them."""

import copy
import io
import pickle
from collections.abc import Iterable

import pytest
import torch
from torch import nn

import hf_lowprec
from hf_lowprec import AdamW, fp32_state_dict
from hf_lowprec.optim.state.fp32_weights import fp32_estimates, low_bits_state
from hf_lowprec.rounding.attached_low_bits import attached_low_bits
from hf_lowprec.rounding.low_bits import fp32_value
from tests.support.optim.every_optimizer import BF16, FP16, OPTIONS, all_params, build, every_algorithm, same
from tests.support.optim.every_optimizer import train as train_params

SHAPES = [(40, 25), (257,), ()]
PAIRED = ["kahan", "split"]
"""The modes that store low bits besides the weight."""
CASES = [(BF16, "kahan"), (FP16, "kahan"), (BF16, "split")]


def model(dtype: torch.dtype = BF16, seed: int = 0) -> tuple[list[torch.Tensor], nn.ParameterList]:
    """FP32 weights of σ 0.02, and a cast model of them that has kept their low bits."""
    generator = torch.Generator().manual_seed(seed)
    exact = [0.02 * torch.randn(shape, generator=generator) for shape in SHAPES]
    params = nn.ParameterList(value.clone() for value in exact)
    hf_lowprec.cast_model(params, dtype)
    return exact, params


def train(optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    train_params(optimizer, all_params(optimizer), steps)


def estimates(params: nn.ParameterList, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return list(fp32_state_dict(params, optimizer).values())


def low_bits_of(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> torch.Tensor:
    """The compensation or remainder of a parameter."""
    return low_bits_state(optimizer.state[param])


def contents(params: nn.ParameterList, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All bits: weights, states and FP32 estimates."""
    states = [value for param in params for value in optimizer.state[param].values()]
    return [*params, *states, *estimates(params, optimizer)]


def close(found: list[torch.Tensor], exact: list[torch.Tensor]) -> bool:
    """To 2**-16 of each weight: low bits are 2**-8 of it at most, and kept to 2**-8 of themselves."""
    return all(((a.double() - b).abs() <= 2.0**-16 * b.abs()).all() for a, b in zip(found, exact, strict=True))


@pytest.mark.combinations(1)
@every_algorithm
@pytest.mark.parametrize(("dtype", "rounding"), CASES)
def test_steps_of_size_zero_change_no_weight(name, dtype, rounding):
    """Neither as stored nor in FP32: exactly for remainders, to 2**-16 for compensations."""
    exact, params = model(dtype)
    before = [param.detach().clone() for param in params]
    optimizer = build(name, params, lr=0.0, **{**OPTIONS[name][0], "weight_decay": 0.0, "rounding": rounding})
    for _ in range(3):
        found = estimates(params, optimizer)
        assert same(found, exact) if rounding == "split" else close(found, exact)
        assert same(list(params), before)
        train(optimizer, range(1))


@pytest.mark.parametrize("rounding", PAIRED)
def test_weights_that_come_in_16_bits_start_at_zero(rounding):
    params = nn.ParameterList([torch.randn(64).to(BF16)])
    hf_lowprec.cast_model(params)
    optimizer = AdamW(params, lr=0.0, rounding=rounding)
    train(optimizer, range(1))
    assert not low_bits_of(optimizer, params[0]).any()


@pytest.mark.parametrize("rounding", PAIRED)
@pytest.mark.parametrize("memory", ["transposed", "channels last", "with gaps"])
def test_weights_of_any_memory_format(memory, rounding):
    value = torch.randn(4, 6, 5, 3)
    if memory == "transposed":
        value = value.transpose(0, 3)
    elif memory == "channels last":
        value = value.to(memory_format=torch.channels_last)
    else:
        value = value[:, ::2]
    params = nn.ParameterList([nn.Parameter(value.clone(memory_format=torch.preserve_format))])
    hf_lowprec.cast_model(params)
    optimizer = AdamW(params, lr=0.0, rounding=rounding)
    train(optimizer, range(1))
    assert low_bits_of(optimizer, params[0]).any()
    assert close(estimates(params, optimizer), [value])


STEPS = range(1, 6)


@pytest.mark.parametrize("way", ["torch.save", "pickled", "copied"])
@pytest.mark.parametrize("saved_at", [0, 1, 3])
@pytest.mark.parametrize("rounding", PAIRED)
def test_training_resumes_bit_for_bit(way, saved_at, rounding):
    """Also from before the first step, where the low bits are in the state dict and nowhere else."""
    _, params = model()
    optimizer = AdamW(params, lr=1e-3, rounding=rounding)
    train(optimizer, STEPS[:saved_at])
    if way == "copied":
        resumed, other = copy.deepcopy((params, optimizer))
    elif way == "pickled":
        resumed, other = pickle.loads(pickle.dumps((params, optimizer)))
    else:
        buffer = io.BytesIO()
        torch.save({"weights": params.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
        saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        _, resumed = model(seed=1)  # of other weights, with low bits of their own
        other = AdamW(resumed, lr=1e-3, rounding=rounding)
        other.load_state_dict(saved["optimizer"])
        resumed.load_state_dict(saved["weights"])
    assert same(estimates(params, optimizer), estimates(resumed, other))
    train(optimizer, STEPS[saved_at:])
    train(other, STEPS[saved_at:])
    assert same(contents(params, optimizer), contents(resumed, other))
    assert not any(attached_low_bits(param) is not None for param in (*params, *resumed))


def test_a_parameter_that_is_stepped_later_has_its_low_bits_until_then():
    """A checkpoint has the states of some, and the low bits of the others."""
    exact, params = model()
    optimizer = AdamW(params, lr=0.0)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    saved = copy.deepcopy((params.state_dict(), optimizer.state_dict()))
    assert set(saved[1]["state"]) == {0}
    assert set(saved[1]["low_bits"]) == {1, 2}
    _, resumed = model(seed=1)
    other = AdamW(resumed, lr=0.0)
    other.load_state_dict(saved[1])
    resumed.load_state_dict(saved[0])
    assert close(estimates(resumed, other), exact)
    train(other, range(1))
    assert close(estimates(resumed, other), exact)


@pytest.mark.parametrize("rounding", PAIRED)
def test_clipping_before_the_first_step_creates_the_same_compensations(rounding):
    """With gradients enabled, where torch forbids changing parameters in place."""
    found = []
    for clipped in (False, True):
        _, params = model()
        optimizer = AdamW(params, lr=1e-3, rounding=rounding, first_parameter=0)
        for param in params:
            param.grad = torch.full_like(param, 2.0**-10)
        if clipped:
            with torch.enable_grad():
                optimizer.clip_grad_norm_(1e3)
        optimizer.step()
        found.append(contents(params, optimizer))
    assert same(*found)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_modes_without_a_compensation_drop_low_bits(rounding):
    _, params = model()
    optimizer = AdamW(params, rounding=rounding)
    train(optimizer, range(1))
    assert not any(attached_low_bits(param) is not None for param in params)
    assert same(estimates(params, optimizer), [param.float() for param in params])


@pytest.mark.parametrize("rounding", PAIRED)
def test_an_estimate_is_all_that_is_stored(rounding):
    """After three steps, none of which moves a weight of 1 by half an ulp."""
    params = nn.ParameterList([torch.ones(3, 5, dtype=BF16)])
    (param,) = params
    optimizer = AdamW(params, lr=1e-4, rounding=rounding)
    for _ in range(3):
        param.grad = torch.ones_like(param)
        optimizer.step()
    (found,) = estimates(params, optimizer)
    low_bits = low_bits_of(optimizer, param)
    assert low_bits.any()
    if (
        rounding == "kahan"
    ):  # both have 8 significant bits, and their exponents differ by less than 16: the sum is exact
        assert torch.equal(found.double(), param.double() + low_bits.double())
    else:
        assert torch.equal(found.view(torch.int32), param.detach().float().view(torch.int32) + low_bits)
    assert found.dtype == torch.float32
    assert not fp32_estimates(params, optimizer)(param).requires_grad


def test_before_the_first_step_the_optimizer_stays_without_state():
    """An empty entry per parameter would be saved, and a state dict with it is refused when it is loaded."""
    params = nn.ParameterList([torch.ones(3, 5, dtype=BF16)])
    optimizer = AdamW(params)
    estimates(params, optimizer)
    assert len(optimizer.state) == 0
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("keeps", [True, False])
def test_steps_of_a_second_optimizer_continue_the_exact_weights(keeps):
    """SGD has no other state, so with split weights two optimizers end with the bits of one."""
    found = []
    for count in (1, 2):
        _, params = model()
        for _ in range(count):
            optimizer = hf_lowprec.SGD(params, lr=1e-3, rounding="split")
            train(optimizer, [0] * (4 // count))
            if keeps and count == 2:
                hf_lowprec.keep_low_bits(optimizer)
        found.append(estimates(params, optimizer))
    assert same(*found) == keeps


def test_kept_low_bits_can_be_freed():
    _, params = model()
    optimizer = AdamW(params)
    train(optimizer, range(1))
    hf_lowprec.keep_low_bits(optimizer)
    assert all(attached_low_bits(param) is not None for param in params)
    hf_lowprec.drop_low_bits(params)
    assert not any("_low_bits" in vars(param) for param in params)
    with pytest.raises(TypeError, match="Adam has no low bits to keep; pass an hf_lowprec optimizer"):
        hf_lowprec.keep_low_bits(torch.optim.Adam(params))


@pytest.mark.parametrize("options", [{}, {"gradient_release": True}], ids=str)
@pytest.mark.parametrize("rounding", PAIRED)
@pytest.mark.parametrize(
    ("loaded", "remain"),
    [
        ("other", None), ("fp32", None), ("own", "own"), ("other own", "own"), ("clamp", "own"),
        ("saved optimizer", "saved"), ("optimizer saved", "saved"), ("other optimizer saved", "saved"),
    ],
)  # fmt: skip
def test_weights_that_are_loaded_between_steps(loaded, remain, rounding, options):
    """Low bits of other weights do not belong to them. Averaged ones may be loaded for an evaluation, and one's own."""
    _, params = model()
    whole = nn.ModuleDict({"part": params})
    optimizer, state, weights, held = AdamW(params, lr=1e-3, rounding=rounding, **options), None, {}, {}
    for when in ("saved", "own"):
        train(optimizer, STEPS)
        held[when] = [low_bits_state(optimizer.state[param]).clone() for param in params]
        weights[when] = copy.deepcopy(whole.state_dict())
        state = copy.deepcopy(optimizer.state_dict()) if when == "saved" else state
    weights["other"] = nn.ModuleDict({"part": model(seed=1)[1]}).state_dict()
    weights["fp32"] = {name: value.float() for name, value in weights["other"].items()}
    for each in loaded.split():
        if each == "optimizer":
            optimizer.load_state_dict(state)
        elif each == "clamp":
            [param.data.clamp_(-1, 1) for param in params]
        else:
            whole.load_state_dict(weights[each])
            if each in ("other", "fp32"):
                assert same(estimates(params, optimizer), [param.float() for param in params])
                assert same(estimates(*copy.deepcopy((params, optimizer))), [param.float() for param in params])
                saved = optimizer.state_dict()["state"].values()
                assert not any(low_bits_state(entry).any() for entry in saved)
    exact = [param.float() for param in params]
    if remain:
        exact = [fp32_value(param.detach(), bits) for param, bits in zip(params, held[remain], strict=True)]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(optimizer, range(1))
    stepped = estimates(params, optimizer)
    assert same(stepped, exact) if rounding == "split" else close(stepped, exact)
