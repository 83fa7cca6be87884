"""The gradients of the benchmarks' option `--gradients` are what their names say, and are stepped right."""

import sys
import time
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as when the script runs

from cpu_step.optimizers import BASELINE, kinds_of_gradients  # noqa: E402
from cpu_step.tables import table_of_gradients  # noqa: E402
from gradient_kinds import KINDS, RANDOM, give_gradients, shapes  # noqa: E402
from step_time import measure  # noqa: E402

from hf_lowprec import AdamW  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = shapes(vocabulary=100, hidden=24, experts=6, intermediate=16)


def parameters(dtype: torch.dtype = BF16) -> list[Parameter]:
    return [Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_moments_of_what_has_never_been_seen_are_zero(backend):
    embedding, experts = params = parameters()
    optimizer = AdamW(params, backend=backend)
    total = 100 * 24 + 6 * 16 * 24
    assert give_gradients(params, "rows not seen") == pytest.approx(93 * 24 / total, rel=0.01)  # 7 rows are seen
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        assert optimizer.state[embedding][name].any(1).nonzero().flatten().tolist() == list(range(0, 100, 16))
        assert optimizer.state[experts][name].any()
    assert give_gradients(params, "experts without tokens") == pytest.approx(4 * 16 * 24 / total, rel=0.01)
    assert experts.grad.flatten(1).any(1).tolist() == [True, False, False, False, True, False]
    assert embedding.grad.any(1).all()


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_subnormal_numbers(dtype):
    least = torch.finfo(FP32).tiny
    params = parameters(dtype)
    assert give_gradients(params, "subnormal gradients") == 1
    sizes = torch.cat([param.grad.float().abs().flatten() for param in params])
    assert sizes.max() < least
    assert (sizes > 0).float().mean() > 0.95
    assert give_gradients(params, "subnormal second moments") == 1
    sizes = torch.cat([param.grad.float().abs().flatten() for param in params])
    assert (sizes >= least).float().mean() > 0.99
    moments = sizes.square() * 1e-3  # with β2 = 0.999, after the first step
    assert moments.max() < least
    assert (moments > 0).float().mean() > 0.95


@pytest.mark.parametrize("size", [2, 4, 8])
def test_views_of_a_bucket_are_misaligned_alike(size):
    params = parameters()
    assert give_gradients(params, f"{size} bytes into a bucket") == 1
    assert [param.grad.data_ptr() % 16 for param in params] == [size, size]
    assert params[0].grad.untyped_storage().data_ptr() == params[1].grad.untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_backends_agree(kind):
    results = []
    for backend in ("eager", "native"):
        torch.manual_seed(0)
        params = parameters()
        optimizer = AdamW(params, rounding="kahan", backend=backend)
        for _ in range(3):
            give_gradients(params, kind)
            optimizer.step()
        results.append([*params, *(value for state in optimizer.state.values() for value in state.values())])
    assert all(map(torch.equal, *results))


def test_the_table_of_the_cpu():
    rows = measure(kinds_of_gradients(SHAPES), 1, time.perf_counter)
    table = table_of_gradients([rows, rows]).strip().splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in table[2:]] == [kind for kind in KINDS if kind != RANDOM]
    assert "kahan" in table[0]
    assert "stochastic" in table[0]
    assert BASELINE in table[0]
