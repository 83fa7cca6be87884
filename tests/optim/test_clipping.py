"""`max_grad_norm` and `skip_nonfinite`: the norm, the factor, and steps that are left out."""

import copy
import functools
import gc
import math
import pickle

import pytest
import torch
from torch import nn

from hf_lowprec.optim import SGD, AdamW
from hf_lowprec.optim.backends.eager import EagerStep
from hf_lowprec.optim.step.backend_step import CHUNK
from hf_lowprec.optim.step.clipping import clip_factor
from tests.support.triton_available import device_of, quiet_interpreter, rarely_on_triton

pytestmark = quiet_interpreter
SHAPES = [(33, 65), (3,), (0,), (2 * 8192 + 5,)]


def params(backend: str, dtypes=(torch.bfloat16,)) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(device_of(backend), dtype))
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
    # A sum of n squares in FP32 is off by at most n·2⁻²⁴ relative, n = 2¹⁶ in a chunk; with errors that do not conspire
    # it is off by √n·2⁻²⁴ = 1.5e-5, and the root by half of that.
    assert norm.item() == pytest.approx(exact_norm(mixed), rel=math.sqrt(CHUNK) * 2**-24)


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


@rarely_on_triton()
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


def test_the_step_does_not_take_a_norm_again_that_was_asked_for(monkeypatch):
    calls, square_sum = [], EagerStep.square_sum
    monkeypatch.setattr(EagerStep, "square_sum", lambda self: calls.append(1) or square_sum(self))
    trained = params("eager")
    optimizer = AdamW(trained, backend="eager", max_grad_norm=0.1)
    give_gradients(trained, 0)
    optimizer.global_grad_norm()
    optimizer.step()
    assert len(calls) == 1


# No rounding ever sees the value: each mode gets one of them.
@rarely_on_triton()
@pytest.mark.combinations(1)
@pytest.mark.parametrize(
    ("rounding", "bad"),
    [("kahan", math.nan), ("split", math.inf), ("stochastic", -math.inf)],
)
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


def skipping(*bad_steps: int) -> AdamW:
    """An optimizer of two groups after four steps, of which it has skipped `bad_steps`."""
    trained = params("eager")
    optimizer = AdamW([{"params": trained[:2]}, {"params": trained[2:]}], backend="eager", skip_nonfinite=True)
    for step in range(4):
        give_gradients(trained, step, math.inf if step in bad_steps else 1.0)
        optimizer.step()
    return optimizer


def test_the_count_of_skipped_steps_is_saved():
    """A copy and a resumed optimizer count on. Before any was skipped, state dicts are those of earlier versions."""
    optimizer, other = skipping(1, 3), skipping(2)
    saved = copy.deepcopy(optimizer.state_dict())
    other.load_state_dict(saved)
    assert other.state_dict()["param_groups"] == saved["param_groups"]
    for resumed in (other, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert resumed.skipped_steps == 2
        assert all("skipped_steps" not in group for group in resumed.param_groups)
        give_gradients([p for group in resumed.param_groups for p in group["params"]], 0, math.nan)
        resumed.step()
        assert resumed.skipped_steps == 3
    without = skipping().state_dict()
    assert "skipped_steps" not in repr(without["param_groups"])
    other.load_state_dict(without)
    assert other.skipped_steps == 0


def test_without_it_a_non_finite_gradient_is_seen(backend):
    trained = params(backend)
    optimizer = AdamW(trained, backend=backend, max_grad_norm=1.0)
    give_gradients(trained, 0)
    trained[0].grad[0, 0] = math.nan
    optimizer.step()
    assert trained[1].isnan().all()  # as after `clip_grad_norm_`: the factor is not a number
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("value", [0, -1.0, math.nan, "much"])
def test_a_limit_that_makes_no_sense_is_refused_by_its_name(value):
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"^max_grad_norm="):
        SGD([param], max_grad_norm=value)
    with pytest.raises(ValueError, match=r"^max_norm="):
        SGD([param]).clip_grad_norm_(value)


# What happens to gradients between clipping and the step: torch, which rewrites them, is the reference.


def replaced_by_backward(model, clip):
    clip(1.0)
    model.zero_grad()
    backward(model, 1)


def replaced_one_by_one(model, clip):
    clip(1.0)
    for param in model.parameters():
        param.grad = None
        param.grad = torch.full_like(param, 2.5)


def one_is_dropped(model, clip):
    clip(1.0)
    model[0].bias.grad = None


def clipped_again_after_most_are_dropped(model, clip):
    clip(1.0)
    for param in list(model.parameters())[1:]:
        param.grad = None
    clip(2.0)


def clipped_tighter(model, clip):
    clip(1.0)
    clip(0.25)


def clipped_looser(model, clip):
    clip(0.25)
    clip(1.0)


def clipped_by_infinity(model, clip):
    clip(0.25)
    clip(math.inf)


def all_are_dropped(model, clip):
    clip(1.0)
    model.zero_grad()


def only_asked_for_the_norm(model, clip):
    clip(math.inf)
    backward(model, 1)


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(4, 6, generator=generator) * 10).square().sum().backward()


def zeroed_in_place_alone(model, clip):
    clip(1.0)
    model.zero_grad(set_to_none=False)


def one_is_zeroed_in_place(model, clip):
    clip(1.0)
    model[0].weight.grad.zero_()


def zeroed_in_place_and_replaced(model, clip):
    clip(1.0)
    model.zero_grad(set_to_none=False)
    model[0].weight.grad = torch.full_like(model[0].weight, 2.5)


HISTORIES = [
    *(zeroed_in_place_alone, one_is_zeroed_in_place, zeroed_in_place_and_replaced, replaced_by_backward),
    *(replaced_one_by_one, clipped_again_after_most_are_dropped, one_is_dropped),
    *(clipped_tighter, clipped_looser, clipped_by_infinity, all_are_dropped, only_asked_for_the_norm),
]


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1))


def assert_history_ends_as_in_torch(history, ours, theirs, optimizer, reference, before_clipping=lambda: None) -> None:
    """Play a history of gradients and clipping on both models, twice, and step; norms and weights are the same.

    Weights differ by the error of a norm of 41 numbers in FP32 (torch) and FP64 (here), and by six roundings of two
    factors at most.
    """
    norms: list[list[float]] = [[], []]
    for step in range(2):  # the second one on a standing plan
        for model in (ours, theirs):
            model.zero_grad()
            backward(model, 10 + step)
        before_clipping()
        history(ours, lambda limit: norms[0].append(optimizer.clip_grad_norm_(limit).item()))
        history(theirs, lambda limit: norms[1].append(nn.utils.clip_grad_norm_(theirs.parameters(), limit).item()))
        optimizer.step()
        reference.step()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=50 * 2**-24, atol=50 * 2**-24)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.__name__)
def test_clipping_belongs_to_the_gradients_it_was_asked_for(history):
    ours, theirs = small_model(), small_model()
    optimizer, reference = SGD(ours.parameters(), lr=0.1), torch.optim.SGD(theirs.parameters(), lr=0.1)
    assert_history_ends_as_in_torch(history, ours, theirs, optimizer, reference)


def test_clipping_lasts_as_long_as_the_gradients():
    """A second step with them is clipped as well; zeroed in place after a step, they are new ones."""
    ours, theirs = small_model(), small_model()
    optimizer, reference = SGD(ours.parameters(), lr=0.1), torch.optim.SGD(theirs.parameters(), lr=0.1)
    clips = [optimizer.clip_grad_norm_, lambda limit: nn.utils.clip_grad_norm_(theirs.parameters(), limit)]
    for model, opt, clip in zip((ours, theirs), (optimizer, reference), clips, strict=True):
        backward(model, 1)
        clip(0.5)
        opt.step()
        opt.step()
        model.zero_grad(set_to_none=False)
        backward(model, 2)
        opt.step()
        model.zero_grad(set_to_none=False)
        backward(model, 3)
        clip(0.5)
        opt.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        # Four steps; norms of 41 numbers in FP32 (torch) and FP64 (here), weights of up to a few hundred after them.
        torch.testing.assert_close(mine, other, rtol=200 * 2**-24, atol=200 * 2**-24)


def added_to_by_backward(model):
    backward(model, 1)


def zeroed_in_place(model):
    model.zero_grad(set_to_none=False)
    backward(model, 1)


def scaled(model):
    model[1].bias.grad.mul_(0.5)


def joined_by_another(model):
    model[0].weight.grad = torch.ones_like(model[0].weight)


@pytest.mark.parametrize("in_bucket", [False, True])
@pytest.mark.parametrize("change", [added_to_by_backward, zeroed_in_place, scaled, joined_by_another])
def test_what_was_written_to_after_clipping_is_refused(mesh, change, in_bucket):
    """The gradients that torch's `clip_grad_norm_` would have left are unknown by now: any step would be wrong."""
    model = small_model()
    trained = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True) if in_bucket else model
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model.zero_grad()
        backward(trained, 0)
    if change is joined_by_another:
        model[0].weight.grad = None
    optimizer.clip_grad_norm_(0.5)
    change(trained.module if in_bucket and change in (scaled, joined_by_another) else trained)
    before = copy.deepcopy(model.state_dict())
    clip_again = functools.partial(optimizer.clip_grad_norm_, 10.0)
    for refused in (optimizer.step, optimizer.global_grad_norm, clip_again, optimizer.step):
        with pytest.raises(RuntimeError, match=r"changed or added.*Call clip_grad_norm_ last.*torch\.nn\.utils"):
            refused()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.zero_grad(set_to_none=False)  # the way out
    backward(trained, 1)
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    moved = [(value - before[name]).double().square().sum() for name, value in model.state_dict().items()]
    # Weights of up to 0.5 are rounded to within 2⁻²⁶ where they move by 0.05 in all; there are 41.
    assert float(sum(moved)) ** 0.5 == pytest.approx(0.1 * 0.5, rel=41 * 2**-26 / 0.05)


def test_a_norm_that_was_asked_for_belongs_to_its_gradients():
    """… of whatever kind the change is: nothing is pending, so there is nothing to refuse."""
    for change in (added_to_by_backward, zeroed_in_place, scaled, joined_by_another, nn.Module.zero_grad):
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1, max_grad_norm=0.5)
        backward(model, 0)
        optimizer.global_grad_norm()
        change(model)
        left = [param for param in model.parameters() if param.grad is not None]
        expected = exact_norm(left)
        optimizer.step()
        assert optimizer.grad_norm.item() == pytest.approx(expected, rel=2**-23)


def test_a_gradient_made_in_inference_mode_is_clipped():
    param = nn.Parameter(torch.zeros(4))
    with torch.inference_mode():
        param.grad = torch.full((4,), 3.0)
    optimizer = SGD([param], lr=1.0)
    assert optimizer.clip_grad_norm_(1.0).item() == 6.0
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((4,), -0.5))


IN_BUCKETS = [replaced_by_backward, zeroed_in_place_alone, clipped_tighter, only_asked_for_the_norm]


@pytest.mark.parametrize("asked_before", [False, True])
@pytest.mark.parametrize("history", IN_BUCKETS, ids=lambda history: history.__name__)
def test_clipping_in_buckets_of_ddp_belongs_to_the_gradients_it_was_asked_for(mesh, history, asked_before):
    """DDP gives the views that it has kept to new gradients, too."""
    ours, theirs = small_model(), small_model()
    wrapped = nn.parallel.DistributedDataParallel(ours, gradient_as_bucket_view=True)
    optimizer, reference = SGD(ours.parameters(), lr=0.1), torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(2):
        backward(wrapped, 7)  # the second one makes DDP's buckets anew
        wrapped.zero_grad()

    def before_clipping() -> None:
        assert all(param.grad._is_view() for param in ours.parameters())
        if asked_before:
            optimizer.global_grad_norm()

    # The same tolerance: a mean over one rank changes no bit.
    assert_history_ends_as_in_torch(history, wrapped, theirs, optimizer, reference, before_clipping)


@pytest.mark.parametrize("in_bucket", [False, True])
def test_a_norm_that_is_not_finite_ends_with_gradients_that_are_zeroed(mesh, in_bucket):
    """Torch steps with zeros, which a factor of NaN would not leave zero."""
    model = small_model()
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True) if in_bucket else model
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model.zero_grad()
        backward(wrapped, 7)
    model[0].weight.grad[0, 0] = math.nan
    assert optimizer.clip_grad_norm_(0.5).isnan()
    model.zero_grad(set_to_none=False)
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_shards_that_are_zeroed_in_place(mesh):
    model = small_model()
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    backward(model, 0)
    optimizer.step()
    model.zero_grad()
    backward(model, 1)
    optimizer.clip_grad_norm_(0.5)
    model.zero_grad(set_to_none=False)
    before = {name: param.full_tensor().clone() for name, param in model.named_parameters()}
    momenta = {n: optimizer.state[p]["momentum_buffer"].full_tensor().clone() for n, p in model.named_parameters()}
    optimizer.step()
    for name, param in model.named_parameters():
        # The momentum alone moves the weight: two products and a difference in FP32.
        expected = before[name].double() - 0.1 * 0.9 * momenta[name].double()
        torch.testing.assert_close(param.full_tensor().double(), expected, rtol=2**-22, atol=2**-22)


@pytest.mark.parametrize("other_clips", [False, True])
def test_gradients_in_a_bucket_of_ddp(mesh, other_clips):
    """Views of one bucket share their version: a write to one that another optimizer steps is no change of ours."""
    model = small_model()
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = SGD(model[0].parameters(), lr=0.1)
    for _ in range(2):
        backward(wrapped, 7)  # the second one makes DDP's buckets anew
        model.zero_grad()
    for step in range(2):
        model.zero_grad()
        backward(wrapped, step)
        assert all(param.grad._is_view() for param in model.parameters())
        grads = [param.grad.clone() for param in model[0].parameters()]
        norm = optimizer.clip_grad_norm_(0.5)
        if other_clips:
            nn.utils.clip_grad_norm_(model[1].parameters(), 1e-3)
        before = [param.detach().clone() for param in model[0].parameters()]
        optimizer.step()
        for param, old, grad in zip(model[0].parameters(), before, grads, strict=True):
            torch.testing.assert_close(param.detach(), old - 0.1 * grad * clip_factor(norm, 0.5), rtol=2**-22, atol=0)
    optimizer.zero_grad()
    assert optimizer.limit is None


@pytest.mark.parametrize("added_to", [False, True])
def test_gradients_of_fsdp2(mesh, added_to):
    """FSDP2 adds the next micro-batch to the local tensor of the distributed gradient."""
    model, plain = small_model(), small_model()
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    optimizer, reference = SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        backward(model, step)
        optimizer.clip_grad_norm_(0.5)
        if added_to:
            backward(model, 7)
            with pytest.raises(RuntimeError, match="Call clip_grad_norm_ last"):
                optimizer.step()
        model.zero_grad()
        plain.zero_grad()
        for each in (model, plain):
            backward(each, 20 + step)
        optimizer.step()  # of gradients that were never clipped
        reference.step()
        model.zero_grad()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other, rtol=50 * 2**-24, atol=50 * 2**-24)


@pytest.mark.parametrize("ask", [None, SGD.global_grad_norm], ids=["step", "norm"])
def test_a_norm_that_is_asked_for_does_not_change_what_is_pending(ask):
    """Three of four gradients of 1 are dropped after clipping to 1: torch leaves 1/2 of the last one."""
    params = [nn.Parameter(torch.zeros(1)) for _ in range(4)]
    for param in params:
        param.grad = torch.ones(1)
    optimizer = SGD(params, lr=1.0)
    optimizer.clip_grad_norm_(1.0)
    for param in params[1:]:
        param.grad = None
    if ask is not None:
        assert ask(optimizer).item() == 1
    optimizer.step()
    # Torch's factor is 1/(2 + 1e-6).
    assert params[0].item() == pytest.approx(-0.5, rel=1e-6)


def test_a_gradient_that_is_dropped_does_not_hide_a_norm_that_is_not_finite():
    """Torch would have scaled the others by NaN."""
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = SGD(params, lr=1.0, skip_nonfinite=True)
    params[0].grad, params[1].grad = torch.full((2,), math.nan), torch.ones(2)
    optimizer.clip_grad_norm_(1.0)
    params[0].grad = None
    assert optimizer.clip_grad_norm_(1.0).isnan()
    optimizer.step()
    assert not params[1].any()
    assert optimizer.skipped_steps == 1


def test_clipping_that_fails_leaves_what_was_pending():
    params = [nn.Parameter(torch.zeros(4))]
    params[0].grad = torch.ones(4)
    optimizer = SGD(params, lr=1.0)
    optimizer.clip_grad_norm_(1.0)
    optimizer.param_groups[0]["rounding"] = "up"
    with pytest.raises(ValueError, match="rounding='up'"):
        optimizer.clip_grad_norm_(0.5)
    optimizer.param_groups[0]["rounding"] = "kahan"
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), torch.full((4,), -0.5))  # torch adds 1e-6 to the norm of 2


def test_settings_are_checked_before_states_are_made_and_in_every_step():
    params = [nn.Parameter(torch.zeros(4).bfloat16())]
    params[0].grad = torch.ones(4).bfloat16()
    optimizer = AdamW(params)
    (group,) = optimizer.param_groups
    group["weight_decay"] = -1.0
    with pytest.raises(ValueError, match=r"weight_decay=-1\.0"):
        optimizer.clip_grad_norm_(1.0)
    assert not optimizer.state[params[0]]
    group["weight_decay"] = 0.0
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    before = params[0].detach().clone()
    params[0].grad = torch.ones(4).bfloat16()
    group["betas"] = (0.9, 2.0)  # the norm does not depend on it
    assert optimizer.clip_grad_norm_(1.0) == 2.0
    with pytest.raises(ValueError, match="betas"):
        optimizer.step()
    assert torch.equal(params[0], before)
    assert optimizer.state[params[0]]["step"] == 1


def test_a_norm_in_a_bucket_of_ddp_that_is_not_a_number_is_the_same_norm(mesh):
    """… and its step is left out, although NaN is equal to nothing."""
    model = small_model()
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = SGD(model[0].parameters(), lr=0.1, skip_nonfinite=True)
    for _ in range(3):
        model.zero_grad()
        backward(wrapped, 7)
    model[0].weight.grad[0, 0] = math.nan
    optimizer.clip_grad_norm_(0.5)
    nn.utils.clip_grad_norm_(model[1].parameters(), 1e-3)
    optimizer.step()
    assert optimizer.skipped_steps == 1


def tensors_with_a_graph() -> set[int]:
    return {id(found) for found in gc.get_objects() if type(found) is torch.Tensor and found.grad_fn is not None}


@pytest.mark.parametrize("ask", [lambda optimizer: optimizer.clip_grad_norm_(1.0), AdamW.global_grad_norm])
def test_no_graph_is_recorded(backend, ask):
    """Neither of a parameter that is not contiguous and stepped as a copy, nor of gradients that have a graph."""
    param = nn.Parameter(torch.ones(8, 4, device=device_of(backend), dtype=torch.bfloat16).t())
    optimizer = AdamW([param], backend=backend)
    before = tensors_with_a_graph()
    for _ in range(2):
        (param.grad,) = torch.autograd.grad(param.square().sum(), param, create_graph=True)
        assert param.grad.grad_fn is not None
        assert not ask(optimizer).requires_grad
        optimizer.step()
        param.grad = None
    assert tensors_with_a_graph() <= before
