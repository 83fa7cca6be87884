"""The variants of training that the benchmarks of quality compare: those of `hf-lowprec demo`, and further modes."""

from __future__ import annotations

from hf_lowprec.tools.demo.variants import VARIANTS, Variant


def _in_8_bits(name: str, label: str, optim: str) -> Variant:
    description = f'optim="{optim}" with state_dtype=int8'
    return Variant(f"{name}-8bit", f"{label}, 8-bit states", optim, True, "bfloat16", description, "state_dtype=int8")


_FURTHER = (
    _in_8_bits("kahan", "BF16 Kahan", "adamw_bf16_kahan"),
    _in_8_bits("split", "BF16 split", "adamw_bf16_split"),
    Variant(
        *("split24", "BF16 split24", "adamw_bf16_split24", True, "bfloat16"),
        'optim="adamw_bf16_split24": BF16 weights and remainders that make masters of 24 bits, state in BF16',
    ),
    _in_8_bits("split24", "BF16 split24", "adamw_bf16_split24"),
    _in_8_bits("sr", "BF16 stochastic", "adamw_bf16_sr"),
)
ALL_VARIANTS = VARIANTS | {variant.name: variant for variant in _FURTHER}
"""The variants by name, those of the demonstration first."""
