"""The C code of the step gives the same bits on 64-bit ARM as `eager` and `native` do here: by emulation, if installed.

On ARM, arithmetic makes NaNs of other signs and payloads, compilers contract to fused multiply-adds unless told not to,
and integers of 8 bits have no sign unless they are declared with one.
"""

import contextlib
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hf_lowprec.optim import SGD, AdamW
from hf_lowprec.optim.backends import native
from hf_lowprec.optim.backends.c_compiler import FLAGS
from hf_lowprec.rounding import MODES
from tests.support.optim.emulated_arm import PROCESSORS, EmulatedLibrary, missing_programs
from tests.support.optim.every_optimizer import NAMES, OPTIONS, build
from tests.support.same_numbers import same_numbers

pytestmark = [
    pytest.mark.skipif(
        bool(missing_programs()),
        reason=f"{' and '.join(missing_programs())} not found: apt install gcc-aarch64-linux-gnu qemu-user",
    ),
    pytest.mark.usefixtures("private_cache"),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SPECIAL = [math.nan, -math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e30, 1e-45, -1e-40, 9e-39, 0.0, -0.0, 1e-20]
SHAPES = [(4, 64), (33, 31), (40, 1024), (7,), (), (0, 32)]
"""The first gets values of every kind; the third has more elements than a chunk."""


@contextlib.contextmanager
def emulated(folder: Path, processor: str, flags=FLAGS) -> Iterator[list[EmulatedLibrary]]:
    """Let optimizers that take their first step in this context use emulated libraries, which are listed here."""
    libraries: list[EmulatedLibrary] = []

    def kernel(spec):
        place = folder / str(len(libraries))
        place.mkdir()
        libraries.append(EmulatedLibrary(spec, place, PROCESSORS[processor], flags))
        return libraries[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "kernel", kernel)
        yield libraries


def values_of_every_kind(like: Tensor, generator: torch.Generator) -> Tensor:
    """Bit patterns at random, one in three of them that of a special value; floats among them NaN of every payload."""
    integer = INTEGERS[like.element_size()]
    bounds = torch.iinfo(integer)
    random = torch.randint(bounds.min, bounds.max, like.shape, generator=generator, dtype=integer)
    special = torch.tensor([bounds.min, bounds.max, -1, 0, 1], dtype=integer)
    if like.is_floating_point():
        special = torch.cat([special, torch.tensor(SPECIAL).to(like.dtype).view(integer)])
    chosen = special[torch.randint(len(special), like.shape, generator=generator)]
    return torch.where(torch.rand(like.shape, generator=generator) < 1 / 3, chosen, random).view(like.dtype)


def trained(name: str, dtype: torch.dtype, backend: str, **options) -> list[Tensor]:
    """Weights and states after three steps. The first parameter and its states get values of every kind before the
    second step, and its gradient before the third."""
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    optimizer = build(name, params, backend=backend, lr=1e-2, **options)
    for step in range(3):
        for param in params:
            param.grad = (torch.randn(param.shape, generator=generator) * 10.0 ** (-2 * step)).to(dtype)
        if step == 1:
            states = optimizer.state[params[0]].values()
            for tensor in [params[0].data, *(state for state in states if state.shape == SHAPES[0])]:
                if tensor.dtype != options.get("state_dtype") or tensor.is_floating_point():  # codes depend on scales
                    tensor.copy_(values_of_every_kind(tensor, generator))
        if step == 2:
            params[0].grad[2:] = values_of_every_kind(params[0].grad[2:], generator)
        optimizer.step()
    return [*params, *(value for param in params for value in optimizer.state[param].values())]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(same_numbers(*pair) for pair in zip(first, second, strict=True))


Case = tuple[str, tuple[torch.dtype, dict[str, object]], str]
"""The optimizer, the dtype of weights with options, and the processor."""
STATE_DTYPES = (BF16, FP32, torch.int8)
SPECIAL_MODES = [(BF16, {"rounding": "kahan", "state_rounding": "nearest"}), (FP32, {"rounding": "kahan"})]
SPECIAL_MODES += [(FP16, {"rounding": "kahan"}), (FP16, {"rounding": "nearest"})]
EVERY_MODE = [(BF16, {"rounding": rounding, "state_dtype": dtype}) for rounding in MODES for dtype in STATE_DTYPES]
EVERY_MODE += SPECIAL_MODES
TWO_MODES = [(BF16, {"rounding": "kahan"}), (BF16, {"rounding": "stochastic", "state_dtype": torch.int8})]
OTHERS = [name for name in NAMES if name not in ("AdamW", "Muon")]
"""Muon's matrix products are torch's."""
CASES = [*itertools.product(["AdamW"], EVERY_MODE, PROCESSORS), *itertools.product(OTHERS, TWO_MODES, ["armv8-a"])]


def once_each() -> Iterator[Case]:
    """Every mode, state dtype and optimizer in some case."""
    modes = [
        (BF16, {"rounding": rounding, "state_dtype": dtype})
        for rounding, dtype in zip(MODES, itertools.cycle(STATE_DTYPES), strict=False)
    ]
    for mode, processor in zip([*modes, *SPECIAL_MODES], itertools.cycle(["SVE", "armv8-a"]), strict=False):
        yield "AdamW", mode, processor
    for name, mode in zip(OTHERS, itertools.cycle(TWO_MODES), strict=False):
        yield name, mode, "armv8-a"


ONCE_EACH = [*once_each()]
FURTHER = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("HF_LOWPREC_EVERY_CASE_ON_ARM"),
        reason="runs with make test-arm: only the combination is new, and a case takes a second to compile and emulate",
    ),
]


@pytest.mark.parametrize(
    ("name", "mode", "processor"),
    [
        pytest.param(
            *case,
            id=f"{case[0]}-{str(case[1][0])[6:]}-{case[1][1]}-{case[2]}",
            marks=() if case in ONCE_EACH else FURTHER,
        )
        for case in CASES
    ],
)
def test_a_step_has_the_same_bits(name, mode, processor, tmp_path):
    dtype, options = mode
    options = {**OPTIONS[name][0], **options}
    with emulated(tmp_path, processor) as libraries:
        on_arm = trained(name, dtype, "native", **options)
    assert sum(library.calls["step"] for library in libraries) >= 3
    assert same(on_arm, trained(name, dtype, "native", **options))
    assert same(on_arm, trained(name, dtype, "eager", **options))
    weight = on_arm[0]
    assert weight.isnan().any()
    assert not weight.isnan().all()


def test_one_case_each_is_a_choice_of_all_cases():
    assert all(case in CASES for case in ONCE_EACH)
    modes = [mode for name, mode, _ in ONCE_EACH if name == "AdamW"]
    assert [options["rounding"] for _, options in modes[: len(MODES)]] == list(MODES)
    assert {options["state_dtype"] for _, options in modes if "state_dtype" in options} == set(STATE_DTYPES)
    assert {name for name, _, _ in ONCE_EACH} == {"AdamW", *OTHERS}


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_mean_over_a_tensor_has_the_same_bits(processor, tmp_path):
    with emulated(tmp_path, processor) as libraries:
        on_arm = trained("StableAdamW", BF16, "native", rounding="kahan")
    assert sum(library.calls["tensor_sum"] for library in libraries) >= 3
    assert same(on_arm, trained("StableAdamW", BF16, "native", rounding="kahan"))


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_the_sum_of_squares_has_the_same_bits(dtype, processor, tmp_path):
    generator = torch.Generator().manual_seed(2)
    params = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (100_003, 1, 0, 32768)]
    for param in params:
        scales = 10.0 ** torch.randint(-40, 15, param.shape, generator=generator)
        param.grad = (torch.randn(param.shape, generator=generator) * scales).to(dtype)
        param.grad.nan_to_num_(0.0, 0.0, 0.0)

    def square_sum() -> Tensor:
        with AdamW(params, backend="native").plan_step() as plan:
            (step,) = plan.backend_steps
            return step.square_sum()

    with emulated(tmp_path, processor):
        on_arm = square_sum()
    assert on_arm > 0
    assert torch.equal(on_arm, square_sum())


@pytest.mark.parametrize("rounding", ["kahan", "split", "nearest"])
def test_ties_are_decided_alike(rounding, tmp_path):
    """Weights between 1 and 2, whose spacing is 2⁻⁷, and updates of odd multiples of 2⁻⁸."""
    weight = 1 + torch.arange(64).float() / 128
    grad = (2 * torch.arange(64).float() - 63) / 256

    def stepped(backend: str) -> Tensor:
        param = nn.Parameter(weight.to(BF16))
        param.grad = grad.to(BF16)
        SGD([param], lr=1.0, rounding=rounding, backend=backend, initial_compensation="zero").step()
        return param.detach().float()

    with emulated(tmp_path, "armv8-a"):
        on_arm = stepped("native")
    assert torch.equal((on_arm - (weight - grad)).abs(), torch.full((64,), 2.0**-8))
    assert torch.equal(on_arm, stepped("eager"))


def test_contracted_operations_would_be_seen(tmp_path):
    """A compiler for ARM contracts by default: without the flag, this test's first assertion fails."""
    contracting = [flag.replace("-ffp-contract=off", "-ffp-contract=fast") for flag in FLAGS]
    with emulated(tmp_path, "armv8-a", contracting):
        contracted = trained("AdamW", BF16, "native", rounding="kahan")
    assert not same(contracted, trained("AdamW", BF16, "eager", rounding="kahan"))
