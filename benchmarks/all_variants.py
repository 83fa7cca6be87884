"""The variants of training that the benchmarks of quality compare: those of `hf-lowprec demo`, and further modes."""

from __future__ import annotations

from hf_lowprec.tools.demo.variants import VARIANTS, Variant


def _in_8_bits(name: str, label: str, optim: str) -> Variant:
    description = f'optim="{optim}" with state_dtype=int8'
    return Variant(f"{name}-8bit", f"{label}, 8-bit states", optim, True, "bfloat16", description, "state_dtype=int8")


_FURTHER = (
    _in_8_bits("kahan", "BF16 Kahan", "adamw_bf16_kahan"),
    _in_8_bits("split", "BF16 split", "adamw_bf16_split"),
    _in_8_bits("sr", "BF16 stochastic", "adamw_bf16_sr"),
)
ALL_VARIANTS = VARIANTS | {variant.name: variant for variant in _FURTHER}
"""The variants by name, those of the demonstration first."""

_ADAFACTOR = (
    Variant("fp32", "FP32 Adafactor", "adafactor", False, "float32", 'everything in FP32, optim="adafactor"'),
    *(
        Variant(name, f"BF16 {label}", f"adafactor_bf16_{name}", True, "bfloat16", f'optim="adafactor_bf16_{name}"')
        for name, label in (("split", "split"), ("sr", "stochastic"), ("kahan", "Kahan"))
    ),
)
BY_OPTIMIZER = {"adamw": ALL_VARIANTS, "adafactor": {variant.name: variant for variant in _ADAFACTOR}}
"""The variants by optimizer and name. Those of one optimizer are compared with its `fp32`."""
