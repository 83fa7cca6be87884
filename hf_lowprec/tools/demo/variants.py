"""The training variants that are compared: they differ in the weights' dtype and in `optim=`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """A variant of training.

    Attributes:
        name: its name in `--ways`.
        label: its name in tables and plots.
        optim: the value of `TrainingArguments.optim`.
        is_ours: whether `optim` is one of hf_lowprec's names, which cast the model.
        dtype: otherwise, the name of the dtype to which the whole model is cast before training.
        description: the dtypes and the optimizer, in one sentence.
        optim_args: the value of `TrainingArguments.optim_args`.
    """

    name: str
    label: str
    optim: str
    is_ours: bool
    dtype: str
    description: str
    optim_args: str | None = None


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("fp32", "FP32 AdamW", "adamw_torch", False, "float32", 'everything in FP32, optim="adamw_torch"'),
        Variant(
            *("nearest", "BF16 nearest", "adamw_torch", False, "bfloat16"),
            'model.to(torch.bfloat16), norms included, rotary frequencies kept in FP32; optim="adamw_torch": '
            "torch.optim.AdamW, whose moments are then BF16 too and whose every operation rounds to nearest",
        ),
        Variant(
            *("split", "BF16 split", "adamw_bf16_split", True, "bfloat16"),
            'optim="adamw_bf16_split": weights, gradients and state in BF16, norms in FP32, and in the state '
            "the 16 bits that each BF16 weight lacks",
        ),
        Variant(
            *("sr", "BF16 stochastic", "adamw_bf16_sr", True, "bfloat16"),
            'optim="adamw_bf16_sr": weights, gradients and state in BF16, norms in FP32, stochastic rounding',
        ),
        Variant(
            *("kahan", "BF16 Kahan", "adamw_bf16_kahan", True, "bfloat16"),
            'optim="adamw_bf16_kahan": weights, gradients and state in BF16, norms in FP32, Kahan summation',
        ),
    )
}
"""The variants by name, in the order in which they are trained."""
