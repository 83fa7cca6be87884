"""`max_grad_norm` and `skip_nonfinite`: the norm, the factor, and steps that are left out."""

import copy
import math

import pytest
import torch
from torch import nn

from hf_lowprec.optim import SGD, AdamW
from hf_lowprec.optim.clipping import PIECE, clip_factor
from tests.triton_here import require_triton

# Triton's interpreter computes with NumPy, which remarks on what IEEE arithmetic does every day.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
GPU = torch.cuda.is_available()
BACKENDS = ["eager", "native", "triton"]
SHAPES = [(33, 65), (3,), (0,), (2 * 8192 + 5,)]


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    if request.param == "triton":
        require_triton()
    return request.param


def device(backend: str) -> str:
    return "cuda" if GPU and backend == "triton" else "cpu"


def params(backend: str, dtypes=(torch.bfloat16,)) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(device(backend), dtype))
        for dtype in dtypes
        for shape in SHAPES
    ]


def give_gradients(params: list[nn.Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * scale).to(param.device, param.dtype)


def exact_norm(params: list[nn.Parameter]) -> float:
    return math.sqrt(sum(float(param.grad.double().square().sum()) for param in params))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_the_norm_is_that_of_all_gradients(backend, scale):
    mixed = params(backend, (torch.bfloat16, torch.float32, torch.float16))
    optimizer = AdamW(mixed, backend=backend)
    give_gradients(mixed, 0, scale)
    norm = optimizer.global_grad_norm()
    assert (norm.dtype, norm.shape, norm.device) == (torch.float32, (), mixed[0].device)
    # A sum of n squares in FP32 is off by at most n·2⁻²⁴ relative, n = 2¹⁶ in a piece; with errors that do not conspire
    # it is off by √n·2⁻²⁴ = 1.5e-5, and the root by half of that.
    assert norm.item() == pytest.approx(exact_norm(mixed), rel=math.sqrt(PIECE) * 2**-24)


def test_clipping_is_a_smaller_gradient(backend):
    """With gradients in FP32 a clipped step is the step of the scaled gradient, bit for bit."""
    clipped, scaled = (params(backend, (torch.float32,)) for _ in range(2))
    ours = SGD(clipped, lr=0.1, momentum=0.9, backend=backend, max_grad_norm=0.5)
    plain = SGD(scaled, lr=0.1, momentum=0.9, backend=backend)
    for step in range(3):
        for each in (clipped, scaled):
            give_gradients(each, step)
        norm = ours.global_grad_norm()
        factor = clip_factor(norm, 0.5)
        assert factor.item() == pytest.approx(0.5 / exact_norm(clipped), rel=2e-5)
        for param in scaled:
            param.grad *= factor
        before = [param.grad.clone() for param in clipped]
        ours.step()
        plain.step()
        assert torch.equal(ours.grad_norm, norm)
        assert all(map(torch.equal, clipped, scaled))
        assert all(torch.equal(param.grad, grad) for param, grad in zip(clipped, before, strict=True))


def test_it_follows_torch(backend):
    """AdamW after `clip_grad_norm_`, FP32: a few ulps of the factor and of a step apart."""
    ours, theirs = (params(backend, (torch.float32,)) for _ in range(2))
    optimizer = AdamW(ours, lr=1e-2, backend=backend, max_grad_norm=1.0)
    reference = torch.optim.AdamW(theirs, lr=1e-2)
    for step in range(5):
        for each in (ours, theirs):
            give_gradients(each, step, 10.0 ** (step - 4))
        expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizer.step()
        reference.step()
        assert optimizer.grad_norm.item() == pytest.approx(expected.item(), rel=2e-5)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5 * 1e-2 * (step + 1))


def test_a_norm_below_the_limit_changes_nothing(backend):
    clipped, plain = params(backend), params(backend)
    optimizers = [AdamW(clipped, backend=backend, max_grad_norm=1e6), AdamW(plain, backend=backend)]
    for step in range(3):
        for each in (clipped, plain):
            give_gradients(each, step)
        for optimizer in optimizers:
            optimizer.step()
    assert all(map(torch.equal, clipped, plain))
    assert optimizers[1].grad_norm is None


def test_the_norm_is_taken_once_where_it_was_asked_for_before(backend, monkeypatch):
    from hf_lowprec.optim import backends

    calls = []
    for name in ("EAGER", "NATIVE", "TRITON"):
        old = getattr(backends, name)
        counted = old._replace(square_sum=lambda batch, old=old: calls.append(1) or old.square_sum(batch))
        monkeypatch.setattr(backends, name, counted)
    trained = params(backend)
    optimizer = AdamW(trained, backend=backend, max_grad_norm=0.1)
    give_gradients(trained, 0)
    optimizer.global_grad_norm()
    optimizer.step()
    assert len(calls) == 1
    give_gradients(trained, 1)
    optimizer.step()
    assert len(calls) == 2
    assert optimizer.grad_norm.item() == pytest.approx(exact_norm(trained), rel=2e-5)
    optimizer.global_grad_norm()
    optimizer.zero_grad()
    give_gradients(trained, 2, 7.0)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(exact_norm(trained), rel=2e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_a_step_with_a_non_finite_norm_leaves_everything_as_it_is(backend, rounding, bad):
    """… and the steps after it are those of a run that never met it: counts and random bits included."""
    met, spared = params(backend), params(backend)
    options = {"lr": 1e-2, "rounding": rounding, "backend": backend, "skip_nonfinite": True, "max_grad_norm": 1.0}
    ours, other = AdamW(met, **options), AdamW(spared, **options)
    for step in range(4):
        give_gradients(met, step)
        if step == 2:
            before = copy.deepcopy([met, ours.state_dict()["state"]])
            met[3].grad[8200] = bad
            ours.step()
            after = [met, ours.state_dict()["state"]]
            assert all(map(torch.equal, before[0], after[0]))
            for k, state in before[1].items():
                assert all(torch.equal(value, after[1][k][name]) for name, value in state.items())
            assert ours.skipped_steps == 1
            assert not ours.grad_norm.isfinite()
            continue
        give_gradients(spared, step)
        ours.step()
        other.step()
    assert (ours.skipped_steps, other.skipped_steps) == (1, 0)
    assert all(map(torch.equal, met, spared))
    for mine, theirs in zip(met, spared, strict=True):
        assert ours.state[mine]["step"] == 3
        for name, value in other.state[theirs].items():
            assert torch.equal(ours.state[mine][name], value), name


def test_without_it_a_non_finite_gradient_is_seen(backend):
    trained = params(backend)
    optimizer = AdamW(trained, backend=backend, max_grad_norm=1.0)
    give_gradients(trained, 0)
    trained[0].grad[0, 0] = math.nan
    optimizer.step()
    assert trained[1].isnan().all()  # as after `clip_grad_norm_`: the factor is not a number
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "much"])
def test_a_limit_that_makes_no_sense_is_refused(value):
    with pytest.raises(ValueError, match="max_grad_norm"):
        AdamW([nn.Parameter(torch.zeros(3))], max_grad_norm=value)


@pytest.mark.parametrize("name", ["skip_nonfinite", "capturable"])
def test_a_switch_is_true_or_false(name):
    with pytest.raises(ValueError, match=f"{name}='yes'"):
        AdamW([nn.Parameter(torch.zeros(3))], **{name: "yes"})
