"""The C code of the step gives the same bits on 64-bit ARM as `eager` and `native` do here: by emulation, if installed.

On ARM, arithmetic makes NaNs of other signs and payloads, compilers contract to fused multiply-adds unless told not to,
and integers of 8 bits have no sign unless they are declared with one.
"""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hf_lowprec.optim import SGD, AdamW
from hf_lowprec.optim.backends.c import native
from hf_lowprec.optim.backends.c.compiler import FLAGS
from tests.support.optim.emulated_arm import PROCESSORS, EmulatedLibrary, missing_programs
from tests.support.optim.every_optimizer import NAMES, OPTIONS
from tests.support.optim.trained_everywhere import EVERY_MODE, TWO_MODES, same, trained

pytestmark = pytest.mark.skipif(
    bool(missing_programs()),
    reason=f"{' and '.join(missing_programs())} not found: apt install gcc-aarch64-linux-gnu qemu-user",
)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


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


OTHERS = [name for name in NAMES if name not in ("AdamW", "Muon")]
"""Muon's matrix products are torch's."""
CASES = [*itertools.product(["AdamW"], EVERY_MODE, PROCESSORS), *itertools.product(OTHERS, TWO_MODES, ["armv8-a"])]


@pytest.mark.combinations(1)  # a case takes a second to compile and emulate
@pytest.mark.parametrize(
    ("name", "mode", "processor"),
    [
        pytest.param(
            *case,
            id=f"{case[0]}-{str(case[1][0])[6:]}-{case[1][1]}-{case[2]}",
            marks=pytest.mark.every_case if case[0] in OTHERS else (),
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


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_mean_over_a_tensor_has_the_same_bits(processor, tmp_path):
    with emulated(tmp_path, processor) as libraries:
        on_arm = trained("StableAdamW", BF16, "native", rounding="kahan")
    assert sum(library.calls["tensor_sum"] for library in libraries) >= 3
    assert same(on_arm, trained("StableAdamW", BF16, "native", rounding="kahan"))


@pytest.mark.every_case
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


@pytest.mark.every_case
@pytest.mark.parametrize("rounding", ["kahan", "split", "nearest"])
def test_ties_are_decided_alike(rounding, tmp_path):
    """Weights between 1 and 2, whose spacing is 2⁻⁷, and updates of odd multiples of 2⁻⁸."""
    weight = 1 + torch.arange(64).float() / 128
    grad = (2 * torch.arange(64).float() - 63) / 256

    def stepped(backend: str) -> Tensor:
        param = nn.Parameter(weight.to(BF16))
        param.grad = grad.to(BF16)
        SGD([param], lr=1.0, rounding=rounding, backend=backend).step()
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
