"""Muon: matrices against `torch.optim.Muon` and the polynomial in FP64, the rest against our AdamW."""

import copy
import math
import pickle

import pytest
import torch

from hf_lowprec.monitor.precision_monitor import PrecisionMonitor
from hf_lowprec.optim import AdamW, Muon
from hf_lowprec.optim.step import whole_tensor_quantities
from hf_lowprec.tools.estimate.activations import LiveMemory

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
SHAPES = [(32, 64), (64, 32), (48, 48), (1, 16), (16, 1)]


def normal(shape, seed: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameters(shapes, dtype: torch.dtype = FP32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(normal(shape, k, dtype)) for k, shape in enumerate(shapes)]


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
def test_fp32_matrices_get_torchs_muon(adjust_lr_fn, nesterov, backend):
    """Gradients are whole numbers and the momentum's rate 1/2, so that both momenta are exact in FP32 for 12 steps.

    The orthogonalized matrices, BF16, are then the same bits, and the weights differ by roundings: torch rounds the
    weight twice a step (decay, update), we once, and the change, below lr·ratio + lr·wd·|w|, three times.
    """
    ours, theirs = parameters(SHAPES), parameters(SHAPES)
    hyper = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.5, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    optimizer, reference = Muon(ours, backend=backend, **hyper), torch.optim.Muon(theirs, **hyper)
    generator = torch.Generator().manual_seed(9)
    steps = 12
    for _ in range(steps):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randint(-8, 9, mine.shape, generator=generator).float()
            other.grad = mine.grad.clone()
        optimizer.step()
        reference.step()
    for k, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(optimizer.state[mine]["momentum_buffer"], reference.state[other]["momentum_buffer"]), k
        largest = other.abs().max().item()
        change = 0.02 * (0.2 * math.sqrt(64) + 0.1 * largest)
        assert (mine - other).abs().max().item() <= steps * 2**-24 * (3 * largest + 4 * change), k


def test_a_stack_is_stepped_as_its_matrices():
    stack, slices = normal((3, 16, 24), 1), [torch.nn.Parameter(normal((3, 16, 24), 1)[k].clone()) for k in range(3)]
    whole = torch.nn.Parameter(stack)
    one, many = Muon([whole], lr=0.1), Muon(slices, lr=0.1)
    for step in range(5):
        whole.grad = normal((3, 16, 24), 10 + step)
        for k, part in enumerate(slices):
            part.grad = whole.grad[k].clone()
        one.step()
        many.step()
    # Batched and single products may round differently: five steps of lr·0.2·√24, each off by 5 · 2**-7 at most.
    difference = (whole - torch.stack(list(slices))).abs().max().item()
    assert difference <= 5 * 0.1 * 0.2 * math.sqrt(24) * 5 * 2**-7


def test_what_is_no_matrix_gets_adamw():
    """Bit for bit our own AdamW of the same settings, wherever the parameters stand; random bits go by position.

    A state that one kind has may be named for both.
    """
    shapes = [(8, 8), (8,), (16, 8), ()]
    mixed, plain = parameters(shapes, BF16), parameters(shapes, BF16)
    settings = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-7, "weight_decay": 0.2, "state_dtype": {"exp_avg_sq": FP32}}
    muon = Muon(mixed, matrices=[mixed[0], mixed[2]], **settings)
    assert [group["use_muon"] for group in muon.param_groups] == [True, False]
    assert [id(p) for group in muon.param_groups for p in group["params"]] == [id(mixed[k]) for k in (0, 2, 1, 3)]
    order = [plain[k] for k in (0, 2, 1, 3)]
    adamw = AdamW(order, **settings)
    for step in range(10):
        for k, (mine, other) in enumerate(zip(mixed, plain, strict=True)):
            mine.grad, other.grad = normal(mine.shape, 100 * step + k, BF16), normal(mine.shape, 100 * step + k, BF16)
        muon.step()
        adamw.step()
    for k in (1, 3):
        assert torch.equal(mixed[k], plain[k])
        assert muon.state[mixed[k]].keys() == {"step", "exp_avg", "exp_avg_sq", "compensation"}
        assert all(
            torch.equal(muon.state[mixed[k]][name], adamw.state[plain[k]][name]) for name in ("exp_avg", "exp_avg_sq")
        )
    assert muon.state[mixed[0]].keys() == {"step", "momentum_buffer", "compensation"}


def test_another_ratio_holds_from_the_next_step_on():
    (param,) = parameters([(8, 32)])
    param.grad, moved = normal((8, 32), 20), []
    optimizer = Muon([param], weight_decay=0.0)
    for ratio in ("original", "match_rms_adamw"):
        optimizer.param_groups[0]["adjust_lr_fn"] = ratio
        before = param.detach().clone()
        optimizer.step()
        moved.append((param.detach() - before).norm().item())
    assert moved[1] / moved[0] == pytest.approx(0.2 * math.sqrt(32), rel=5 * 2**-7)  # five iterations in BF16


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copy_still_knows_its_matrices(copied):
    matrix, table = parameters([(4, 4), (5, 4)])
    twin = copied(Muon([matrix], matrices=[matrix]))
    twin.add_param_group({"params": [table]})
    assert [group["use_muon"] for group in twin.param_groups] == [True, False]


def test_names_that_a_group_has_already_are_split_with_it():
    module = torch.nn.Linear(4, 3)
    (group,) = torch.optim.SGD(module.named_parameters()).param_groups
    given = {"params": list(group["params"]), "param_names": list(group["param_names"])}
    optimizer = Muon([given], matrices=[module.weight])
    assert [group["param_names"] for group in optimizer.param_groups] == [["weight"], ["bias"]]
    unnamed = Muon(parameters([(4, 4)]), matrices=[])
    unnamed.add_param_group({"params": []})
    assert [len(group["params"]) for group in unnamed.param_groups] == [1, 0]


@pytest.fixture
def small_parts(monkeypatch):
    """Matrices are orthogonalized and stepped in parts of at most 100 elements, or one at a time."""
    monkeypatch.setattr(whole_tensor_quantities, "CHUNK", 100)


MANY_SHAPES = [(4, 6), (6, 4), (3, 3), (24, 32), (2, 5, 4), (8, 8), (0, 3), (5,), (8, 16), (4, 4)]


def trained(backend: str, dtype: torch.dtype = BF16, steps: int = 3, **options) -> tuple[Muon, list]:
    params = parameters(MANY_SHAPES, dtype)
    optimizer = Muon(params, lr=0.02, backend=backend, matrices=[p for p in params if p.ndim > 1], **options)
    for step in range(steps):
        give_gradients(params, step)
        optimizer.step()
    return optimizer, params


def give_gradients(params, step: int) -> None:
    for k, param in enumerate(params):
        param.grad = normal(param.shape, 1000 * step + k, param.dtype)


def tensors(optimizer: Muon, params) -> list[torch.Tensor]:
    return [value for param in params for value in (param.detach(), *optimizer.state[param].values())]


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1, "skip_nonfinite": True}], ids=str)
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_parts_step_as_all_matrices_at_once(backend, options, request):
    at_once = tensors(*trained(backend, **options))
    request.getfixturevalue("small_parts")
    assert all(map(torch.equal, at_once, tensors(*trained(backend, **options))))


def test_measurements_of_parts_are_those_of_all_matrices_at_once(request):
    def measured() -> tuple[dict[str, float], list[torch.Tensor]]:
        optimizer, params = trained("native", rounding="nearest")
        monitor = PrecisionMonitor(optimizer, every=1)
        give_gradients(params, 3)
        optimizer.step()
        return monitor.last.by_kind["all"], tensors(optimizer, params)

    numbers, stepped = measured()
    request.getfixturevalue("small_parts")
    numbers_of_parts, stepped_in_parts = measured()
    assert numbers_of_parts == numbers and abs(numbers["lost_updates"]) > 1e-4
    assert all(map(torch.equal, stepped, stepped_in_parts))


def test_a_step_holds_one_orthogonalized_matrix(small_parts):
    """Eleven more matrices of 32 KiB each take no more memory than their tables."""
    peaks = []
    for count in (1, 12):
        params = parameters([(128, 128)] * count, BF16)
        optimizer = Muon(params, backend="native")
        give_gradients(params, 0)
        optimizer.step()
        give_gradients(params, 1)
        with LiveMemory() as memory:
            optimizer.step()
        peaks.append(memory.peak)
    assert 8 * 128 * 128 <= peaks[0] <= peaks[1] <= peaks[0] + 1024 * 12


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=10, base_momentum=0.5)


def cyclic(optimizer):
    return torch.optim.lr_scheduler.CyclicLR(optimizer, 0.001, 0.02, step_size_up=3, base_momentum=0.5)


@pytest.mark.parametrize("make", [one_cycle, cyclic])
def test_a_scheduler_that_cycles_momentum_cycles_that_of_matrices_too(make):
    """As in `torch.optim.Muon` and, for the rest, `torch.optim.AdamW`, whose betas it writes to; in FP32."""
    ours, theirs = parameters([(8, 6), (6,)]), parameters([(8, 6), (6,)])
    optimizer = Muon(ours, lr=0.02, momentum=0.9, weight_decay=0.0, matrices=ours[:1])
    both = (
        torch.optim.Muon(theirs[:1], lr=0.02, momentum=0.9),
        torch.optim.AdamW(theirs[1:], lr=0.02, betas=(0.9, 0.95), weight_decay=0.0),
    )
    scheduler, references = make(optimizer), [make(reference) for reference in both]
    generator = torch.Generator().manual_seed(9)
    for _ in range(9):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        for each in (optimizer, *both, scheduler, *references):
            each.step()
        assert optimizer.param_groups[0]["lr"] == both[0].param_groups[0]["lr"]
        # A buffer below 4 is rounded three times a step here and three times there, and old errors decay.
        found, expected = optimizer.state[ours[0]]["momentum_buffer"], both[0].state[theirs[0]]["momentum_buffer"]
        assert (found - expected).abs().max().item() <= 9 * 6 * 4 * 2**-24
    # Nine steps of at most 10 learning rates, some twenty roundings each; a beta that stayed would be off by 0.1.
    assert (ours[1] - theirs[1]).abs().max().item() <= 9 * 20 * 10 * 0.02 * 2**-24 + 9 * 4 * 2**-24


def test_a_momentum_that_is_not_cycled_is_the_groups_own():
    (param,) = parameters([(8, 6)])
    optimizer = Muon([param], momentum=0.9, betas=(0.5, 0.95))
    optimizer.param_groups[0]["momentum"] = 0.75
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(optimizer.state[param]["momentum_buffer"], torch.full_like(param, 0.25))
