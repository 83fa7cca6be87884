"""Inline PTX on this GPU: the bits of `div.rn.f32` and `sqrt.rn.f32`, and random bits."""

import pytest
import torch

from hf_lowprec.optim.backends.triton.launch import inlined_ptx
from hf_lowprec.rounding.random_bits import lane
from tests.support.optim.fast_path_kernels import fast_path_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
COUNT = 1 << 24


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    major, minor = torch.cuda.get_device_capability()
    ptx = inlined_ptx(10 * major + minor)
    if torch.version.hip is not None or ptx == 0:
        pytest.skip("PTX is inlined for NVIDIA GPUs of compute capability 8.0 and later")
    return fast_path_kernels(tmp_path_factory.mktemp("kernels")), ptx


def check(kernel, ptx: int, *operands: torch.Tensor) -> None:
    operands = [operand.to(torch.int32).contiguous().view(torch.float32) for operand in operands]
    inlined, exact = torch.empty_like(operands[0]), torch.empty_like(operands[0])
    constants = {"BLOCK": 1024, "PTX": ptx, "num_warps": 4, "enable_fp_fusion": False}
    kernel[(inlined.numel() // 1024,)](*operands, inlined, exact, **constants)
    wrong = inlined.view(torch.int32) != exact.view(torch.int32)
    assert not wrong.any(), [operand[wrong][:5].tolist() for operand in operands]


def test_all_roots(kernels):
    module, ptx = kernels
    for start in range(-(1 << 31), 1 << 31, COUNT):
        check(module.root, ptx, torch.arange(start, start + COUNT, device="cuda"))


def test_all_reciprocals(kernels):
    """1 / b of all b, from which each quotient is computed."""
    module, ptx = kernels
    for start in range(-(1 << 31), 1 << 31, COUNT):
        denominators = torch.arange(start, start + COUNT, device="cuda")
        check(module.divide, ptx, torch.full_like(denominators, 0x3F800000), denominators)


@pytest.mark.parametrize("near", [False, True], ids=["any bits", "exponents of a step"])
def test_random_quotients(kernels, near):
    module, ptx = kernels
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(64):
        both = torch.randint(-(1 << 31), 1 << 31, (2, COUNT), generator=generator, device="cuda")
        if near:
            both = torch.stack([(both[0] & ~0x60000000) | 0x20000000, (both[1] & 0x1FFFFFFF) | 0x20000000])
        both[0, ::64] &= -(1 << 31)  # zeros of both signs
        check(module.divide, ptx, *both)


@pytest.mark.parametrize("floor", [2.0**-40, 2.0**-41, 0.0])
def test_quotients_above_a_floor(kernels, floor):
    """In the first test of their range, only the floor is compared."""
    module, ptx = kernels
    generator = torch.Generator("cuda").manual_seed(2)
    least = torch.full((1,), floor, device="cuda")
    for _ in range(8):
        a, b = torch.randint(-(1 << 31), 1 << 31, (2, COUNT), generator=generator, device="cuda").to(torch.int32)
        a, b = a.view(torch.float32), b.view(torch.float32)
        a[::64] = 0
        b = torch.where(b.isnan(), b, b.abs().clamp(min=floor))
        inlined, exact = torch.empty_like(a), torch.empty_like(a)
        constants = {"BLOCK": 1024, "PTX": ptx, "num_warps": 4, "enable_fp_fusion": False}
        module.divide_above[(COUNT // 1024,)](a, b, least, inlined, exact, **constants)
        assert torch.equal(inlined.view(torch.int32), exact.view(torch.int32))


def test_random_bits(kernels):
    module, ptx = kernels
    generator = torch.Generator("cuda").manual_seed(3)
    both = torch.randint(-(1 << 31), 1 << 31, (2, COUNT), generator=generator, device="cuda")
    pattern, word = both.to(torch.int32)
    sums = torch.empty((2, COUNT), dtype=torch.int32, device="cuda")
    constants = {"BLOCK": 1024, "PTX": ptx, "num_warps": 4, "enable_fp_fusion": False}
    module.random_sums[(COUNT // 1024,)](pattern, word, sums, **constants)
    for role in (1, 2):
        assert torch.equal(sums[role - 1], pattern + lane(word, role))
