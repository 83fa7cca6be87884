"""Render the sum of the squares of a fused group's gradients as C. It follows the rendered step in the same library."""

from __future__ import annotations

import torch

from hf_lowprec.optim.backends.c.kernel_source import CHUNK
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.optim.step.segments import segment_columns

_PARTIAL_SUMS = 32
"""Accumulators, several vectors of them: an addition has to wait for the previous one into the same accumulator."""
_TYPES = {torch.float32: "float", torch.bfloat16: "uint16_t", torch.float16: "_Float16"}
_VALUES = {
    torch.float32: "grad[{0}]",
    torch.bfloat16: "as_float((uint32_t)grad[{0}] << 16)",
    torch.float16: "grad[{0}]",
}

_SQUARE_SUM = """
/* The FP64 sum of the squares of each chunk's gradients. The tables are those of `step`. */
void square_sum(int64_t n_chunks, const int64_t (*chunks)[2], const int64_t (*segments)[{n_columns}],
                void *const (*pointers)[{n_pointers}], const float *scalars, double *sums, int threads)
{{
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t chunk = 0; chunk < n_chunks; chunk++) {{
        const int64_t *segment = segments[chunks[chunk][0]];
        const int64_t start = chunks[chunk][1], entry_index = segment[0], end = segment[1];
        const int count = end - start < {chunk} ? (int)(end - start) : {chunk};
        const {type} *grad = (const {type} *)pointers[entry_index][1] + start;
        double partial_sums[{partial_sums}] = {{0}}, total = 0;
        int i = 0;
        for (; i + {partial_sums} <= count; i += {partial_sums})
            for (int j = 0; j < {partial_sums}; j++) {{
                const double value = (double){partial_value};
                partial_sums[j] += value * value;
            }}
        for (; i < count; i++) {{
            const double value = (double){value};
            total += value * value;
        }}
        for (int j = 0; j < {partial_sums}; j++)
            total += partial_sums[j];
        sums[chunk] = total;
    }}
}}
"""


def render_square_sum(spec: KernelSpec) -> str:
    """The C source of `square_sum`, which needs the header of `c_source.render`."""
    value = _VALUES[spec.grad_dtype]
    return _SQUARE_SUM.format(
        n_columns=len(segment_columns(spec)),
        n_pointers=len(spec.tensors),
        chunk=CHUNK,
        type=_TYPES[spec.grad_dtype],
        partial_sums=_PARTIAL_SUMS,
        partial_value=value.format("i + j"),
        value=value.format("i"),
    )
