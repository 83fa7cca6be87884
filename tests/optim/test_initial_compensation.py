"""The compensation that Kahan starts with: what training and `fp32_state_dict` make of low bits, a dither, and zero."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import hf_lowprec
from hf_lowprec import AdamW, fp32_state_dict
from hf_lowprec.rounding.low_bits import low_bits
from tests.support.optim.every_optimizer import BF16, FP16, FP32, OPTIONS, build, every_algorithm
from tests.support.triton_available import device_of, quiet_interpreter

SHAPES = [(40, 25), (257,), ()]
KINDS = ["low_bits", "dither", "zero"]
PAIRED = ["kahan", "split"]
"""The modes that store low bits besides the weight."""
CASES = [(BF16, "kahan"), (FP16, "kahan"), (BF16, "split")]


def model(dtype: torch.dtype = BF16, seed: int = 0) -> tuple[list[torch.Tensor], nn.ParameterList]:
    """FP32 weights of σ 0.02, and a cast model of them that has kept their low bits."""
    generator = torch.Generator().manual_seed(seed)
    exact = [0.02 * torch.randn(shape, generator=generator) for shape in SHAPES]
    params = nn.ParameterList(value.clone() for value in exact)
    hf_lowprec.cast_model(params, dtype, keep_low_bits=True)
    return exact, params


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.randn(param.shape, generator=generator).to(param)
        optimizer.step()


def estimates(params: nn.ParameterList, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return list(fp32_state_dict(params, optimizer).values())


def low_bits_of(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> torch.Tensor:
    """The compensation or remainder of a parameter."""
    (name,) = {"compensation", "remainder"} & optimizer.state[param].keys()
    return optimizer.state[param][name]


def contents(params: nn.ParameterList, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All bits: weights, states and FP32 estimates."""
    states = [value for param in params for value in optimizer.state[param].values()]
    return [*params, *states, *estimates(params, optimizer)]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def close(found: list[torch.Tensor], exact: list[torch.Tensor]) -> bool:
    """To 2**-16 of each weight: low bits are 2**-8 of it at most, and kept to 2**-8 of themselves."""
    return all(((a.double() - b).abs() <= 2.0**-16 * b.abs()).all() for a, b in zip(found, exact, strict=True))


@every_algorithm
@pytest.mark.filterwarnings("ignore:the low bits that cast_model:RuntimeWarning")
@pytest.mark.parametrize(("dtype", "rounding"), CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_size_zero_change_no_weight(name, dtype, rounding, kind):
    """Neither as stored nor in FP32: exactly for a dither, for zero and for remainders, to 2**-16 for compensations."""
    exact, params = model(dtype)
    before = [param.detach().clone() for param in params]
    options = {**OPTIONS[name][0], "weight_decay": 0.0, "initial_compensation": kind, "rounding": rounding}
    optimizer = build(name, params, lr=0.0, **options)
    for _ in range(3):
        found = estimates(params, optimizer)
        if kind == "low_bits":
            assert same(found, exact) if rounding == "split" else close(found, exact)
            assert not same(found, [value.float() for value in before])
        elif not optimizer.state:
            assert close(found, exact)  # what the cast has kept, until it is dropped
        else:
            assert same(found, [value.float() for value in before])
        assert same(list(params), before)
        train(optimizer, range(1))


@pytest.mark.parametrize("rounding", PAIRED)
def test_without_low_bits_a_step_of_size_zero_gives_the_given_weights_exactly(rounding):
    """16-bit weights of all sizes, as a checkpoint on disk holds them: before the first step, and after it."""
    weights = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(BF16)
    weights = weights[weights.isfinite()]
    params = nn.ParameterList([weights.clone()])
    optimizer = AdamW(params, lr=0.0, rounding=rounding)
    for _ in range(3):
        (found,) = estimates(params, optimizer)
        assert torch.equal(found, weights.float())
        assert torch.equal(params[0], weights)
        train(optimizer, range(1))
    # (Of the smallest numbers, a dither may be too small for BF16.)
    dithered = low_bits_of(optimizer, params[0])[weights.abs() > 2.0**-100]
    # One of 256 numbers of 8 bits is zero: 228 of these 58,366, with a standard deviation of 15.
    assert dithered.all()


@pytest.mark.filterwarnings("ignore:the low bits that cast_model:RuntimeWarning")
@pytest.mark.parametrize("rounding", PAIRED)
def test_an_averaged_model_starts_with_the_same_estimates(rounding):
    for kind in KINDS:
        exact, params = model()
        optimizer = AdamW(params, lr=0.0, rounding=rounding, initial_compensation=kind)
        train(optimizer, range(1))
        averaged = hf_lowprec.AveragedModel(params)
        averaged.update_parameters(params, optimizer)
        assert same(list(averaged.module.parameters()), estimates(params, optimizer))
        assert close(list(averaged.module.parameters()), exact) == (kind == "low_bits")


@pytest.mark.parametrize("kind", ["low_bits", "dither"])
def test_estimates_follow_fp32(kind):
    """30 steps of lr 1e-6 on weights in the middle of their binade; FP32 states, so that the updates are the same.

    Weights in (0.6, 0.9) are spaced 2**-8, and compensations up to 2**-9, 2**-17 at most. Each step rounds one to a
    neighbour: an error of 2**-17 at most. Where a weight has moved to its neighbour, odd and even change places, and
    its dither is rounded to BF16 the other way when it is subtracted: another 2**-17. Low bits are off by 2**-17 at
    first. FP32's own roundings, 2**-24, vanish beside these. So, at worst 32 · 2**-17; for the mean over 4,096
    elements, whose errors are independent and unbiased, 2**-17 · √32 / √4096 = 7e-7, of which five.
    """
    generator = torch.Generator().manual_seed(0)
    exact = 0.6 + 0.3 * torch.rand(4096, generator=generator)
    params = nn.ParameterList([exact.clone()])
    hf_lowprec.cast_model(params, keep_low_bits=kind == "low_bits")
    start = exact if kind == "low_bits" else params[0].detach().float()
    reference = nn.Parameter(start.clone())
    theirs = torch.optim.AdamW([reference], lr=1e-6)
    ours = AdamW(params, lr=1e-6, state_dtype=FP32)
    for _ in range(30):
        gradient = torch.randn(4096, generator=generator).to(BF16)
        reference.grad, params[0].grad = gradient.float(), gradient
        theirs.step()
        ours.step()
    (found,) = estimates(params, ours)
    error = found.double() - reference.double()
    assert error.abs().max() <= 32 * 2.0**-17
    assert error.mean().abs() <= 5 * 2.0**-17 * (32 / 4096) ** 0.5
    moved = (params[0].detach().float() != start.to(BF16).float()).double().mean()
    assert moved >= 0.0005  # of 30e-6 / 2**-8 = 0.8% if all updates had one sign


@quiet_interpreter
@pytest.mark.filterwarnings("ignore:the low bits that cast_model:RuntimeWarning")
@pytest.mark.parametrize("kind", ["low_bits", "dither"])
@pytest.mark.parametrize(("dtype", "rounding"), CASES)
def test_backends_agree_from_the_first_step(backend, kind, dtype, rounding):
    found = []
    for name in ("eager", backend):
        _, params = model(dtype)
        params.to(device_of(backend))
        options = {"initial_compensation": kind, "rounding": rounding, "first_parameter": 0}
        optimizer = AdamW(params, lr=1e-3, backend=name, **options)
        train(optimizer, range(3))
        found.append(contents(params, optimizer))
    assert same(*found)


def compensations(seed: int = 0, first_parameter: int | None = 0) -> list[torch.Tensor]:
    """Of three parameters with the same weights, after one step of size zero."""
    params = [nn.Parameter(torch.ones(4096, dtype=BF16)) for _ in range(3)]
    optimizer = AdamW(params, lr=0.0, seed=seed, first_parameter=first_parameter, initial_compensation="dither")
    train(optimizer, range(1))
    return [optimizer.state[param]["compensation"] for param in params]


def test_a_dither_is_a_function_of_seed_number_and_element():
    first, again, other_seed, shifted = compensations(), compensations(), compensations(seed=1), compensations(0, 1)
    assert same(first, again)
    assert same(first[1:], shifted[:2])
    for a, b in [(first[0], first[1]), (first[1], first[2]), (first[0], other_seed[0])]:
        # Of independent numbers, σ/√4096 = 1.6% of correlation; six of those.
        correlation = torch.corrcoef(torch.stack([a, b]).float())[0, 1]
        assert abs(correlation) <= 0.1
    halves = first[0].float().view(2, -1)
    assert abs(torch.corrcoef(halves)[0, 1]) <= 0.14


def test_groups_have_seeds_of_their_own():
    """`fp32_state_dict` subtracts each dither by the seed of its group."""
    params = nn.ParameterList([torch.full((512,), 1.5, dtype=BF16) for _ in range(3)])
    groups = [{"params": [params[0]], "seed": 5}, {"params": [params[1]]}, {"params": [params[2]], "seed": 7}]
    optimizer = AdamW(groups, lr=0.0, seed=1)
    train(optimizer, range(1))
    assert all((found == 1.5).all() for found in estimates(params, optimizer))


def test_optimizers_of_one_parameter_have_dithers_of_their_own():
    params = nn.ParameterList([torch.full((512,), 1.5, dtype=BF16) for _ in range(3)])
    optimizers = [AdamW([param], lr=0.0) for param in params]
    for optimizer in optimizers:
        train(optimizer, range(1))
    dithers = [optimizer.state[param]["compensation"] for optimizer, param in zip(optimizers, params, strict=True)]
    assert not any(torch.equal(dithers[k], dithers[k - 1]) for k in range(3))
    with warnings.catch_warnings():  # the others' parameters
        warnings.simplefilter("ignore")
        for name, optimizer in enumerate(optimizers):
            assert (fp32_state_dict(params, optimizer)[str(name)] == 1.5).all()


@pytest.mark.parametrize("rounding", PAIRED)
@pytest.mark.parametrize("memory", ["transposed", "channels last", "with gaps"])
def test_weights_of_any_memory_format(memory, rounding):
    value = torch.randn(4, 6, 5, 3).to(BF16)
    if memory == "transposed":
        value = value.transpose(0, 3)
    elif memory == "channels last":
        value = value.to(memory_format=torch.channels_last)
    else:
        value = value[:, ::2]
    found = []
    for made in (value, value.clone(memory_format=torch.contiguous_format)):
        params = nn.ParameterList([nn.Parameter(made)])
        before = made.clone()
        optimizer = AdamW(params, lr=0.0, first_parameter=0, rounding=rounding)
        train(optimizer, range(1))
        assert torch.equal(estimates(params, optimizer)[0], before.float())
        found.append(low_bits_of(optimizer, params[0]))
    assert torch.equal(*found)
    assert found[0].any()


STEPS = range(1, 6)


@pytest.mark.filterwarnings("ignore:the low bits that cast_model:RuntimeWarning")
@pytest.mark.parametrize("way", ["torch.save", "deepcopied", "pickled"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved_at", [0, 1, 3])
@pytest.mark.parametrize("rounding", PAIRED)
def test_training_resumes_bit_for_bit(way, kind, saved_at, rounding):
    """Also from before the first step, where the low bits are in the state dict and nowhere else."""
    _, params = model()
    optimizer = AdamW(params, lr=1e-3, rounding=rounding, initial_compensation=kind)
    train(optimizer, STEPS[:saved_at])
    if way == "pickled":
        resumed, other = pickle.loads(pickle.dumps((params, optimizer)))
    else:
        buffer = io.BytesIO()
        saved = {"weights": params.state_dict(), "optimizer": optimizer.state_dict()}
        if way == "torch.save":
            torch.save(saved, buffer)
            saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        else:
            saved = copy.deepcopy(saved)
        _, resumed = model(seed=1)  # of other weights, with low bits of their own
        other = AdamW(resumed, lr=1e-3, rounding=rounding, initial_compensation=kind)
        other.load_state_dict(saved["optimizer"])
        resumed.load_state_dict(saved["weights"])
    assert same(estimates(params, optimizer), estimates(resumed, other))
    train(optimizer, STEPS[saved_at:])
    train(other, STEPS[saved_at:])
    assert same(contents(params, optimizer), contents(resumed, other))
    assert not any(low_bits(param) is not None for param in (*params, *resumed))


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


@pytest.mark.filterwarnings("ignore:the low bits that cast_model:RuntimeWarning")
def test_a_checkpoint_of_the_format_before_is_not_dithered():
    """It has no `dithered` in its header, whether it has one or not: its compensations started at zero."""
    _, params = model()
    source = AdamW(params, lr=1e-3, initial_compensation="zero")
    train(source, range(1, 4))
    saved = source.state_dict()
    assert "dithered" not in saved["param_groups"][0]["state_rounding"]
    assert "low_bits" not in saved
    _, resumed = model(seed=1)
    target = AdamW(resumed, lr=1e-3, initial_compensation="dither")
    train(target, range(1))
    assert len(target.dithered) == len(SHAPES)
    target.load_state_dict(copy.deepcopy(saved))
    resumed.load_state_dict(params.state_dict())
    assert not target.dithered
    assert same(estimates(params, source), estimates(resumed, target))


def test_flags_of_dithered_parameters_are_saved_per_group():
    _, params = model()
    plain = nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = AdamW([{"params": [params[0], plain]}, {"params": [params[1]]}], lr=0.0)
    train(optimizer, range(1))
    assert optimizer.dithered == {plain}
    headers = [group["state_rounding"] for group in optimizer.state_dict()["param_groups"]]
    assert '"dithered": "01"' in headers[0]
    assert "dithered" not in headers[1]


@pytest.mark.parametrize("rounding", PAIRED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:the low bits that cast_model:RuntimeWarning")
def test_clipping_before_the_first_step_creates_the_same_compensations(kind, rounding):
    """With gradients enabled, where torch forbids changing parameters in place."""
    found = []
    for clipped in (False, True):
        _, params = model()
        optimizer = AdamW(params, lr=1e-3, rounding=rounding, initial_compensation=kind, first_parameter=0)
        for param in params:
            param.grad = torch.full_like(param, 2.0**-10)
        if clipped:
            with torch.enable_grad():
                optimizer.clip_grad_norm_(1e3)
        optimizer.step()
        found.append(contents(params, optimizer))
    assert same(*found)


def test_the_note_on_dropped_low_bits_names_no_mode_that_fp16_weights_cannot_have():
    _, params = model(torch.float16)
    with pytest.warns(RuntimeWarning, match=r"are dropped.*Use rounding='kahan' with"):
        train(AdamW(params, rounding="nearest"), range(1))


def test_weights_that_are_all_zero_are_not_dithered():
    """They move to values whose dither nothing has added."""
    params = nn.ParameterList([torch.zeros(64, dtype=BF16)])
    optimizer = AdamW(params, lr=1e-3, state_dtype=FP32)
    train(optimizer, range(2))
    compensation = optimizer.state[params[0]]["compensation"]
    assert torch.equal(estimates(params, optimizer)[0], params[0].float() + compensation.float())


@pytest.mark.parametrize("options", [{"rounding": "stochastic"}, {"rounding": "nearest"}], ids=str)
def test_modes_without_a_compensation_drop_low_bits_with_a_note(options):
    _, params = model()
    optimizer = AdamW(params, **options)
    with pytest.warns(
        RuntimeWarning, match=r"low bits of 3 parameters, .* are dropped.*rounding='split' or 'kahan'"
    ) as notes:
        train(optimizer, range(2))
    assert len(notes) == 1
    assert not any(low_bits(param) is not None for param in params)
    assert same(estimates(params, optimizer), [param.float() for param in params])


@pytest.mark.parametrize("kind", ["dither", "zero"])
def test_another_initial_compensation_drops_low_bits_with_a_note(kind):
    _, params = model()
    optimizer = AdamW(params, initial_compensation=kind)
    with pytest.warns(RuntimeWarning, match=f"low bits .* initial_compensation='{kind}'"):
        train(optimizer, range(1))
    assert not any(low_bits(param) is not None for param in params)


@pytest.mark.parametrize("value", ["none", None, True, 0, "lowbits"])
def test_unknown_values_raise(value):
    with pytest.raises(ValueError, match=r"initial_compensation=.* is unknown; valid are 'low_bits', 'dither', 'zero'"):
        AdamW([nn.Parameter(torch.ones(1))], initial_compensation=value)
