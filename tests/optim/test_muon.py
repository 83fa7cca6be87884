"""Muon: matrices against `torch.optim.Muon` and the polynomial in FP64, the rest against our AdamW; batches."""

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

from hf_lowprec.monitor.precision_monitor import PrecisionMonitor
from hf_lowprec.optim import AdamW, Muon
from hf_lowprec.optim.algorithms import _newton_schulz as newton_schulz
from hf_lowprec.optim.step import matrix_owners, orthogonalization, whole_tensor_quantities
from hf_lowprec.tools.estimate.activations import LiveMemory
from tests.support.same_numbers import same_numbers

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = [(32, 64), (64, 32), (48, 48), (1, 16), (16, 1)]


def normal(shape, seed: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameters(shapes, dtype: torch.dtype = FP32) -> list[nn.Parameter]:
    return [nn.Parameter(normal(shape, k, dtype)) for k, shape in enumerate(shapes)]


def give_gradients(params, step: int) -> None:
    for k, param in enumerate(params):
        param.grad = normal(param.shape, 1000 * step + k, param.dtype)


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
    for step in range(steps):
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["adjust_lr_fn"] = adjust_lr_fn if step < 8 else "original"
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
        assert muon.state[mixed[k]].keys() == {"step", "exp_avg", "exp_avg_sq", "remainder"}
        assert all(
            torch.equal(muon.state[mixed[k]][name], adamw.state[plain[k]][name]) for name in ("exp_avg", "exp_avg_sq")
        )
    assert muon.state[mixed[0]].keys() == {"step", "momentum_buffer", "remainder"}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copy_still_knows_its_matrices(copied):
    matrix, table = parameters([(4, 4), (5, 4)])
    twin = copied(Muon([matrix], matrices=[matrix]))
    twin.add_param_group({"params": [table]})
    assert [group["use_muon"] for group in twin.param_groups] == [True, False]


def test_names_that_a_group_has_already_are_split_with_it():
    module = nn.Linear(4, 3)
    (group,) = torch.optim.SGD(module.named_parameters()).param_groups
    given = {"params": list(group["params"]), "param_names": list(group["param_names"])}
    optimizer = Muon([given], matrices=[module.weight])
    assert [group["param_names"] for group in optimizer.param_groups] == [["weight"], ["bias"]]
    unnamed = Muon(parameters([(4, 4)]), matrices=[])
    unnamed.add_param_group({"params": []})
    assert [len(group["params"]) for group in unnamed.param_groups] == [1, 0]


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


# The Newton–Schulz iteration.

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@pytest.mark.parametrize("shape", [(512, 520), (600, 1030)], ids=str)
def test_half_of_a_symmetric_product_is_all_of_it(shape):
    """The Gram matrix against FP64; 2**-8 allows two roundings to BF16, 2**-16 the FP32 sums of up to 1030 terms."""
    x = normal(shape, 0, BF16)
    before = x.clone()
    gram = newton_schulz._gram_by_half(x)
    exact, terms = x.double() @ x.double().mT, x.double().abs() @ x.double().abs().mT
    assert torch.equal(x, before) and torch.equal(gram, gram.mT)
    assert ((gram.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-16 * terms).all()

    gram = (gram / gram.norm()).to(BF16)
    before = gram.clone()
    found = newton_schulz._add_square_by_half(gram, -4.775, 2.0315)
    square, terms = 2.0315 * gram.double() @ gram.double(), gram.double().abs() @ gram.double().abs()
    linear = -4.775 * gram.double()
    assert torch.equal(gram, before) and torch.equal(found, found.mT)
    bound = 2**-8 * (square.abs() + 2 * linear.abs()) + 2**-16 * 2.0315 * terms
    assert ((found.double() - square - linear).abs() <= bound).all()


@pytest.mark.parametrize("shape", [(512, 640), (640, 512), (2, 512, 520), (32, 64), (64, 32), (5, 24, 16)], ids=str)
def test_every_matrix_gets_the_polynomial(shape):
    """Large and small, alone and in a stack. One iteration in FP64.

    In BF16, four roundings of entries of the size of X, amplified by at most 10.3.
    """
    matrix = normal(shape, 1, BF16)
    before = matrix.clone()
    found = newton_schulz.newton_schulz(matrix, COEFFICIENTS, 1, 1e-7)
    x = matrix.double() / matrix.double().norm(dim=(-2, -1), keepdim=True)
    a, b, c = COEFFICIENTS
    gram = x @ x.mT
    wanted = a * x + b * gram @ x + c * gram @ gram @ x
    error = (found.double() - wanted).norm(dim=(-2, -1))
    assert (found.shape, found.dtype) == (matrix.shape, BF16) and torch.equal(matrix, before)
    assert (error <= 4 * 2**-9 * 10.3 / 3.4 * wanted.norm(dim=(-2, -1))).all()


# Parts and batches.

MANY_SHAPES = [(24, 40), (40, 24), (24, 40), (33, 33), (7,), (4, 6), (3, 3)]
MANY_SHAPES += [(24, 40), (40, 24), (24, 40), (5, 24, 40), (24, 40), (33, 33), (8, 8)]


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (3, 20, 12), (0, 4), (3, 0, 4)])
def test_rows_get_one_length(shape):
    """That of the rows of an orthogonal matrix in root mean square; in BF16, an element is off by 2^-8 of it."""
    matrix = normal(shape, 5, BF16)
    options = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5, "ns_eps": 1e-7}
    optimizer = Muon([nn.Parameter(torch.zeros(shape))])
    plain, equal = (
        optimizer.orthogonalize({**options, "normalize_rows": normalized}, matrix).double()
        for normalized in (False, True)
    )
    length = math.sqrt(min(shape[-1] / max(shape[-2], 1), 1))
    expected = plain * length / plain.square().sum(-1, keepdim=True).sqrt()
    assert ((equal - expected).abs() <= (2**-8 + 2**-20) * expected.abs()).all()


def trained(**options) -> list:
    """Tensors after four steps of two groups, in which several matrices have the same shape; and what was measured."""
    params = parameters(MANY_SHAPES, BF16)
    groups = [{"params": params[:7]}, {"params": params[7:], "ns_steps": 3}]
    optimizer = Muon(groups, lr=0.02, matrices=[param for param in params if param.ndim > 1], **options)
    for step in range(4):
        monitor = PrecisionMonitor(optimizer, every=1) if step == 3 else None
        give_gradients(params, step)
        optimizer.step()
    numbers = [torch.tensor(value) for value in monitor.last.by_kind["all"].values()]
    return [*numbers, *(value for param in params for value in (param.detach(), *optimizer.state[param].values()))]


def few_elements_at_once(count: int, monkeypatch) -> None:
    """So that parts have few elements, and so do FP32 values."""
    for module in (orthogonalization, whole_tensor_quantities):
        monkeypatch.setattr(module, "CHUNK", count)


ALL_OPTIONS = [
    {},
    {"rounding": "split", "normalize_rows": True},
    {"rounding": "nearest"},
    {"max_grad_norm": 0.1, "skip_nonfinite": True},
]


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_parts_step_as_all_matrices_at_once_and_are_measured_alike(backend, options, monkeypatch):
    """With parts of at most 100 elements, or of one matrix."""
    at_once = trained(backend=backend, **options)
    few_elements_at_once(100, monkeypatch)
    assert all(map(same_numbers, at_once, trained(backend=backend, **options)))


@pytest.fixture
def batch_sizes(monkeypatch) -> list[int]:
    """How many matrices each call of `orthogonalize` gets; the parameter that is a stack of 5 counts as 1."""
    sizes: list[int] = []
    whole = Muon.orthogonalize

    def counted(self, group, matrix):
        sizes.append(len(matrix) if matrix.ndim == 3 and len(matrix) != 5 else 1)
        return whole(self, group, matrix)

    monkeypatch.setattr(Muon, "orthogonalize", counted)
    return sizes


def keeps_bits(count: int, shape: tuple[int, int]) -> bool:
    return newton_schulz.batch_keeps_bits(count, shape, torch.device("cpu"))


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
def test_a_batch_gives_the_bits_of_single_matrices(options, batch_sizes, monkeypatch):
    """The first group has two matrices of (24, 40), the second three. There are four steps and a measurement."""
    batched = trained(**options)
    found = {count for count in (2, 3) if keeps_bits(count, (24, 40))}
    assert set(batch_sizes) == {1} | found
    if found == {2, 3}:  # on every machine so far
        assert sorted(batch_sizes) == sorted(5 * (8 * [1] + [2] + [3]))
    monkeypatch.setattr(orthogonalization, "_BATCH", 0)
    batch_sizes.clear()
    single = trained(**options)
    assert batch_sizes == 5 * 13 * [1]
    assert all(map(same_numbers, batched, single))


def test_a_batch_gives_the_bits_of_single_matrices_without_onednn(own_kernels, monkeypatch):
    batched = trained()
    monkeypatch.setattr(orthogonalization, "_BATCH", 0)
    assert all(map(same_numbers, batched, trained()))


@pytest.mark.parametrize(("count", "shape"), [(2, (64, 64)), (9, (128, 96)), (64, (16, 200)), (5, (3, 5)), (4, (1, 1))])
def test_batches_that_are_said_to_keep_bits_do(count, shape):
    if keeps_bits(count, shape):
        stack = normal((count, *shape), 2, BF16)
        found = newton_schulz.newton_schulz(stack, COEFFICIENTS, 5, 1e-7)
        single = [newton_schulz.newton_schulz(matrix, COEFFICIENTS, 5, 1e-7) for matrix in stack]
        assert torch.equal(found, torch.stack(single))


@pytest.mark.parametrize("shape", [(64, 64), (128, 32)], ids=str)
def test_batches_that_sum_in_another_order_do_not_keep_bits(shape, batch_sizes, monkeypatch):
    """A library whose batched product rounds the sum of half of the terms to BF16."""

    def other_order(add, left, right, *, beta=1, alpha=1):
        half = left.shape[-1] // 2
        first = left[..., :half].float() @ right[..., :half, :].float()
        terms = first.to(BF16).float() + left[..., half:].float() @ right[..., half:, :].float()
        return (beta * add.float() + alpha * terms).to(BF16)

    newton_schulz._products_keep_bits.cache_clear()
    monkeypatch.setattr(torch, "baddbmm", other_order)
    assert not keeps_bits(2, shape)
    params = parameters([shape, shape], BF16)
    give_gradients(params, 3)
    Muon(params).step()
    assert batch_sizes == [1, 1]
    newton_schulz._products_keep_bits.cache_clear()


def test_batches_are_tried_on_the_cpu_whatever_the_default_device_and_not_used_elsewhere():
    newton_schulz._products_keep_bits.cache_clear()
    expected = keeps_bits(2, (8, 8))
    newton_schulz._products_keep_bits.cache_clear()
    with torch.device("meta"):
        assert keeps_bits(2, (8, 8)) == expected
    assert not newton_schulz.batch_keeps_bits(2, (64, 64), torch.device("meta"))


def peak(shapes: list[tuple[int, ...]], groups: int = 1, **options) -> int:
    """The bytes that a step of matrices of these shapes holds at once, apart from weights, gradients and states."""
    params = parameters(shapes, BF16)
    kinds = [{"params": params[k::groups], "nesterov": k % 2 == 0} for k in range(groups)]
    optimizer = Muon(kinds, rounding="stochastic", **options)
    give_gradients(params, 0)
    optimizer.step()
    give_gradients(params, 1)
    with LiveMemory() as memory:
        optimizer.step()
    return memory.peak


def test_a_batch_takes_memory_for_its_own_matrices_only(monkeypatch):
    """Twelve matrices of 64 × 64 in batches of four: the slots of a part, and 8 bytes per element of a batch.

    Its matrices are copied into a stack; then there are X and two Gram matrices, or two of X and one Gram matrix.
    """
    elements = 64 * 64
    monkeypatch.setattr(orthogonalization, "_BATCH", 4 * elements)
    few_elements_at_once(1024, monkeypatch)
    monkeypatch.setattr(matrix_owners, "_parts", lambda shapes, ranks, replicas, most: [range(len(shapes))])
    tables = 4096
    assert peak([(64, 64)] * 12) <= 2 * 12 * elements + 4 * 8 * elements + tables


def test_a_stack_of_large_matrices_takes_memory_for_one_of_them(monkeypatch):
    """The slot and the result, 4 bytes per element of the stack, and 6 bytes per element of one square matrix."""
    few_elements_at_once(1 << 14, monkeypatch)
    elements, tables = 264 * 264, 4096
    assert peak([(5, 264, 264)]) <= 4 * 5 * elements + 6 * elements + tables


def test_a_step_holds_one_orthogonalized_matrix(monkeypatch):
    """Eleven more matrices of 32 KiB each take no more memory than their tables, also in two kinds of groups."""
    few_elements_at_once(100, monkeypatch)
    cases = ((1, 1), (12, 1), (12, 2))
    one, twelve, in_groups = (peak([(128, 128)] * count, groups, backend="native") for count, groups in cases)
    assert 8 * 128 * 128 <= one <= min(twelve, in_groups) and max(twelve, in_groups) <= one + 1024 * 12
