"""Count the elements that the `triton` backend steps in ragged chunks, for the shapes of real models.

Whole chunks on 16-byte boundaries are stepped by one kernel, and the rest by another, which is slower per element; see
`hf_lowprec/optim/backends/triton/tables.py`. Nothing is stepped here, and no GPU is needed. `shard` is what a rank of
FSDP2 holds if parameters are sharded over so many. `after n` is a model whose gradients lie in one bucket behind n
others, as those of DDP behind a classifier's bias (`gradient_as_bucket_view=True`).

    python benchmarks/ragged_chunks.py
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from cpu_step.optimizers import smollm2_135m
from gpu.shapes import LLAMA_8B, Shapes

from hf_lowprec import AdamW
from hf_lowprec.optim.backends.triton.chunks import divide
from hf_lowprec.optim.backends.triton.launch import BLOCK, CHUNK
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.optim.step.segments import Segments


class Case(NamedTuple):
    """A model: the shapes of its parameters, the ranks they are sharded over, and what precedes its gradients."""

    name: str
    shapes: Shapes
    ranks: int = 1
    elements_before: int = 0


CASES = [
    Case("SmolLM2-135M", smollm2_135m()),
    Case("SmolLM2-135M, shard of 8", smollm2_135m(), ranks=8),
    Case("SmolLM2-135M, gradients after 2", smollm2_135m(), elements_before=2),
    Case("Llama-3.1-8B", LLAMA_8B.shapes),
    Case("Llama-3.1-8B, shard of 8", LLAMA_8B.shapes, ranks=8),
    Case("Llama-3.1-8B, shard of 6", LLAMA_8B.shapes, ranks=6),
]


def row(case: Case, dtype: torch.dtype) -> str:
    """A row of the table, for the matrices (BF16) or the norms (FP32) of a model."""
    lengths = [
        -(-shape[0] // case.ranks) * math.prod(shape[1:])
        for shape in case.shapes
        if (len(shape) > 1) == (dtype == torch.bfloat16)
    ]
    spec, segments = _segments(lengths, dtype)
    pointers = torch.zeros(len(lengths), len(spec.tensors), dtype=torch.int64)
    if case.elements_before:
        places = torch.tensor([0, *lengths[:-1]]).cumsum(0) + case.elements_before
        pointers[:, list(spec.tensors).index("grad")] = places * dtype.itemsize
    chunks = divide(spec, segments, pointers, CHUNK, BLOCK)
    ragged = int((chunks.ragged[:, 3] - chunks.ragged[:, 2]).sum())
    share = ragged / sum(lengths)
    cells = [case.name, str(dtype).removeprefix("torch."), f"{sum(lengths):,}", f"{share:.2%}"]
    return f"| {' | '.join([*cells, f'{len(chunks.whole):,}', f'{len(chunks.ragged):,}'])} |"


def _segments(lengths: list[int], dtype: torch.dtype) -> tuple[KernelSpec, Segments]:
    """The segments of parameters with these lengths, which take no memory."""
    param = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
    param.grad = torch.zeros_like(param)
    with AdamW([param], backend="eager").plan_step() as plan:
        (group,) = plan.fused_groups
    (entry,) = group.entries
    params = [torch.empty(length, dtype=dtype, device="meta") for length in lengths]
    return group.spec, Segments(group.spec, [replace(entry, param=param) for param in params])


def main() -> None:
    print("| model | dtype | elements | in ragged chunks | whole chunks | ragged chunks |")
    print(f"| --- | --- |{' ---: |' * 4}")
    for case in CASES:
        for dtype in (torch.bfloat16, torch.float32):
            print(row(case, dtype))


if __name__ == "__main__":
    main()
