"""`eager` and `native` agree bit for bit; a backend that is unknown or cannot run is refused by name."""

import itertools
import math

import pytest
import torch

from hf_lowprec.optim import SGD, AdamW

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 50
# Around a page of the eager backend and of a vector unit, one element, none, no dimension, and several at once.
SIZES = [
    (1,),
    (7,),
    (1023,),
    (1024,),
    (1025,),
    (32767,),
    (32768,),
    (32769,),
    (40000,),
    (0,),
    (),
    (5, 0, 3),
    (9, 11, 13),
]
SMALL = [(1,), (7,), (33, 31), (0,), ()]
SPECIAL = [math.nan, -math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e30, 1e-45, -1e-40, 0.0, -0.0, 1e-20]
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
SGDM = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9}


@pytest.fixture(scope="module", autouse=True)
def private_cache(tmp_path_factory):
    """What this file compiles does not come from, or end up in, the cache of whoever runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_LOWPREC_CACHE", str(tmp_path_factory.mktemp("compiled")))
        yield


def assert_same(first: torch.Tensor, second: torch.Tensor, what: str = "") -> None:
    """Bit for bit, but any NaN is as good as another."""
    assert (first.dtype, first.shape) == (second.dtype, second.shape), what
    nan = first.isnan()
    assert torch.equal(nan, second.isnan()), what
    bits = torch.int16 if first.element_size() == 2 else torch.int32
    assert torch.equal(first[~nan].view(bits), second[~nan].view(bits)), what


def assert_backends_agree(cls, make_params, make_grad, steps: int = STEPS, **options) -> list[torch.nn.Parameter]:
    """Train two copies on equal gradients; weights agree every ten steps, states at the end. Returns native's copy."""
    params = {backend: make_params() for backend in ("eager", "native")}
    optimizers = {backend: cls(params[backend], backend=backend, **options) for backend in params}
    generator = torch.Generator().manual_seed(5)
    for step in range(1, steps + 1):
        for eager, native in zip(*params.values(), strict=True):
            eager.grad = make_grad(eager, step, generator)
            native.grad = eager.grad.clone()
        for optimizer in optimizers.values():
            optimizer.step()
        if step % 10 == 0 or step == 1:
            for number, pair in enumerate(zip(*params.values(), strict=True)):
                assert_same(*pair, f"weight {number}, step {step}")
    for number, (eager, native) in enumerate(zip(*params.values(), strict=True)):
        expected, got = optimizers["eager"].state[eager], optimizers["native"].state[native]
        assert expected.keys() == got.keys()
        for name in expected:
            assert_same(expected[name], got[name], f"{name} {number}")
    return params["native"]


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
    for cls, dtype, rounding in itertools.product((AdamW, SGD), (BF16, FP16, FP32), ("kahan", "stochastic", "nearest"))
    if (dtype, rounding) != (FP16, "stochastic")
]


@pytest.mark.parametrize(("cls", "dtype", "options"), CASES)
def test_backends_agree_for_all_sizes(cls, dtype, options):
    base = ADAMW if cls is AdamW else SGDM
    trained = assert_backends_agree(cls, contiguous(dtype, SIZES), normal, **base, **options)
    for before, after in zip(contiguous(dtype, SIZES)(), trained, strict=True):
        assert after.isfinite().all()
        assert before.numel() <= 7 or not torch.equal(before, after)


STATE_DTYPES = [BF16, FP32, "first", "second"]


@pytest.mark.parametrize("state_rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize(("cls", "dtype", "options"), [case for case in CASES if case.values[1] is not FP32])
def test_backends_agree_for_all_state_dtypes(cls, dtype, options, state_dtype, state_rounding):
    names = {AdamW: ("exp_avg", "exp_avg_sq"), SGD: ("momentum_buffer", "momentum_buffer")}[cls]
    if isinstance(state_dtype, str):
        state_dtype = {names[STATE_DTYPES.index(state_dtype) - 2]: FP32}
    base = ADAMW if cls is AdamW else SGDM
    options = {**base, **options, "state_dtype": state_dtype, "state_rounding": state_rounding}
    assert_backends_agree(cls, contiguous(dtype, SMALL), normal, **options)


FORMULAS = [(AdamW, {"amsgrad": True}), (AdamW, {"amsgrad": True, "maximize": True, "betas": (0.0, 0.5), "eps": 0.0})]
FORMULAS += [(AdamW, {"lr": torch.tensor(1e-3), "weight_decay": 0.0}), (SGD, {}), (SGD, {"weight_decay": 0.3})]
FORMULAS += [(SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}), (SGD, {"momentum": 0.9, "nesterov": True})]


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
@pytest.mark.parametrize(("cls", "options"), FORMULAS, ids=str)
def test_backends_agree_for_all_formulas(cls, options, rounding):
    assert_backends_agree(cls, contiguous(BF16, SMALL), normal, rounding=rounding, seed=-3, **options)


@pytest.mark.parametrize(("cls", "dtype", "options"), CASES)
def test_backends_agree_on_huge_and_invalid_gradients(cls, dtype, options):
    """Every tenth step half of the elements get one of the special values each; the others train on."""
    special = torch.tensor(SPECIAL).to(dtype)

    def sometimes_special(param, step, generator):
        grad = normal(param, step, generator)
        if step % 10 == 2:
            grad[0, : 2 * len(special)] = special.repeat(2).roll(step)
        return grad

    base = {**(ADAMW if cls is AdamW else SGDM), **options}
    (param,) = assert_backends_agree(cls, contiguous(dtype, [(2, 40)]), sometimes_special, **base)
    assert param[0].isnan().any()
    assert param[1].isfinite().all()


@pytest.mark.parametrize("rounding", ["kahan", "stochastic", "nearest"])
@pytest.mark.parametrize("cls", [AdamW, SGD])
def test_backends_agree_on_fp32_gradients_of_bf16_parameters(cls, rounding):
    """torch allows them where `grad_dtype` says so; infinities and the largest values among them."""

    def make():
        params = contiguous(BF16, [(2, 40), (1025,)])()
        for param in params:
            param.grad_dtype = FP32
        return params

    def sometimes_special(param, step, generator):
        grad = torch.randn(param.shape, generator=generator)
        if step % 10 == 2 and param.dim() == 2:
            grad[0, : len(SPECIAL)] = torch.tensor(SPECIAL).roll(step)
        return grad

    trained = assert_backends_agree(cls, make, sometimes_special, rounding=rounding, lr=1e-2)
    assert trained[0][0].isnan().any()
    assert trained[0][1].isfinite().all()


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


@pytest.mark.parametrize(("cls", "dtype", "options"), CASES)
def test_parameters_that_are_not_contiguous(cls, dtype, options):
    """Backends agree, and do what they do to a contiguous copy: an element is its logical place, not its address."""
    base = {**(ADAMW if cls is AdamW else SGDM), **options}

    def strided():
        return [torch.nn.Parameter(view) for view in awkward(dtype)]

    def flat():
        return [torch.nn.Parameter(view.contiguous()) for view in awkward(dtype)]

    strides = [view.stride() for view in awkward(dtype)]
    trained = assert_backends_agree(cls, strided, normal, steps=10, **base)
    assert [param.stride() for param in trained] == strides
    for param, copy in zip(trained, assert_backends_agree(cls, flat, normal, steps=10, **base), strict=True):
        assert_same(param.detach().contiguous(), copy.detach())


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_what_lies_between_the_elements_of_a_view_is_not_touched(backend):
    base = torch.randn(90, generator=torch.Generator().manual_seed(8)).to(BF16)
    before = base.clone()
    param = torch.nn.Parameter(base[1::3])
    optimizer = AdamW([param], lr=0.1, backend=backend)
    for _ in range(3):
        param.grad = torch.ones(90, dtype=BF16)[::3]
        optimizer.step()
    assert torch.equal(base[0::3], before[0::3])
    assert torch.equal(base[2::3], before[2::3])
    assert (base[1::3] != before[1::3]).all()


@pytest.mark.parametrize(("name", "error", "words"), [("cuda", ValueError, ["cuda", "auto", "eager", "native"])])
def test_an_unknown_backend_is_refused_by_name(name, error, words):
    with pytest.raises(error) as raised:
        AdamW(contiguous(BF16, [(3,)])(), backend=name)
    assert all(word in str(raised.value) for word in [*words, "backend"])


def test_a_backend_that_cannot_run_says_why_and_what_can():
    with pytest.raises(RuntimeError) as raised:
        AdamW(contiguous(BF16, [(3,)])(), backend="triton")
    assert all(word in str(raised.value) for word in ("backend", "triton", "eager", "native"))
