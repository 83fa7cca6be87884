"""Every backend agrees with `eager` bit for bit.

`eager` runs on the CPU; `triton` on the GPU if there is one, else in Triton's interpreter, which computes with NumPy.
"""

import itertools
import math

import pytest
import torch

from hf_lowprec.optim import (
    SGD,
    Adafactor,
    Adam,
    AdamW,
    Adan,
    Lion,
    LowPrecisionOptimizer,
    Muon,
    RAdam,
    ScheduleFreeAdamW,
    StableAdamW,
)
from hf_lowprec.optim.backends.triton import launch as triton_launch
from hf_lowprec.rounding import MODES
from tests.support.optim.gradient_dtypes import allow_gradients_in
from tests.support.same_numbers import same_numbers
from tests.support.triton_available import device_of, quiet_interpreter, rarely_on_triton, require_triton

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
pytestmark = quiet_interpreter
GPU = torch.cuda.is_available()
STEPS = {"native": 20, "triton": 50 if GPU else 3}
CHUNK = triton_launch.CHUNK if GPU else 2 * triton_launch.BLOCK
"""Elements per program: in the interpreter, where each iteration takes milliseconds, two of them instead of eight."""
# Around a thread's and a program's share, one element, none, no dimension, and several at once.
SIZES = [(1,), (7,), (1023,), (1024,), (1025,), (0,), (), (5, 0, 3), (9, 11, 13)]
SIZES = {
    "native": [*SIZES, (32767,), (32768,), (32769,), (40000,)],
    "triton": [*SIZES, (255,), (257,), (CHUNK - 1,), (CHUNK,), (CHUNK + 1,), (2 * CHUNK + 100,)],
}
SMALL = [(1,), (7,), (33, 31), (0,), ()]
SPECIAL = [math.nan, -math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e30, 1e-45, -1e-40, 0.0, -0.0, 1e-20]
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
SGDM = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9}


@pytest.fixture(scope="module", autouse=True)
def chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_launch, "CHUNK", CHUNK)
        yield


@pytest.fixture(params=["native", "triton"])
def other(request) -> str:
    if request.param == "triton":
        require_triton()
    return request.param


def assert_backends_agree(
    other: str, cls, make_params, make_grad, steps: int | None = None, **options
) -> list[torch.nn.Parameter]:
    """Train two copies on equal gradients; weights agree now and then, states at the end. Returns `other`'s copy."""
    steps = steps or STEPS[other]
    params = {"eager": make_params(), other: [on_device(param, device_of(other)) for param in make_params()]}
    optimizers = {backend: cls(params[backend], backend=backend, **options) for backend in params}
    generator = torch.Generator().manual_seed(5)
    for step in range(1, steps + 1):
        for eager, copy in zip(*params.values(), strict=True):
            eager.grad = make_grad(eager, step, generator)
            copy.grad = eager.grad.to(device_of(other), copy=True)
        for optimizer in optimizers.values():
            optimizer.step()
        if step % 10 == 0 or step in (1, steps):
            for number, pair in enumerate(zip(*params.values(), strict=True)):
                assert same_numbers(*pair), f"weight {number}, step {step}"
    for number, (eager, copy) in enumerate(zip(*params.values(), strict=True)):
        expected, got = optimizers["eager"].state[eager], optimizers[other].state[copy]
        assert expected.keys() == got.keys()
        for name in expected:
            assert same_numbers(expected[name], got[name]), f"{name} {number}"
    return params[other]


def on_device(param: torch.nn.Parameter, device: str) -> torch.nn.Parameter:
    """The parameter with its strides and settings on `device`."""
    if device == "cpu":
        return param
    there = torch.nn.Parameter(torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=device))
    there.data.copy_(param.data)
    allow_gradients_in(getattr(param, "grad_dtype", param.dtype), [there])
    return there


def contiguous(dtype: torch.dtype, shapes: list[tuple[int, ...]]):
    def make() -> list[torch.nn.Parameter]:
        generator = torch.Generator().manual_seed(6)
        return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]

    return make


def normal(param: torch.Tensor, step: int, generator: torch.Generator) -> torch.Tensor:
    """Gradients whose scale runs over eight orders of magnitude."""
    return (torch.randn(param.shape, generator=generator) * 10.0 ** (-(step % 9))).to(param.dtype)


CASES = [
    pytest.param(cls, dtype, {"rounding": rounding}, id=f"{cls.__name__}-{dtype}-{rounding}")
    for cls, dtype, rounding in itertools.product((AdamW, SGD), (BF16, FP16, FP32), tuple(MODES))
    if dtype in MODES[rounding].dtypes
]


@rarely_on_triton("other")
@pytest.mark.parametrize(("cls", "dtype", "options"), CASES)
def test_backends_agree_for_all_sizes(other, cls, dtype, options):
    base = ADAMW if cls is AdamW else SGDM
    trained = assert_backends_agree(other, cls, contiguous(dtype, SIZES[other]), normal, **base, **options)
    for before, after in zip(contiguous(dtype, SIZES[other])(), trained, strict=True):
        assert after.isfinite().all()
        assert before.numel() <= 7 or not torch.equal(before, after.cpu())


STATE_DTYPES = [BF16, FP32, "first", "second"]


@rarely_on_triton("other")
@pytest.mark.parametrize("state_rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize(("cls", "dtype", "options"), [case for case in CASES if case.values[1] is not FP32])
def test_backends_agree_for_all_state_dtypes(other, cls, dtype, options, state_dtype, state_rounding):
    names = {AdamW: ("exp_avg", "exp_avg_sq"), SGD: ("momentum_buffer", "momentum_buffer")}[cls]
    if isinstance(state_dtype, str):
        state_dtype = {names[STATE_DTYPES.index(state_dtype) - 2]: FP32}
    base = ADAMW if cls is AdamW else SGDM
    options = {**base, **options, "state_dtype": state_dtype, "state_rounding": state_rounding}
    assert_backends_agree(other, cls, contiguous(dtype, SMALL), normal, **options)


FORMULAS = [(AdamW, {"amsgrad": True}), (AdamW, {"amsgrad": True, "maximize": True, "betas": (0.0, 0.5), "eps": 0.0})]
FORMULAS += [(AdamW, {"lr": torch.tensor(1e-3), "weight_decay": 0.0}), (SGD, {}), (SGD, {"weight_decay": 0.3})]
FORMULAS += [(SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}), (SGD, {"momentum": 0.9, "nesterov": True})]
FORMULAS += [(Adam, {"weight_decay": 0.1}), (RAdam, {"weight_decay": 0.1}), (Lion, {"weight_decay": 0.1})]
FORMULAS += [(Adan, {"weight_decay": 0.1}), (Adan, {"state_dtype": {"previous_grad": FP32, "exp_avg_diff": FP32}})]


@rarely_on_triton("other")
@pytest.mark.parametrize("rounding", ["kahan", "split", "stochastic"])
@pytest.mark.parametrize(("cls", "options"), FORMULAS, ids=str)
def test_backends_agree_for_all_formulas(other, cls, options, rounding):
    assert_backends_agree(other, cls, contiguous(BF16, SMALL), normal, rounding=rounding, seed=-3, **options)


def muon(params, **options) -> LowPrecisionOptimizer:
    return Muon(params, matrices=[param for param in params if param.ndim > 1], **options)


LOOKING_AT_WHOLE_TENSORS = [(StableAdamW, {"weight_decay": 0.1}), (StableAdamW, {"max_grad_norm": 0.1, "eps": 1e-3})]
LOOKING_AT_WHOLE_TENSORS += [(muon, {}), (muon, {"max_grad_norm": 0.1, "nesterov": False, "skip_nonfinite": True})]
LOOKING_AT_WHOLE_TENSORS += [(Adafactor, {"lr": 0.1}), (Adafactor, {"beta1": 0.9, "max_grad_norm": 0.1})]
LOOKING_AT_WHOLE_TENSORS += [(Adafactor, {"scale_parameter": False, "skip_nonfinite": True, "maximize": True})]
# Each in one mode on `native`; on `triton`, where they take seconds, one of each algorithm.
LOOKING_AT_WHOLE_TENSORS = [
    pytest.param(
        *(other, make, options, rounding),
        id=f"{other}-{make.__name__}-{options}-{rounding}",
        marks=() if number % 3 == of_mode and (other == "native" or number in (1, 5)) else pytest.mark.every_case,
    )
    for other in ("native", "triton")
    for number, (make, options) in enumerate(LOOKING_AT_WHOLE_TENSORS)
    for of_mode, rounding in enumerate(("kahan", "split", "stochastic"))
]


@pytest.mark.parametrize(("other", "make", "options", "rounding"), LOOKING_AT_WHOLE_TENSORS, indirect=["other"])
def test_backends_agree_on_what_whole_tensors_say(other, make, options, rounding):
    """Around a chunk's end; sums in FP64 differ in their order, which does not reach the FP32 mean."""
    if make is muon and device_of(other) != "cpu":
        pytest.skip("matrix products are the device's own")
    sizes = SIZES[other] if other == "native" or GPU else [(7,), (0,), (), (CHUNK + 1,)]
    shapes = [*sizes, (33, 31), (31, 33), (2, 9, 5)]
    assert_backends_agree(other, make, contiguous(BF16, shapes), normal, rounding=rounding, **options)


WHOLE_BLOCKS = [(3, 32), (1, 64), (2, 5, 96), (0, 32), (3, 0)]
NOT_IN_8_BITS = [(5, 33), (7,), (64,), ()]
"""Tensors whose states stay in BF16."""
ABOVE_A_CHUNK = {"native": [(1025, 32), (40, 1024)], "triton": [(CHUNK // 32 + 1, 32), (CHUNK // 1024 + 1, 1024)]}
EVERY_ALGORITHM = [
    (AdamW, {"amsgrad": True}),
    (Adam, {}),
    (RAdam, {}),
    (Lion, {}),
    (Adan, {}),
    (SGD, {"momentum": 0.9}),
]
EVERY_ALGORITHM += [(StableAdamW, {}), (Adafactor, {"beta1": 0.9}), (muon, {})]


def assert_backends_agree_in_8_bits(other: str, make, shapes=WHOLE_BLOCKS, make_grad=normal, dtype=BF16, **options):
    options = {"lr": 1e-2, "state_dtype": torch.int8, "rounding": "stochastic", **options}
    steps = {"native": 6, "triton": 12 if GPU else 2}[other]
    return assert_backends_agree(other, make, contiguous(dtype, shapes), make_grad, steps, **options)


@rarely_on_triton("other")
@pytest.mark.parametrize(("make", "options"), EVERY_ALGORITHM, ids=lambda v: getattr(v, "__name__", str(v)))
def test_backends_agree_in_8_bits_for_all_algorithms(other, make, options):
    if make is muon and device_of(other) != "cpu":
        pytest.skip("matrix products are the device's own")
    assert_backends_agree_in_8_bits(other, make, weight_decay=0.1, **options)


@pytest.mark.parametrize("rounding", list(MODES))
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_backends_agree_in_8_bits_for_all_modes(other, dtype, rounding):
    if dtype in MODES[rounding].dtypes:
        assert_backends_agree_in_8_bits(other, AdamW, dtype=dtype, rounding=rounding)


SOME_IN_8_BITS = [
    {"state_dtype": {"exp_avg": torch.int8}},
    {"state_dtype": {"exp_avg_sq": torch.int8, "exp_avg": FP32}},
]
SOME_IN_8_BITS += [{"maximize": True, "max_grad_norm": 0.1, "skip_nonfinite": True}]


@rarely_on_triton("other")
@pytest.mark.parametrize("options", SOME_IN_8_BITS, ids=str)
def test_backends_agree_in_8_bits_for_all_options(other, options):
    """An infinite gradient in the second step, if that is skipped."""

    def infinite_in_the_second_step(param, step, generator):
        grad = normal(param, step, generator)
        return grad.fill_(math.inf) if step == 2 else grad

    make_grad = infinite_in_the_second_step if options.get("skip_nonfinite") else normal
    for param in assert_backends_agree_in_8_bits(other, AdamW, make_grad=make_grad, **options):
        assert param.isfinite().all()


@rarely_on_triton("other")
@pytest.mark.parametrize("make", [AdamW, StableAdamW])
def test_backends_agree_in_8_bits_above_a_chunk_and_beside_other_tensors(other, make, monkeypatch):
    monkeypatch.setattr("hf_lowprec.optim.backends.eager.CHUNK", 1024)
    assert_backends_agree_in_8_bits(other, make, [*NOT_IN_8_BITS, *ABOVE_A_CHUNK[other], *WHOLE_BLOCKS])


FULL_NANS = torch.tensor([0x7FFF, -1, 0x7F81, -0x7F], dtype=torch.int16).view(BF16)


@pytest.mark.parametrize("special", ["huge", "not a number"])
@pytest.mark.parametrize(("make", "options"), [(AdamW, {}), (SGD, {"momentum": 0.9}), (Adan, {})])
def test_backends_agree_in_8_bits_on_huge_and_invalid_gradients(other, make, options, special):
    """Only the blocks that get them are affected; NaN of every payload and sign among them."""
    values = FULL_NANS if special == "not a number" else torch.tensor(SPECIAL).to(BF16)

    def special_in_the_second_step(param, step, generator):
        grad = normal(param, step, generator)
        if step == 2:
            for row in range(len(values)):
                grad[row, row] = values[row]
        return grad

    (param,) = assert_backends_agree_in_8_bits(
        other, make, [(2 * len(values), 64)], make_grad=special_in_the_second_step, **options
    )
    assert param.view(-1, 2, 32)[: len(values), 0].isnan().any()
    assert param.view(-1, 2, 32)[:, 1].isfinite().all()
    assert param[len(values) :].isfinite().all()


BLOCKS = torch.ones(6, 32)
BLOCKS[0] = 0  # states stay zero
BLOCKS[1, 7] = 2.0**60  # an outlier, below whose window all others are
BLOCKS[2] = 2.0**-72  # second moments are subnormal
BLOCKS[3] = 2.0**-130  # gradients as well, and second moments zero
BLOCKS[4, ::3] = 0
BLOCKS[5] = 2.0 ** -torch.arange(32).float()
"""The scale of the gradients of each element."""


@pytest.mark.parametrize("rounding", ["split", "stochastic"])
def test_backends_agree_in_8_bits_on_extreme_blocks(other, rounding):
    def make_grad(param, step, generator):
        return (BLOCKS * torch.randn(param.shape, generator=generator)).to(param.dtype)

    shapes = [tuple(BLOCKS.shape)]
    (param,) = assert_backends_agree_in_8_bits(other, AdamW, shapes, make_grad=make_grad, rounding=rounding)
    assert param.isfinite().all()


@pytest.mark.parametrize("state_dtype", [BF16, torch.int8], ids=str)
@pytest.mark.parametrize("rounding", list(MODES))
def test_backends_agree_on_special_weights(other, rounding, state_dtype):
    """Infinite, the largest, subnormal and zero weights of both signs, and NaN."""
    special = torch.tensor([*SPECIAL, -3.38e38, 9e-39, -9e-39, 2.0**-133])

    def make():
        (param,) = contiguous(BF16, [(2, 64)])()
        param.data[0, : len(special)] = special
        return [param]

    options = {"rounding": rounding, "state_dtype": state_dtype, "lr": 1e-2}
    (param,) = assert_backends_agree(other, AdamW, make, normal, steps=3, **options)
    assert param[0, :2].isnan().all()
    assert param[1].isfinite().all()


FURTHER = [
    pytest.param(cls, dtype, {"rounding": rounding}, id=f"{cls.__name__}-{dtype}-{rounding}")
    for cls, dtype, rounding in [
        *((cls, BF16, "nearest") for cls in (Adam, RAdam, Lion, Adan, ScheduleFreeAdamW)),
        *((cls, FP32, "kahan") for cls in (Lion, Adan)),
        *((cls, FP16, "kahan") for cls in (Lion, Adan)),
    ]
]


@pytest.mark.parametrize(("cls", "dtype", "options"), [*CASES, *FURTHER])
def test_backends_agree_on_huge_and_invalid_gradients(other, cls, dtype, options):
    """Every tenth step half of the elements get one of the special values each; the others train on."""
    special = torch.tensor(SPECIAL).to(dtype)

    def sometimes_special(param, step, generator):
        grad = normal(param, step, generator)
        if step % 10 == 2:
            grad[0, : 2 * len(special)] = special.repeat(2).roll(step)
        return grad

    base = {**(SGDM if cls is SGD else ADAMW), **options}
    (param,) = assert_backends_agree(other, cls, contiguous(dtype, [(2, 40)]), sometimes_special, **base)
    assert param[0].isnan().any()
    assert param[1].isfinite().all()


@pytest.mark.parametrize("rounding", list(MODES))
@pytest.mark.parametrize("cls", [AdamW, SGD])
def test_backends_agree_on_fp32_gradients_of_bf16_parameters(other, cls, rounding):
    """torch allows them where `grad_dtype` says so; infinities and the largest values among them."""

    def make():
        params = contiguous(BF16, [(2, 40), (1025,)])()
        allow_gradients_in(FP32, params)
        return params

    def sometimes_special(param, step, generator):
        grad = torch.randn(param.shape, generator=generator)
        if step % 10 == 2 and param.dim() == 2:
            grad[0, : len(SPECIAL)] = torch.tensor(SPECIAL).roll(step)
        return grad

    trained = assert_backends_agree(other, cls, make, sometimes_special, rounding=rounding, lr=1e-2)
    assert trained[0][0].isnan().any()
    assert trained[0][1].isfinite().all()


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("cls", "dtype", "options"), [*CASES, *FURTHER])
def test_the_sign_of_zero(other, cls, dtype, options, maximize):
    """A weight of −0 that gets an update of −0 stays −0: the sign of the update is flipped, not taken from zero."""
    zeros = torch.tensor([0.0, -0.0])
    weights, grads = torch.cartesian_prod(zeros, zeros).unbind(1)

    def make():
        return [torch.nn.Parameter(weights.to(dtype))]

    def signed_zeros(param, step, generator):
        return (grads * (-1.0) ** step).to(dtype)

    base = {**({"lr": 0.1} if cls is SGD else {"lr": 0.1, "weight_decay": 0.1}), "maximize": maximize, **options}
    (param,) = assert_backends_agree(other, cls, make, signed_zeros, steps=3, **base)
    assert (param == 0).all()


NANS = {
    FP32: torch.tensor([0x7FFFFFFF, -1, 0x7F800001, -0x7FFFFF], dtype=torch.int32).view(FP32),
    FP16: torch.tensor([0x7FFF, -1, 0x7C01, -0x3FF], dtype=torch.int16).view(FP16),
}


@pytest.mark.parametrize("grad_dtype", NANS, ids=str)
@pytest.mark.parametrize("rounding", list(MODES))
@pytest.mark.parametrize(("cls", "options"), [(AdamW, {}), (SGD, {"momentum": 0.9})], ids=["AdamW", "SGD"])
def test_a_nan_with_a_full_payload_stays_a_nan(other, cls, options, rounding, grad_dtype):
    """NVIDIA's own NaN is 0x7FFFFFFF; random bits added to its pattern would carry into the sign and give −0."""
    patterns = NANS[grad_dtype].repeat(16)
    assert patterns.isnan().all()

    def make():
        params = contiguous(BF16, [(64,)])()
        allow_gradients_in(grad_dtype, params)
        return params

    (param,) = assert_backends_agree(
        other, cls, make, lambda *_: patterns.clone(), steps=2, lr=0.1, rounding=rounding, **options
    )
    assert param.isnan().all()


def awkward(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def make(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    return [
        make(33, 65).t(),
        make(300)[::3],
        make(40, 60)[5:25, 7:50],
        make(4, 6, 5, 7).to(memory_format=torch.channels_last),
        make(6, 5, 4).permute(1, 2, 0),
        make(50)[10:11],
    ]


@rarely_on_triton("other")
@pytest.mark.parametrize(("cls", "dtype", "options"), CASES)
def test_parameters_that_are_not_contiguous(other, cls, dtype, options):
    """Backends agree, and do what they do to a contiguous copy: an element is its logical place, not its address."""
    base = {**(ADAMW if cls is AdamW else SGDM), **options}

    def strided():
        return [torch.nn.Parameter(view) for view in awkward(dtype)]

    def flat():
        return [torch.nn.Parameter(view.contiguous()) for view in awkward(dtype)]

    strides = [view.stride() for view in awkward(dtype)]
    steps = min(10, STEPS[other])
    trained = assert_backends_agree(other, cls, strided, normal, steps=steps, **base)
    assert [param.stride() for param in trained] == strides
    for param, copy in zip(trained, assert_backends_agree(other, cls, flat, normal, steps=steps, **base), strict=True):
        assert same_numbers(param, copy)


def test_what_lies_between_the_elements_of_a_view_is_not_touched(any_backend):
    base = torch.linspace(-1, 1, 90).to(BF16)
    before = base.clone()
    param = torch.nn.Parameter(base[1::3])
    optimizer = AdamW([param], lr=0.1, backend=any_backend)
    for _ in range(3):
        param.grad = torch.ones(90, dtype=BF16)[::3]
        optimizer.step()
    assert torch.equal(base[0::3], before[0::3])
    assert torch.equal(base[2::3], before[2::3])
    assert (base[1::3] != before[1::3]).all()
