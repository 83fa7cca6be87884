"""The Newton–Schulz iteration of large matrices, of small ones in batches, and of stacks."""

import pytest
import torch

from hf_lowprec.optim import Muon
from hf_lowprec.optim.algorithms import _newton_schulz as newton_schulz
from hf_lowprec.optim.step import whole_tensor_quantities
from hf_lowprec.tools.estimate.activations import LiveMemory

BF16 = torch.bfloat16
CPU = torch.device("cpu")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def normal(shape, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.mark.parametrize("shape", [(512, 520), (600, 1030)], ids=str)
def test_half_of_a_symmetric_product_is_all_of_it(shape):
    """The Gram matrix against FP64; 2**-8 allows two roundings to BF16, 2**-16 the FP32 sums of up to 1030 terms."""
    x = normal(shape, 0)
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
    matrix = normal(shape, 1)
    before = matrix.clone()
    found = newton_schulz.newton_schulz(matrix, COEFFICIENTS, 1, 1e-7)
    x = matrix.double() / matrix.double().norm(dim=(-2, -1), keepdim=True)
    a, b, c = COEFFICIENTS
    gram = x @ x.mT
    wanted = a * x + b * gram @ x + c * gram @ gram @ x
    error = (found.double() - wanted).norm(dim=(-2, -1))
    assert (found.shape, found.dtype) == (matrix.shape, BF16) and torch.equal(matrix, before)
    assert (error <= 4 * 2**-9 * 10.3 / 3.4 * wanted.norm(dim=(-2, -1))).all()


SHAPES = [(24, 40), (40, 24), (24, 40), (33, 33), (7,), (24, 40), (40, 24), (24, 40), (5, 24, 40), (24, 40), (33, 33)]


def trained(**options) -> list[torch.Tensor]:
    """Three steps of matrices of which several have the same shape, in two groups."""
    params = [torch.nn.Parameter(normal(shape, k)) for k, shape in enumerate(SHAPES)]
    groups = [{"params": params[:5]}, {"params": params[5:], "ns_steps": 3}]
    optimizer = Muon(groups, lr=0.02, matrices=[param for param in params if param.ndim > 1], **options)
    for step in range(3):
        for k, param in enumerate(params):
            (param * normal(param.shape, 100 * step + k)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value for param in params for value in (param.detach(), *optimizer.state[param].values())]


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
    return newton_schulz.batch_keeps_bits(count, shape, CPU)


@pytest.mark.parametrize("options", [{"rounding": "kahan"}, {"rounding": "split"}, {"max_grad_norm": 0.1}], ids=str)
def test_a_batch_gives_the_bits_of_single_matrices(options, batch_sizes, monkeypatch):
    """The first group has two matrices of (24, 40), the second three; all others are alone in their group."""
    batched = trained(**options)
    found = {count for count in (2, 3) if keeps_bits(count, (24, 40))}
    assert set(batch_sizes) == {1} | found
    if found == {2, 3}:  # on every machine so far
        assert sorted(batch_sizes) == 3 * 5 * [1] + 3 * [2] + 3 * [3]
    monkeypatch.setattr(whole_tensor_quantities, "_BATCH", 0)
    batch_sizes.clear()
    single = trained(**options)
    assert batch_sizes == 3 * 10 * [1]
    assert all(map(torch.equal, batched, single))


def test_a_batch_gives_the_bits_of_single_matrices_without_onednn(own_kernels, monkeypatch):
    batched = trained()
    monkeypatch.setattr(whole_tensor_quantities, "_BATCH", 0)
    assert all(map(torch.equal, batched, trained()))


def test_gradient_release_gives_the_same_bits(monkeypatch):
    """Each parameter is stepped as soon as the next one has its gradient, so no batch has two matrices."""
    ordinary = trained()
    monkeypatch.setattr("hf_lowprec.optim.gradients.buckets.BUCKET_ELEMENTS", 1)
    assert all(map(torch.equal, ordinary, trained(gradient_release=True)))


@pytest.mark.parametrize(("count", "shape"), [(2, (64, 64)), (9, (128, 96)), (64, (16, 200)), (5, (3, 5)), (4, (1, 1))])
def test_batches_that_are_said_to_keep_bits_do(count, shape):
    if keeps_bits(count, shape):
        stack = normal((count, *shape), 2)
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
    params = [torch.nn.Parameter(normal(shape, k)) for k in range(2)]
    for param in params:
        param.grad = normal(shape, 3)
    Muon(params).step()
    assert batch_sizes == [1, 1]
    newton_schulz._products_keep_bits.cache_clear()


def test_batches_are_tried_on_the_cpu_whatever_the_default_device():
    newton_schulz._products_keep_bits.cache_clear()
    expected = keeps_bits(2, (8, 8))
    newton_schulz._products_keep_bits.cache_clear()
    with torch.device("meta"):
        assert keeps_bits(2, (8, 8)) == expected


def test_nothing_is_batched_elsewhere():
    assert not newton_schulz.batch_keeps_bits(2, (64, 64), torch.device("meta"))


def peak(shapes: list[tuple[int, ...]]) -> int:
    """The bytes that a step of matrices of these shapes holds at once, apart from weights, gradients and states."""
    params = [torch.nn.Parameter(normal(shape, k)) for k, shape in enumerate(shapes)]
    optimizer = Muon(params, rounding="stochastic")
    for param in params:
        param.grad = normal(param.shape, 9)
    optimizer.step()
    with LiveMemory() as memory:
        optimizer.step()
    return memory.peak


def test_a_batch_takes_memory_for_its_own_matrices_only(monkeypatch):
    """Twelve matrices of 64 × 64 in batches of four: the slots of a part, and 8 bytes per element of a batch.

    Its matrices are copied into a stack; then there are X and two Gram matrices, or two of X and one Gram matrix.
    """
    elements = 64 * 64
    monkeypatch.setattr(whole_tensor_quantities, "_BATCH", 4 * elements)
    monkeypatch.setattr(whole_tensor_quantities, "CHUNK", 1024)  # FP32 values of few elements
    monkeypatch.setattr(whole_tensor_quantities, "_parts", lambda group: [range(len(group.entries))])
    tables = 4096
    assert peak([(64, 64)] * 12) <= 2 * 12 * elements + 4 * 8 * elements + tables


def test_a_stack_of_large_matrices_takes_memory_for_one_of_them(monkeypatch):
    """The slot and the result, 4 bytes per element of the stack, and 6 bytes per element of one square matrix."""
    monkeypatch.setattr(whole_tensor_quantities, "CHUNK", 1 << 14)
    elements, tables = 264 * 264, 4096
    assert peak([(5, 264, 264)]) <= 4 * 5 * elements + 6 * elements + tables
