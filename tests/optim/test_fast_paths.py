"""Division, root and NaN in kernels for NVIDIA GPUs, without one: the same operations in C, and the graph in torch."""

import itertools
import math
import random
import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from benchmarks.fast_paths import EXCEPTIONS, exception, run
from hf_lowprec.optim import SGD, AdamW, Adan, Lion, RAdam, StableAdamW
from hf_lowprec.optim.codegen.fast_paths import DIVISION, ROOT
from hf_lowprec.optim.codegen.inline_ptx import ADD_LANE, ELEMENTS, fast_path
from hf_lowprec.optim.codegen.ptx_graph import divide_above, from_bfloat16, quiet_nans, to_bfloat16, trace_for_ptx
from hf_lowprec.optim.codegen.trace import trace
from hf_lowprec.rounding import sqrt_rn
from hf_lowprec.rounding.random_bits import lane
from tests.support.optim.ptx_emulation import divide, emulate, root

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


@pytest.mark.parametrize("path", [DIVISION, ROOT], ids=["division", "root"])
@pytest.mark.parametrize("in_pairs", [False, True])
def test_each_element_has_each_operation(path, in_pairs):
    lines = fast_path(path, in_pairs).assembly.splitlines()
    for name in {operation.instruction for operation in path.operations}:
        paired = in_pairs and ".rn." in name
        expected = sum(operation.instruction == name for operation in path.operations) * ELEMENTS // (1 + paired)
        instruction = name.replace(".f32", ".f32x2") if paired else name
        assert sum(line.split()[0] == instruction for line in lines) >= expected
    assert sum(line.startswith(path.instruction) for line in lines) == ELEMENTS


@pytest.mark.parametrize("role", [1, 2, 4])
def test_random_bits_are_those_of_the_word(role):
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        pattern, word = (torch.randint(-(2**31), 2**31, (2,), generator=generator) for _ in range(2))
        inputs = [[int(value) & 0xFFFFFFFF for value in values] for values in (pattern, word)]
        expected = pattern.int() + lane(word.int(), role)
        assert emulate(ADD_LANE[role % 3], inputs) == [int(value) & 0xFFFFFFFF for value in expected]


def assert_same(computed: list[float], expected: list[float]) -> None:
    """Numbers are equal, signs of zeros included, and NaN is where NaN is."""
    assert [struct.pack("<d", x) for x in computed] == [struct.pack("<d", x) for x in expected]


SPECIAL = [0.0, -0.0, 1.0, 3e-45, -(2.0**-130), 2.0**-45, 2.0**-41, 2.0**-39, 2.0**127, math.inf, -math.inf, math.nan]


def threads(lowest: float) -> Iterator[tuple[list[float], list[float]]]:
    """The elements of some threads: any numbers, and denominators of which none is smaller than `lowest`."""
    generator = random.Random(0)

    def numbers(share: float, exponents: tuple[int, int]) -> list[float]:
        usual = [math.ldexp(generator.uniform(-2, 2), generator.randint(*exponents)) for _ in range(ELEMENTS)]
        chosen = [generator.choice(SPECIAL) if generator.random() < share else x for x in usual]
        return [struct.unpack("<f", struct.pack("<f", x))[0] for x in chosen]

    usual = ((-30, 20), (-30, 20))
    inexact = ((-124, -118), (-72, -66))  # remainders of these quotients are less than the smallest number
    for share, exponents in itertools.product([0.0, 0.05, 0.3] * 30, [usual, inexact]):
        a, b = (numbers(share, range_) for range_ in exponents)
        yield a, [x if math.isnan(x) or x >= lowest else lowest for x in map(abs, b)]


@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("bounded", [None, "b"])
@pytest.mark.parametrize("floor", [2.0**-27, 2.0**-40, 2.0**-41, 2.0**-60, 0.0])
def test_instructions_give_the_quotient(in_pairs, bounded, floor):
    ptx = fast_path(DIVISION, in_pairs, bounded)
    for a, b in threads(floor):
        floors = [] if bounded is None else [[floor] * ELEMENTS]
        assert_same(emulate(ptx, [a, b, *floors]), [divide(x, y) for x, y in zip(a, b, strict=True)])


@pytest.mark.parametrize("in_pairs", [False, True])
def test_instructions_give_the_root(in_pairs):
    ptx = fast_path(ROOT, in_pairs)
    for v, other in threads(-math.inf):
        for values in (v, other):
            assert_same(emulate(ptx, [values]), [root(x) for x in values])


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


class HardwareNan(fx.Interpreter):
    """Runs a graph for PTX as a GPU does: conversions give NaN as 0x7FFF, and only what is tested is replaced."""

    def call_function(self, target, args, kwargs):
        if target is from_bfloat16:
            return args[0]  # the tests pass FP32 values
        if target is to_bfloat16:
            return torch.where(
                args[0] != args[0], torch.tensor(0x7FFF0000).int().view(torch.float32), args[0].to(BF16).float()
            )
        if target is quiet_nans:
            values, tested = args
            found = torch.stack([values[k].isnan() for k in tested]).any(0)
            return tuple(torch.where(found & value.isnan(), float("nan"), value) for value in values)
        return super().call_function(target, args, kwargs)


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
def test_nan_is_tested_once_and_every_bit_is_the_same(cls, options, stages, tested):
    spec = spec_of(cls, **options)
    graph = trace_for_ptx(spec)
    groups = [node for node in graph.nodes if node.target is quiet_nans]
    assert len(groups) == stages
    assert tested is None or len(groups[0].args[1]) == tested

    generator = torch.Generator().manual_seed(1)
    special = torch.tensor([0.0, -0.0, 1.0, -3.0, 2.0**-133, torch.inf, -torch.inf, torch.nan, 3.4e38])
    size = 20_000

    def values() -> torch.Tensor:
        usual = torch.randn(size, generator=generator).to(BF16).float()
        return torch.where(
            torch.rand(size, generator=generator) < 0.3,
            special[torch.randint(len(special), (size,), generator=generator)].to(BF16).float(),
            usual,
        )

    inputs = []
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.name in spec.tensors:
                inputs.append(values() if spec.tensors[node.name] == BF16 else torch.randint(-99, 99, (size,)).int())
            elif node.name.startswith("scalar_"):
                inputs.append(torch.tensor(0.5))
            else:
                inputs.append(torch.randint(-(2**31), 2**31, (size,), generator=generator).int())
    expected = fx.Interpreter(fx.GraphModule(nn.Module(), trace(spec))).run(*inputs)
    computed = HardwareNan(fx.GraphModule(nn.Module(), graph)).run(*inputs)
    for stored, exact in zip(computed, expected, strict=True):
        assert torch.equal(stored.view(torch.int32), exact.view(torch.int32))
    assert expected[0].isnan().any()
