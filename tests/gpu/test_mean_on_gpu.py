"""The compiled kernel of the mean in rank order against torch's operations on the CPU."""

import pytest
import torch

from hf_lowprec.reduction import mean_in_rank_order
from tests.support.same_numbers import same_numbers

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


PAIRS = [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("float32", "float32")]


@pytest.mark.parametrize("dtypes", PAIRS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 7, 1024, 1_000_003])
def test_the_same_bits_as_on_the_cpu(dtypes, ranks, count):
    given, stored = (getattr(torch, name) for name in dtypes)
    generator = torch.Generator().manual_seed(count + ranks)
    scale = torch.exp2(torch.randint(-12, 12, (ranks, count), generator=generator).float())
    versions = (torch.randn(ranks, count, generator=generator) * scale).to(given)
    versions.view(-1)[:3] = torch.tensor([float("inf"), float("nan"), -0.0])[: min(3, versions.numel())]
    for divisor in (1, ranks):
        expected = mean_in_rank_order(versions, divisor, torch.empty(count, dtype=stored))
        found = mean_in_rank_order(versions.cuda(), divisor, torch.empty(count, dtype=stored, device="cuda"))
        assert same_numbers(found, expected)
