"""Division, root and NaN in kernels for NVIDIA GPUs, without one: the same operations in C, and their PTX in NumPy."""

import math
import struct
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from benchmarks.fast_paths import EXCEPTIONS, exception, run
from hf_lowprec.optim import SGD, AdamW, Adan, Lion, RAdam, StableAdamW
from hf_lowprec.optim.backends.triton.inline_ptx import DIVISION, ELEMENTS
from hf_lowprec.optim.backends.triton.launch import inlined_ptx
from hf_lowprec.optim.backends.triton.ptx_graph import divide_above, quiet_nans, trace_for_ptx
from hf_lowprec.rounding import sqrt_rn
from hf_lowprec.rounding.random_bits import lane
from tests.support.optim.emulated_gpu import EmulatedGpu
from tests.support.optim.fast_path_kernels import fast_path_source
from tests.support.optim.ptx_interpreter import APPROXIMATIONS
from tests.support.same_numbers import same_numbers
from tests.support.triton_available import require_triton

BF16 = torch.bfloat16


@pytest.mark.parametrize("check", ["roots", "quotients"])
def test_hard_cases_are_rounded_correctly(check):
    """For every approximation within the documented error, but for the exceptions."""
    result = run(check)
    expected = {case for case in EXCEPTIONS if (case[0] == "root") == (check == "roots")}
    assert result.admitted == result.tested > 5e7
    assert {exception(*case) for case in result.wrong} == expected


@pytest.mark.parametrize("check", ["exponents", "pairs"])
def test_what_is_admitted_is_rounded_correctly(check):
    """All exponents, zeros of both signs, subnormal numbers, infinities, NaN, and random bits."""
    result = run(check, 1_000_000)
    assert result.admitted > 0.15 * result.tested
    assert not result.unexpected


def test_zeros_are_admitted():
    """If `b` were the operand that may be zero, zeros as `a` would fail the tests."""
    assert run("exponents").admitted > run("exponents", divide=replace(DIVISION, zero="b")).admitted + 2 * 8 * 100


@pytest.mark.every_case  # whether the test above would find a fault
@pytest.mark.parametrize(
    ("check", "fault"),
    [
        ("exponents", {"least": {"b": -90, "q": -62}}),
        ("exponents", {"least": {"b": -40, "q": -120}}),
        ("pairs", {"operations": (*DIVISION.operations[:3], DIVISION.operations[3]._replace(result="q"))}),
    ],
    ids=["small denominators", "small quotients", "no correction"],
)
def test_a_faulty_division_is_found(check, fault):
    assert run(check, 1_000_000, divide=replace(DIVISION, **fault)).unexpected


COUNT = 1 << 18


def executed(name: str, capability: int, approximation: str, *operands: Tensor, change=str) -> Tensor:
    """The results of a kernel's inline PTX, which must be those of the instruction for all operands, if it has one."""
    require_triton()
    gpu = EmulatedGpu(capability, approximation, change)
    results = torch.empty((2, COUNT), dtype=operands[0].dtype)
    outputs = results.unbind() if name != "random_sums" else [results]
    kernel = gpu.kernel(fast_path_source(), name)
    constants = {"BLOCK": 1024, "PTX": inlined_ptx(capability), "num_warps": 4, "enable_fp_fusion": False}
    kernel[(COUNT // 1024,)](*operands, *outputs, **constants)
    return results


def numbers(exponents: tuple[int, int], negative: float, generator: torch.Generator) -> Tensor:
    """FP32 numbers whose exponents are in a range, and nearly equal in each thread; a share of them is negative. In two
    of three threads, some are zero, subnormal, huge, infinite or NaN."""
    exponent = torch.randint(*exponents, (COUNT // ELEMENTS, 1), generator=generator)
    exponent = exponent + torch.randint(-1, 2, (COUNT // ELEMENTS, ELEMENTS), generator=generator)
    mantissa = torch.rand(exponent.shape, generator=generator, dtype=torch.float64) + 1
    sign = torch.where(torch.rand(exponent.shape, generator=generator) < negative, -1, 1)
    usual = torch.ldexp(sign * mantissa, exponent).float()
    share = torch.tensor([0.0, 0.05, 0.3])[torch.arange(len(usual)) % 3, None]
    chosen = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), exponent.shape, generator=generator)]
    return torch.where(torch.rand(exponent.shape, generator=generator) < share, chosen, usual).view(-1)


SPECIAL = [0.0, -0.0, 1.0, 3e-45, -(2.0**-130), 2.0**-45, 2.0**-41, 2.0**-39, 2.0**127, math.inf, -math.inf, math.nan]
QUOTIENTS, DENOMINATORS, RADICANDS = (-90, -50), (-65, -25), (-130, -85)
"""Exponents on both sides of the limits of the ranges."""
everywhere = pytest.mark.parametrize("approximation", APPROXIMATIONS)
on_both = pytest.mark.parametrize("capability", [90, 100])


@pytest.mark.combinations(1)
@on_both
@everywhere
def test_quotients_are_correctly_rounded(capability, approximation):
    generator = torch.Generator().manual_seed(1)
    b = numbers(DENOMINATORS, 0.01, generator)
    a = b * numbers(QUOTIENTS, 0.5, generator)
    for result in executed("divide", capability, approximation, a, b):
        assert same_numbers(result, a / b)


@pytest.mark.combinations(1)
@on_both
@pytest.mark.parametrize("floor", [2.0**-27, 2.0**-40, 2.0**-41, 2.0**-60, 0.0])
def test_quotients_above_a_floor_are_correctly_rounded(capability, floor):
    generator = torch.Generator().manual_seed(2)
    b = numbers(DENOMINATORS, 0.01, generator)
    b = torch.where(b.isnan(), b, b.abs().clamp(min=floor))
    a = b * numbers(QUOTIENTS, 0.5, generator)
    for result in executed("divide_above", capability, "random", a, b, torch.tensor([floor])):
        assert same_numbers(result, a / b)


@pytest.mark.combinations(1)
@on_both
@everywhere
def test_roots_are_correctly_rounded(capability, approximation):
    v = numbers(RADICANDS, 0.01, torch.Generator().manual_seed(3))
    wrong_for_some_approximation = torch.tensor([case[2] for case in EXCEPTIONS if case[0] == "root"])
    v[torch.isin(v.view(torch.int32) & 0x7FFFFF, wrong_for_some_approximation)] = 1.0
    for result in executed("root", capability, approximation, v):
        assert same_numbers(result, v.double().sqrt().float())


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "exponent"), [("divide", -40), ("divide", -62), ("root", -50)])
def test_a_range_without_a_limit_is_found(name, exponent):
    """Whole steps do not find it: their quotients and roots are rounded further, and few are that small."""

    def without_limit(ptx: str) -> str:
        literals = [struct.pack(">f", 2.0**k).hex().upper() for k in (exponent, -126)]
        assert f"0f{literals[0]}" in ptx
        return ptx.replace(*literals)

    generator = torch.Generator().manual_seed(4)
    operands = [numbers(RADICANDS, 0.01, generator)]
    if name == "divide":
        b = numbers(DENOMINATORS, 0.01, generator)
        operands = [b * numbers(QUOTIENTS, 0.5, generator), b]
    assert not same_numbers(*executed(name, 90, "exact", *operands, change=without_limit))


def test_random_bits_are_those_of_the_word():
    generator = torch.Generator().manual_seed(0)
    pattern, word = torch.randint(-(2**31), 2**31, (2, COUNT), generator=generator).to(torch.int32)
    sums = executed("random_sums", 90, "exact", pattern, word)
    for role in (1, 2):
        assert torch.equal(sums[role - 1], pattern + lane(word, role))


def spec_of(cls, **options):
    """The spec from which a step on a BF16 parameter is rendered."""
    param = nn.Parameter(torch.zeros(1, dtype=BF16))
    param.grad = torch.zeros_like(param)
    with cls([param], backend="eager", **options).plan_step() as plan:
        return plan.fused_groups[0].spec


SCALARS = [0.7, 1e-8, 2.0**-40, 1e-30, 0.0, -0.0, -0.7, 3e38, math.inf, math.nan]


@pytest.mark.parametrize("cls", [AdamW, RAdam, Adan, StableAdamW])
def test_denominators_are_not_below_their_floor(cls):
    """With every factor and every epsilon: where a floor is in the range, so are the denominators."""
    graph = trace_for_ptx(spec_of(cls))
    (division,) = (node for node in graph.nodes if node.target is divide_above)
    factor, epsilon = torch.cartesian_prod(torch.tensor(SCALARS), torch.tensor(SCALARS)).unbind(1)
    roots = torch.tensor([0.0, -0.0, 1e-20, 1.0, 3e38, math.inf, math.nan])[:, None]

    def value(node):
        if not isinstance(node, fx.Node):
            return torch.tensor(node)
        if node.op == "placeholder":
            return epsilon if "eps" in node.name else factor
        return roots if node.target is sqrt_rn else node.target(*map(value, node.args))

    denominators, floor = map(value, division.args[1:])
    least = 2.0 ** DIVISION.least["b"]
    in_range = floor >= least
    assert (denominators.isnan() | (denominators >= floor))[:, in_range].all()
    usual = (factor > 0) & (epsilon >= least)
    assert in_range[usual].all()


CASES = {
    "kahan": (AdamW, {}, 1, 1),
    "kahan, amsgrad": (AdamW, {"amsgrad": True}, 1, 2),
    "kahan, nearest states": (AdamW, {"state_rounding": "nearest"}, 1, 1),
    "split": (AdamW, {"rounding": "split"}, 1, 1),
    "split24": (AdamW, {"rounding": "split24"}, 2, 1),
    "stochastic": (AdamW, {"rounding": "stochastic"}, 1, 1),
    "nearest": (AdamW, {"rounding": "nearest"}, 1, 1),
    "SGD": (SGD, {"momentum": 0.9}, 1, 1),
    "Lion": (Lion, {}, 1, 2),
    "RAdam": (RAdam, {}, 1, 1),
    "Adan": (Adan, {}, 1, None),
}


@pytest.mark.parametrize(("cls", "options", "stages", "tested"), CASES.values(), ids=CASES)
def test_nan_is_tested_once(cls, options, stages, tested):
    groups = [node for node in trace_for_ptx(spec_of(cls, **options)).nodes if node.target is quiet_nans]
    assert len(groups) == stages
    assert tested is None or len(groups[0].args[1]) == tested
