"""The Newton–Schulz iteration, which brings the singular values of matrices close to 1, in BF16.

Each iteration is three matrix products. On a CPU, only half of a large symmetric product is computed. Small matrices
are multiplied in batches if that does not change their bits: a result must not depend on other matrices.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from hf_lowprec.rounding.fp32_math import SMALLEST_NORMAL

_SMALL = 1 << 16
"""The number of elements of a matrix up to which a CPU multiplies a stack faster at once than one by one."""
_STACK_ON_CPU, _STACK = 1 << 18, 1 << 22
"""The numbers of elements in a stack that are multiplied at once on a CPU and elsewhere: enough to keep it busy."""
_PANEL = 256
"""The least number of rows of a symmetric product that are computed together; fewer take longer than they save."""
_PANELS = 8
"""The number of panels of a large product: more would save little and leave less parallel work."""


def newton_schulz(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Apply `a·X + b·X³ + c·X⁵` to a matrix divided by its norm, several times.

    Args:
        matrix: BF16, of shape (rows, columns) or (matrices, rows, columns). It is not changed.
        coefficients: `a`, `b` and `c`.
        steps: the number of iterations.
        eps: lower bound of the norm by which a matrix is divided.

    Returns:
        BF16 tensor of the same shape.
    """
    on_cpu = matrix.device.type == "cpu"
    if matrix.ndim == 3 and (size := matrices_at_once(matrix.shape[1:], matrix.device)) < max(len(matrix), 2):
        found = torch.empty_like(matrix)
        parts = (matrix, found) if size == 1 else (matrix.split(size), found.split(size))
        for part, result in zip(*parts, strict=True):
            result.copy_(newton_schulz(part, coefficients, steps, eps))
        return found
    a, b, c = coefficients
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix  # the Gram matrix x·xᵀ is smaller for wide matrices
    x = x / _norms(x).clamp(min=eps)
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    by_half = on_cpu and x.ndim == 2 and x.shape[0] >= 2 * _PANEL
    for _ in range(steps):
        gram = _gram_by_half(x) if by_half else x @ x.mT
        # This drops the first Gram matrix before x is computed: less memory.
        gram = _add_square_by_half(gram, b, c) if by_half else add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, gram, x, beta=a)
    return x.mT if tall else x


def with_equal_rows(matrix: Tensor) -> Tensor:
    """Scale the rows of an orthogonalized matrix, or of each one in a stack, to the same length.

    This is the rows' root mean square in an orthogonal matrix: 1, or `√(columns / rows)` if rows outnumber columns.
    """
    rows, columns = matrix.shape[-2:]
    matrix = matrix.contiguous()  # so that a matrix gets the same bits in a stack
    lengths = torch.linalg.vector_norm(matrix, dim=-1, keepdim=True, dtype=torch.float32)
    return matrix.mul_(math.sqrt(min(columns / max(rows, 1), 1.0)) / lengths.clamp(min=SMALLEST_NORMAL))


def _norms(x: Tensor) -> Tensor:
    """Return the Frobenius norm of each matrix, with its two dimensions reduced to size 1."""
    if x.ndim == 3 and len(x) > 0 and x.device.type == "cpu":
        # Threads divide the sum of a single matrix differently from the sums of a stack.
        return torch.stack([_norms(single) for single in x])
    return x.norm(dim=(-2, -1), keepdim=True)


def _gram_by_half(x: Tensor) -> Tensor:
    """Compute `x·xᵀ` of a large matrix."""
    gram = x.new_empty(len(x), len(x))
    for start, end in _panels(len(x)):
        torch.mm(x[start:end], x[start:].mT, out=gram[start:end, start:])
        gram[end:, start:end] = gram[start:end, end:].mT
    return gram


def _add_square_by_half(gram: Tensor, beta: float, alpha: float) -> Tensor:
    """Compute `beta·gram + alpha·gram·gram` of a large symmetric matrix."""
    found = torch.empty_like(gram)
    for start, end in _panels(len(gram)):
        panel, factor = found[start:end, start:], gram[start:].mT  # its columns, in memory without gaps
        torch.addmm(gram[start:end, start:], gram[start:end], factor, beta=beta, alpha=alpha, out=panel)
        found[end:, start:end] = panel[:, end - start :].mT
    return found


def _panels(rows: int) -> list[tuple[int, int]]:
    """Return the first row of each panel, and the one after its last."""
    size = max(_PANEL, -(-rows // _PANELS))
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def matrices_at_once(shape: torch.Size, device: torch.device) -> int:
    """Return how many matrices of `shape` in a stack are multiplied at once: the first ones, the next ones, and so on.

    So parts of a stack that begin and end at these boundaries, or at the stack's end, get the bits of the whole stack.
    """
    on_cpu, elements = device.type == "cpu", max(shape.numel(), 1)
    if on_cpu and elements > _SMALL:
        return 1
    return max(1, (_STACK_ON_CPU if on_cpu else _STACK) // elements)


def batch_keeps_bits(count: int, shape: torch.Size, device: torch.device) -> bool:
    """Return whether `count` matrices of `shape` get the same bits as a stack as they do one by one.

    On a CPU, this is tried once. Elsewhere, libraries choose kernels by the size of the batch, and a trial would wait
    for the device, so the answer is no.
    """
    if device.type != "cpu":
        return False
    layouts = (False, True) if shape[0] > shape[1] else (False,)  # only the first iteration is on transposed matrices
    settings = torch.get_num_threads(), bool(torch.backends.mkldnn.enabled)
    return all(_products_keep_bits(count, min(shape), max(shape), transposed, settings) for transposed in layouts)


@functools.cache
def _products_keep_bits(count: int, rows: int, columns: int, transposed: bool, settings: tuple[int, bool]) -> bool:
    """Compare the three products of an iteration; all else is computed element by element, or for each matrix.

    Args:
        count: the number of matrices.
        rows: the rows of each.
        columns: the columns of each, at least as many.
        transposed: whether they lie in memory column by column.
        settings: what the choice of kernels depends on: the number of threads, and whether oneDNN is used.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(count, *shape, generator=generator, device="cpu", dtype=torch.float32)
        return values.to(torch.bfloat16)

    # Terms that cancel leave only rounding errors, so another order of the sum gives other bits.
    left, right = _cancelling(normal(rows, columns)), normal(rows, columns)
    right[..., columns // 2 : columns // 2 * 2] = right[..., : columns // 2]
    factor = _cancelling(normal(rows, rows))
    square, wide = normal(rows, rows), normal(rows, columns)
    for each in (square, wide):
        each[:, rows // 2 : rows // 2 * 2] = each[:, : rows // 2]
    if transposed:
        left, right = left.mT.contiguous().mT, right.mT.contiguous().mT

    def products(index: int | slice) -> list[Tensor]:
        add_product = torch.baddbmm if isinstance(index, slice) else torch.addmm
        zeros = torch.zeros_like(square[index]), torch.zeros_like(wide[index])
        return [
            left[index] @ right[index].mT,
            add_product(zeros[0], factor[index], square[index], alpha=0.5),
            add_product(zeros[1], factor[index], wide[index]),
        ]

    one_by_one = map(torch.stack, zip(*map(products, range(count)), strict=True))
    return all(map(torch.equal, one_by_one, products(slice(None))))


def _cancelling(x: Tensor) -> Tensor:
    """Replace the second half of the columns of `x` with the negative of the first half."""
    half = x.shape[-1] // 2
    x[..., half : 2 * half] = -x[..., :half]
    return x
