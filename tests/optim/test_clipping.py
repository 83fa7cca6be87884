"""`max_grad_norm` and `skip_nonfinite`: the norm, the factor, and steps that are left out."""

import copy
import gc
import math
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_lowprec.optim import SGD, AdamW, LowPrecisionOptimizer
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
    optimizer = AdamW(mixed, rounding="kahan", backend=backend)  # split weights are BF16
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


class Run:
    """A model that is trained with clipping: by an optimizer of ours, or by torch's functions."""

    def __init__(self, optimizer_class, wrap=None, **options) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1))
        self.trained = self.model if wrap is None else wrap(self.model)
        self.optimizer = optimizer_class(self.model.parameters(), **{"lr": 0.1, **options})
        self.norms: list[float] = []

    def backward(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.trained(torch.randn(4, 6, generator=generator) * 10).square().sum().backward()

    def clip(self, limit: float) -> None:
        if isinstance(self.optimizer, LowPrecisionOptimizer):
            self.norms.append(self.optimizer.clip_grad_norm_(limit).item())
        else:
            self.norms.append(nn.utils.clip_grad_norm_(self.model.parameters(), limit).item())

    def norm(self) -> None:
        if isinstance(self.optimizer, LowPrecisionOptimizer):
            self.optimizer.global_grad_norm()

    def step(self) -> None:
        self.optimizer.step()

    def drop(self) -> None:
        self.model.zero_grad()

    def zero(self) -> None:
        self.model.zero_grad(set_to_none=False)

    def drop_one(self) -> None:
        self.model[0].bias.grad = None

    def drop_most(self) -> None:
        for param in list(self.model.parameters())[1:]:
            param.grad = None

    def zero_one(self) -> None:
        self.model[0].weight.grad.zero_()

    def replace_one(self) -> None:
        self.model[0].weight.grad = torch.full_like(self.model[0].weight, 2.5)

    def replace_each(self) -> None:
        for param in self.model.parameters():
            param.grad = None
            param.grad = torch.full_like(param, 2.5)

    def add(self) -> None:
        self.backward(1)

    def scale(self) -> None:
        self.model[1].bias.grad.mul_(0.5)

    def values(self) -> list[torch.Tensor]:
        values = (param.detach().clone() for param in self.model.parameters())
        return [value.full_tensor() if isinstance(value, DTensor) else value for value in values]


WRAPPERS = {
    "plain": None,
    "bucket": lambda model: nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True),
    "shards": fully_shard,
}
HISTORIES = {
    "zeroed": ["clip 1", "zero"],
    "one zeroed": ["clip 1", "zero_one"],
    "zeroed and replaced": ["clip 1", "zero", "replace_one"],
    "replaced by backward": ["clip 1", "drop", "add"],
    "replaced one by one": ["clip 1", "replace_each"],
    "most dropped, and clipped again": ["clip 1", "drop_most", "clip 2"],
    "most dropped, and the norm asked for": ["clip 1", "drop_most", "norm"],
    "one dropped": ["clip 1", "drop_one"],
    "tighter": ["clip 1", "clip 0.25"],
    "looser": ["clip 0.25", "clip 1"],
    "by infinity": ["clip 0.25", "clip inf"],
    "all dropped": ["clip 1", "drop"],
    "only the norm": ["clip inf", "add"],
    "the norm before": ["norm", "clip 1", "drop", "add"],
    # Clipping lasts as long as the gradients. Zeroed in place after a step, they are new ones.
    "several steps": ["clip 0.5", "step", "step", "zero", "add", "step", "zero", "add", "clip 0.5"],
}
KINDS = {
    "plain": HISTORIES,
    "bucket": ("replaced by backward", "zeroed", "tighter", "only the norm", "the norm before"),
    "shards": ("replaced by backward", "zeroed"),
}


@pytest.mark.parametrize(("kind", "history"), [(kind, history) for kind, known in KINDS.items() for history in known])
def test_clipping_belongs_to_the_gradients_it_was_asked_for(mesh, kind, history):
    """DDP gives the views that it has kept to new gradients, too. A mean over one rank changes no bit."""
    options = {"lr": 0.001, "momentum": 0.9}
    ours, theirs = runs = Run(SGD, WRAPPERS[kind], **options), Run(torch.optim.SGD, **options)
    for run in runs:
        for step in range(4):  # DDP makes its buckets anew in the second pass
            run.drop()
            run.backward(10 + step)
            if step < 2:
                continue  # the second one of the others steps on a standing plan
            assert kind != "bucket" or run is theirs or all(param.grad._is_view() for param in run.model.parameters())
            for action in HISTORIES[history]:
                name, *limit = action.split()
                getattr(run, name)(*map(float, limit))
            run.step()
    # Norms of 41 numbers in FP32 (torch) and FP64 (here); weights of up to a few hundred after four steps.
    for mine, other in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=200 * 2**-24, atol=200 * 2**-24)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-5)


def zeroed_and_added_to(run: Run) -> None:
    run.zero()
    run.add()


CHANGES = [Run.add, zeroed_and_added_to, Run.scale, Run.replace_one]


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_was_written_to_after_clipping_is_refused(mesh, change, kind):
    """The gradients that torch's `clip_grad_norm_` would have left are unknown by now: any step would be wrong."""
    run = Run(SGD, WRAPPERS[kind])
    for _ in range(3):
        run.drop()
        run.backward(0)
    if change is Run.replace_one:  # another joins them
        run.model[0].weight.grad = None
    run.clip(0.5)
    change(run)
    before = run.values()
    for refused in (run.step, run.norm, lambda: run.clip(10.0), run.step):
        with pytest.raises(RuntimeError, match=r"changed or added.*Call clip_grad_norm_ last.*torch\.nn\.utils"):
            refused()
    assert all(map(torch.equal, run.values(), before))
    run.optimizer.zero_grad(set_to_none=False)  # the way out
    run.backward(1)
    run.clip(0.5)
    run.step()
    moved = [(new - old).double().square().sum() for new, old in zip(run.values(), before, strict=True)]
    # Weights of up to 0.5 are rounded to within 2⁻²⁶ where they move by 0.05 in all; there are 41.
    assert float(sum(moved)) ** 0.5 == pytest.approx(0.1 * 0.5, rel=41 * 2**-26 / 0.05)


@pytest.mark.parametrize("change", [*CHANGES, Run.drop, Run.drop_one], ids=lambda change: change.__name__)
def test_a_norm_that_was_asked_for_belongs_to_its_gradients(change):
    """… of whatever kind the change is: nothing is pending, so there is nothing to refuse."""
    run = Run(SGD, max_grad_norm=0.5)
    run.backward(0)
    run.norm()
    change(run)
    expected = exact_norm([param for param in run.model.parameters() if param.grad is not None])
    run.step()
    assert run.optimizer.grad_norm.item() == pytest.approx(expected, rel=2**-23)


def test_a_gradient_made_in_inference_mode_is_clipped():
    param = nn.Parameter(torch.zeros(4))
    with torch.inference_mode():
        param.grad = torch.full((4,), 3.0)
    optimizer = SGD([param], lr=1.0)
    assert optimizer.clip_grad_norm_(1.0).item() == 6.0
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((4,), -0.5))


@pytest.mark.parametrize("kind", ["plain", "bucket"])
def test_a_norm_that_is_not_finite_ends_with_gradients_that_are_zeroed(mesh, kind):
    """Torch steps with zeros, which a factor of NaN would not leave zero."""
    run = Run(SGD, WRAPPERS[kind])
    for _ in range(3):
        run.drop()
        run.backward(7)
    run.model[0].weight.grad[0, 0] = math.nan
    run.clip(0.5)
    assert math.isnan(run.norms[-1])
    run.zero()
    before = run.values()
    run.step()
    assert all(map(torch.equal, run.values(), before))


@pytest.mark.parametrize("other_clips", [False, True])
@pytest.mark.parametrize("is_finite", [True, False])
def test_gradients_in_a_bucket_of_ddp(mesh, other_clips, is_finite):
    """Views of one bucket share their version: a write to one that another optimizer steps is no change of ours.

    NaN, which is equal to nothing, is the same norm: its step is left out.
    """
    run = Run(SGD, WRAPPERS["bucket"])
    own, others = run.model
    optimizer = SGD(own.parameters(), lr=0.1, skip_nonfinite=True)
    for step in range(4):
        run.drop()
        run.backward(max(step - 2, 0))
        if step < 2:  # the second one makes DDP's buckets anew
            continue
        assert all(param.grad._is_view() for param in run.model.parameters())
        if not is_finite:
            own.weight.grad[0, 0] = math.nan
        grads = [param.grad.clone() for param in own.parameters()]
        norm = optimizer.clip_grad_norm_(0.5)
        if other_clips:
            nn.utils.clip_grad_norm_(others.parameters(), 1e-3)
        before = [param.detach().clone() for param in own.parameters()]
        optimizer.step()
        for param, old, grad in zip(own.parameters(), before, grads, strict=True):
            expected = old - 0.1 * grad * clip_factor(norm, 0.5) if is_finite else old
            torch.testing.assert_close(param.detach(), expected, rtol=2**-22, atol=0)
    assert optimizer.skipped_steps == (0 if is_finite else 2)
    optimizer.zero_grad()
    assert optimizer.limit is None


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
    optimizer.param_groups[0]["rounding"] = "split"
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
